"""Lost, foreign and old rows: noticed, and brought back to exactly what the shard's index says."""
