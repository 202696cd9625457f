"""The steps of a model over tables: rows in before each of them, gradients out after it."""
