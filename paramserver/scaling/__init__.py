"""Slots that move while pushes go on: between nodes, where rows are copied, and between shards, where they change their writer."""
