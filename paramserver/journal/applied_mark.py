"""The mark up to which the journal is applied: set by the apply thread, waited for by those who read behind it."""

import threading

from .segment import Position


class AppliedMark:
    """The last batch applied. Thread-safe; costs an apply one notification.

    Args:
        k: of the last batch applied before this process began.
        position: behind its entry, or behind later ones that are no batches.
    """

    def __init__(self, k: int, position: Position) -> None:
        self._changed = threading.Condition()
        self._now, self._n_changes = (k, position), 0

    @property
    def now(self) -> tuple[int, Position]:
        """The number of the last batch applied, and the position behind its entry."""
        return self._now

    @property
    def n_changes(self) -> int:
        """How often the mark has changed, or its readers were woken."""
        return self._n_changes

    def reach(self, k: int, position: Position) -> None:
        """Note that a batch is applied, all of it."""
        with self._changed:
            self._now = k, position
            self._n_changes += 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Have every reader look again: there is an entry that is no batch, or a reader is to end."""
        with self._changed:
            self._n_changes += 1
            self._changed.notify_all()

    def wait(self, n_changes: int, timeout_s: float) -> None:
        """Wait until there are more changes than these."""
        with self._changed:
            self._changed.wait_for(lambda: self._n_changes != n_changes, timeout_s)
