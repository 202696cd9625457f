"""A row's later life as operators ask for it (docs/id-lifecycle.md); `kvemb.admit` and `kvemb.evict` are the policies."""
