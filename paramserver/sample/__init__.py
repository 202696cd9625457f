"""Ids that exist on one shard, drawn at random."""
