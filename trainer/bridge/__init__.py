"""What the bridge of every framework needs: ports to the cluster, shared lookups, steps that push, batches with their rows. NumPy only."""
