"""The verbs of the `kvemb` command; `kvemb.cli` reads the command line itself."""
