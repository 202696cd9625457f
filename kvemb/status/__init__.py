"""What operators see of a cluster: asked from every shard and node, and printed as tables."""
