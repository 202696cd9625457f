"""The contract of every store: for a backend of your own, and for `kvemb doctor --conformance`."""
