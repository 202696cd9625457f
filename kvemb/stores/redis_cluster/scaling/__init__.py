"""Nodes that join and leave a Redis Cluster or a Valkey Cluster: the cluster moves its slots itself, and this drives it."""
