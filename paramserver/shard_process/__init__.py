"""A shard as a process of its own: its data folder, its threads, its log."""
