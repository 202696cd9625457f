"""A shard's part of save and load: the rows at one cut while training goes on, and rows written from a checkpoint."""
