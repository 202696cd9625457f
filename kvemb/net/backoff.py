"""How long to wait between tries: a little at first, twice as long from try to try, up to a longest. Pure.

What must not live here: which errors are worth another try, what is waited on meanwhile, and the deadline. Every caller has its own.
"""

from collections.abc import Iterator


def pauses(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield pauses in seconds, without an end. After a success, call it again for a new iterator.

    Example:
        >>> from itertools import islice
        >>> list(islice(pauses(0.05, 2.0), 7))
        [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    """
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)
