"""The shard's two threads: the committer merges, journals and promises; the applier changes rows and answers."""
