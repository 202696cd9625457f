"""The common parts of every framework's bridge: ports to the cluster, shared lookups, steps that push, batches with rows. NumPy only."""
