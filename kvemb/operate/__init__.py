"""A cluster as operators see it: its status, its faults and their mends, and how many servers a table will need."""
