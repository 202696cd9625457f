"""The values that a shard computes with: batches, tables, versions, and the rules of a row's change; and the registry of tables."""
