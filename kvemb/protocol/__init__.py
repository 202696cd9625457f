"""The messages between trainers and parameter servers, and which shard gets which rows. Pure."""
