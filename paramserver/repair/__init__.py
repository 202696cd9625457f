"""Lost, foreign and old rows: noticed, and brought back to exactly the versions of the shard's index."""
