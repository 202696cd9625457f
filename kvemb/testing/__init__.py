"""For a backend's tests: the contract of every store, and real servers to run it on. Imported by tests only."""
