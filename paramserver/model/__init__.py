"""What a shard computes with: batches, tables, versions, and what a row may become. No I/O but the registry's file."""
