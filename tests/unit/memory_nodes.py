"""Nodes in memory that no other test has used.

They live as long as the process, and a test module that others import exists twice in it, its counters too: so the count is kept here.
"""

from itertools import count

_NUMBERS = count()


def unused_nodes(n: int = 2) -> tuple[str, ...]:
    """Return the addresses of n empty nodes."""
    number = next(_NUMBERS)
    return tuple(f"unused-{number}-{index}:1" for index in range(n))
