"""Storage nodes and shards that come and go while training goes on (docs/scaling.md)."""
