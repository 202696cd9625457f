"""What a shard must know to go on after a stop: its claim, its saved state, and the journal replayed over it."""
