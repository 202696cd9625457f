"""The feed: what the shards of a cluster change, event by event (docs/feed.md)."""
