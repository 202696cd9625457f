"""The shard's part of altering a table while training goes on."""
