"""What the bridge of every framework needs: ports to the cluster, shared lookups, the bound on unapplied pushes. NumPy only."""
