"""How many pushes of an async trainer may be on their way: those that are not applied yet, the oldest first.

Shards that fall behind would otherwise let rows grow old without bound. The wait comes before the next push is handed over. So a push that
failed is told while the gradients at hand can still be kept. What must not live here: what a push is (`sparse_optimizer`).
"""

from collections import deque

from kvemb.errors import InvalidInputError, KvembError, ShardUnavailableError

from .cluster_ports import AckPort

MAX_UNAPPLIED = 16
"""Pushes that may be on their way unless said otherwise: more than shards that keep up ever have."""


class Unapplied:
    """The acks of pushes that may not be applied yet.

    Args:
        limit: how many may be left when a step is over.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._acks: deque[AckPort] = deque()

    def wait_room(self, timeout_s: float | None) -> None:
        """Wait until one more push keeps within the limit (with a limit of 0 none does, and none is left).

        Raises:
            ShardUnavailableError: not within the time; that push still counts.
            KvembError: a push failed that nobody was told of.
        """
        self._wait(max(0, self.limit - 1), timeout_s)

    def add(self, ack: AckPort, timeout_s: float | None) -> None:
        """Take a push that was handed over, and wait where it is one too many; raises as `wait_room`."""
        self._acks.append(ack)
        self._wait(self.limit, timeout_s)

    def _wait(self, n_left: int, timeout_s: float | None) -> None:
        while len(self._acks) > n_left:
            oldest = self._acks[0]
            try:
                if not oldest.failure_seen:
                    oldest.wait_applied(timeout_s)
            except ShardUnavailableError:
                raise  # it may still be applied
            except KvembError:
                self._acks.popleft()
                raise
            self._acks.popleft()


def check_max_unapplied(max_unapplied: object) -> None:
    """Refuse what is no number of pushes.

    Raises:
        InvalidInputError: saying what is one.
    """
    if isinstance(max_unapplied, bool) or not isinstance(max_unapplied, int) or max_unapplied < 0:
        raise InvalidInputError(f"max_unapplied is {max_unapplied!r}; give a whole number of pushes, 0 or more")
