"""A shard's own files: whole or not there, private, one owner at a time, and what the system has against one of them."""
