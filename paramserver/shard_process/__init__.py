"""A shard as a process of its own: its data folder and its threads."""
