"""What the tables of one open connection share: access to storage and shards, the counter of its writes, and nodes that moved."""
