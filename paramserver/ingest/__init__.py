"""From a message to work for the committer: checked, in order, exactly once, in step, and bounded."""
