"""Small values that every storage node holds, and by which a cluster agrees: markers, shard owners, node map, registry of tables."""
