"""Which storage errors may pass by themselves, and how long to pause between tries. Shared by everything that writes rows."""

from collections.abc import Iterator

from kvemb.errors import DeadlineExceededError, NodeFullError, NodeUnavailableError, WrongNodeError
from kvemb.net.backoff import pauses

RETRYABLE = (NodeUnavailableError, DeadlineExceededError, NodeFullError, WrongNodeError)
"""A wrong node was not written to: every new connection reads the marker first. Its address may lead to the right one again."""
MAX_CONFLICT_ROUNDS = 16
CHANGED_BY_ANOTHER_WRITER = (
    f"were changed between every read and write of {MAX_CONFLICT_ROUNDS} tries; is another program writing to these nodes?"
)


def retry_pauses() -> Iterator[float]:
    """Yield the pauses between tries, in seconds."""
    return pauses(0.05, 2.0)
