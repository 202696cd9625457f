"""What becomes of work that was taken: it is journaled, released, applied, or fails, and whoever waits for it is told. And what of it is
not applied yet: waited for by a flush and at the end, and told to whoever asks."""

from collections.abc import Callable, Sequence

from kvemb.errors import BarrierError, to_wire
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import PushReply

from ..model.batch import PartTicket, Push, RowsWork, Work, items_of
from .ingest_state import POLL_S, IngestState
from .sessions import Sessions
from .work_queue import UnappliedParts, WorkQueue


class Outcomes:
    """Tells the outcomes of one shard's work. Thread-safe, but for `give_up`.

    Args:
        state, sessions, pending, queue: ingest's.
    """

    def __init__(self, state: IngestState, sessions: Sessions, pending: UnappliedParts, queue: WorkQueue) -> None:
        self._state, self._sessions, self._pending, self._queue = state, sessions, pending, queue

    def journaled(self, group: Sequence[Work]) -> None:
        """Tell everybody that these pushes are in the journal: they will be applied, whatever happens."""
        with self._state.changed:
            if self._state.failure is not None:
                return  # they have their answer; the journal may know better, as after any lost reply
            for push in [item for work in group for item in items_of(work) if isinstance(item, Push)]:
                self._sessions.journaled(push)
                for part in push.parts:
                    part.ticket.accept()

    def release(self, replies: Sequence[tuple[PartTicket, PushReply]]) -> None:
        """Tell trainers of parts of a batch that is computed what they need to go on; its outcome follows."""
        with self._state.changed:
            if self._state.failure is None:
                for ticket, reply in replies:
                    ticket.release(reply)

    def settle(self, work: Work, replies: dict[int, PushReply]) -> None:
        """Record that work was applied.

        Args:
            work: as taken.
            replies: outcome of each part, by id() of its ticket.
        """
        with self._state.changed:
            if self._state.failure is not None:
                return  # everything had its answer then
            for item in items_of(work):
                self._forget(item, lambda ticket: replies[id(ticket)])
            self.written()

    def written(self) -> None:
        """Record that storage has taken rows: what was tried again is done."""
        with self._state.changed:
            self._state.trouble.storage_works()
            self._state.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop applying for good: everything pending and everything later gets ShardFailedError with this cause.

        After a FencedError it is ShardUnavailableError: whoever took the shard over answers for it, so trainers are to ask again.
        """
        with self._state.changed:
            if self._state.failure is not None:
                return
            failure = to_wire(self._state.fail(error))
            in_step = {id(push) for push in self._queue.in_unfinished_steps()} if isinstance(error, BarrierError) else set()
            for item in self._pending.all():
                self.give_up(item, to_wire(error) if id(item) in in_step else failure)
            self._sessions.drop_all_incomplete(failure)
            self._queue.clear()

    def give_up(self, item: Push | RowsWork, cause: dict[str, str], *, handed_out: bool = True) -> None:
        """Let work fail that was taken; under the lock. A push that waits for its step was not handed out."""
        self._forget(item, lambda ticket: PushReply(ticket.sequence, "failed", error=cause), handed_out=handed_out)

    def _forget(self, item: Push | RowsWork, reply: Callable[[PartTicket], PushReply], *, handed_out: bool = True) -> None:
        self._pending.remove(item)
        if isinstance(item, Push):
            self._sessions.settled(item)
            if self._state.steps is not None and handed_out:
                self._state.become(self._state.steps.settled(item, self._state.clock()))
            for part in item.parts:
                part.ticket.finish(reply(part.ticket))


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
