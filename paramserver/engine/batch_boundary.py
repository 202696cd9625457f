"""The moments between two batches: others may ask for one, and get it before the next batch begins. Thread-safe."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvemb.errors import DeadlineExceededError
from kvemb.net.deadline import Deadline


class BatchBoundary:
    """The moment between two batches of one shard. The apply thread passes it; whoever needs rows and index at rest steps in there."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = False
        self._n_waiting = 0

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Hold the gate for one batch; those who wait for a moment between batches go first."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and not self._n_waiting)
            self._busy = True
        try:
            yield
        finally:
            self._free()

    @contextmanager
    def between(self, deadline: Deadline) -> Iterator[None]:
        """Hold the gate while no batch is under way.

        Raises:
            DeadlineExceededError: the batch under way did not end in time (storage does not answer, most likely).
        """
        with self._changed:
            self._n_waiting += 1
            try:
                free = self._changed.wait_for(lambda: not self._busy, deadline.remaining_s())
            finally:
                self._n_waiting -= 1
                self._changed.notify_all()
            if not free:
                raise DeadlineExceededError(f"the batch under way did not end within {deadline.timeout_s:g} s; is a storage node down?")
            self._busy = True
        try:
            yield
        finally:
            self._free()

    def _free(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
