"""Work that waits for the committer, in order, and what of it becomes one batch. Pure: the clock is passed in; ingest locks."""

from collections import deque

from kvemb.errors import PushRejectedError, to_wire

from ..model.batch import Push, RefusedStep, RowsWork, Work
from .aggregate import hyper_by_table, n_mergeable
from .barrier import Barrier


class WorkQueue:
    """Pushes and row changes in the order in which they were taken, until the committer takes them.

    Args:
        barrier: in sync mode; None takes pushes as they come.
    """

    def __init__(self, barrier: Barrier | None) -> None:
        self._barrier = barrier
        self._queue: deque[Work] = deque()

    def add(self, item: Push | RowsWork) -> None:
        """Append an item; in sync mode a push waits for the others of its step first."""
        if isinstance(item, RowsWork):
            self._queue.append(item)
        elif self._barrier is None:
            self._queue.append([item])
        else:
            self._barrier.add(item)

    def take(self, limit: int, now_s: float) -> list[Work]:
        """Return at most `limit` pieces of work.

        Raises:
            BarrierError: a sync step cannot be completed.
        """
        if self._barrier is not None:
            self._release_steps(self._barrier)
            if not self._queue:
                self._barrier.check_overdue(now_s)
        return [self._pop() for _ in range(limit) if self._queue]

    def due_s(self) -> float | None:
        """When a sync step fails that waits for somebody, on the clock of `Push.arrived_s`; None while none waits."""
        return None if self._barrier is None else self._barrier.deadline_s()

    def in_unfinished_steps(self) -> list[Push]:
        """Return the pushes that wait for the others of their sync step."""
        return [] if self._barrier is None else self._barrier.waiting()

    def lacking(self) -> tuple[list[Push], str]:
        """Return those whose step lacks the push of a member, and say whose; see `Barrier.lacking`."""
        return ([], "") if self._barrier is None else self._barrier.lacking()

    def forget_unfinished(self) -> None:
        """Forget those pushes."""
        if self._barrier is not None:
            self._barrier.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._queue.clear()
        self.forget_unfinished()

    def _release_steps(self, barrier: Barrier) -> None:
        while step := barrier.next_step():
            try:
                hyper_by_table(part for push in step for part in push.parts)
                self._queue.append(step)
            except PushRejectedError as error:
                self._queue.append(RefusedStep(tuple(step), to_wire(error)))

    def _pop(self) -> Work:
        first = self._queue.popleft()
        if not isinstance(first, list) or self._barrier is not None:
            return first
        pushes = list(first)
        for item in self._queue:
            if not isinstance(item, list):
                break
            pushes += item
        n = n_mergeable(pushes)
        for _ in range(n - 1):
            self._queue.popleft()
        return pushes[:n]
