"""From a message to work for the committer: checked, in order, exactly once, in step, and never more than there is room for."""
