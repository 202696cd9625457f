"""Pure array code over ids and weights: hashing, unique ids, sums by id, rounding, maps from ids to numbers, the cache of records."""
