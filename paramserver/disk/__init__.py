"""A shard's own files: whole or not there, private, with one owner at a time; and why one of them cannot be used."""
