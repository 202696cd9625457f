"""A table's definition, the bytes of its records, the keys they are stored under, and pages. Pure."""
