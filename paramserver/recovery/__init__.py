"""How a shard goes on after any end: it claims its place, reads its saved state, and replays the journal over it."""
