"""A projection: a maintained copy of tables' weights in another Redis or Valkey server, fed by the feed. See docs/projection.md."""
