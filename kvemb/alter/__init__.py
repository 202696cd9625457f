"""A table that has rows gets another definition (docs/id-lifecycle.md)."""
