"""What operators ask of one shard."""
