"""What was accepted and is not in storage yet: waited for by a flush and at the end, and told to whoever asks."""

from kvemb.net.deadline import Deadline

from .ingest_state import POLL_S, IngestState
from .unapplied_parts import UnappliedParts
from .work_queue import WorkQueue


class Backlog:
    """What one shard has accepted and storage does not have yet. Thread-safe.

    Args:
        state, pending, queue: ingest's.
    """

    def __init__(self, state: IngestState, pending: UnappliedParts, queue: WorkQueue) -> None:
        self._state, self._pending, self._queue = state, pending, queue

    def flush(self, deadline: Deadline, *, table: str = "") -> str:
        """Wait until every push accepted before this call is applied, and its rows are in storage.

        What lacks another's push in its sync step was not accepted: that may be the next one of whoever flushes. Pushes whose last part is
        still to come were not, either.

        Args:
            deadline: of the wait.
            table: key of a table whose rows nobody may bring any more: pushes with rows of it are waited for in any case.

        Returns:
            What was left out, and whom it waits for; "" for nothing.

        Raises:
            DeadlineExceededError: with the last storage error, or what a sync step waits for.
            ShardFailedError: it will never be applied.
        """
        with self._state.changed:
            lacking, said = self._queue.lacking()
            wanted = self._pending.numbers(without=[push for push in lacking if table not in push.table_keys])
            while any(number in self._pending for number in wanted):
                self._state.wait(deadline, f"{len(self._pending)} pushes to be applied")
            if self._state.failure is not None:
                raise self._state.failure
            return said

    def drain(self, deadline: Deadline) -> bool:
        """Take nothing new from now on and wait until everything accepted is applied and written; return whether it is.

        Pushes that wait for the others of their sync step were not accepted; their trainers send them again after the restart.
        """
        state = self._state
        with state.changed:
            state.drain()
            while (owes := self._owes()) and state.failure is None and not deadline.expired:
                state.changed.wait(min(POLL_S, deadline.remaining_s()))
            return not owes and state.failure is None

    @property
    def quiet(self) -> bool:
        """Whether everything that was accepted is applied. What waits for others of its sync step, or for its last part, was not."""
        with self._state.changed:
            return len(self._pending) == len(self._queue.in_unfinished_steps())

    def n_and_age_s(self) -> tuple[int, float]:
        """Return (pushes and row changes that wait, age of the oldest in seconds)."""
        with self._state.changed:
            return len(self._pending), self._pending.age_s(self._state.clock())

    def describe(self) -> str:
        """Say what is not applied, for the last words of a shard that could not drain."""
        with self._state.changed:
            text = self._pending.describe()
            return text + (f"; last error: {waits}" if (waits := self._state.waits_for) else "")

    def _owes(self) -> bool:
        return len(self._pending) > len(self._queue.in_unfinished_steps())
