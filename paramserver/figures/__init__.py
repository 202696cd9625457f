"""A shard's figures for Prometheus: all of them are counted elsewhere, and read here when somebody scrapes."""
