"""Maps in memory from ids to numbers, and the cache of records that is built on them. Pure, NumPy only."""
