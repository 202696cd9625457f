"""Redis Cluster and Valkey's: its own slot map, redirects followed, a marker and a repair per slot."""
