"""The shard's two threads: the committer merges, journals and acknowledges; the apply thread changes rows and answers."""
