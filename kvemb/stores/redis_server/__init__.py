"""One Redis or Valkey server: commands, administration, compare-and-set, and the keys of rows among its keys."""
