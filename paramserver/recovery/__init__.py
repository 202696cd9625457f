"""Recovery after any end of a shard: it claims its place, reads its saved state, and replays the journal over it."""
