"""Which storage errors may pass by themselves, and how long to pause between tries. Shared by everything that writes rows."""

from collections.abc import Iterator

from kvemb.errors import DeadlineExceededError, NodeFullError, NodeUnavailableError, WrongNodeError

RETRYABLE = (NodeUnavailableError, DeadlineExceededError, NodeFullError, WrongNodeError)
"""A wrong node was not written to: every new connection reads the marker first. Its address may lead to the right one again."""
MAX_CONFLICT_ROUNDS = 16
CHANGED_BY_ANOTHER_WRITER = (
    f"were changed between every read and write of {MAX_CONFLICT_ROUNDS} tries; is another program writing to these nodes?"
)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


def retry_pauses() -> Iterator[float]:
    """Yield the pauses between tries, in seconds.

    Example:
        >>> from itertools import islice
        >>> list(islice(retry_pauses(), 7))
        [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
