"""What the tables of one open connection share: access to storage and shards, the count of its writes, nodes that moved, checkpoints."""
