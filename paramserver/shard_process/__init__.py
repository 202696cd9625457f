"""What a shard has of its own as a process: its data folder, its threads, its log."""
