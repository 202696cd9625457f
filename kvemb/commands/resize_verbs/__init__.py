"""`kvemb nodes`, `kvemb shards` and `kvemb moves`, on our kinds and on a Redis Cluster."""
