"""A table's definition, the bytes of its records, and where these lie: slots, keys, buckets, pages, the cluster map and its moves. Pure."""
