"""Pure array functions over ids and weights: hashing, unique ids, sums by id, rounding, the inverse normal distribution."""
