"""A shard's start, run and stop, in order. The one place that knows all parts."""
