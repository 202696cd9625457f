"""Small values that every node holds, and by which a cluster agrees: markers, shard owners, the cluster map, registry of tables."""
