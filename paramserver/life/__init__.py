"""Which rows a table's policy sends away, and the walk that finds them: erased like any others, a small portion between two batches."""
