"""The feed of one shard: it tells subscribers what changed, from its journal and its row log."""
