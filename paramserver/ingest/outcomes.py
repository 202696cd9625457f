"""The outcomes of accepted work, told to its waiters: journaled, released, applied or failed. And the backlog: the part not applied yet."""

from collections.abc import Callable, Sequence

from kvemb.errors import BarrierError, n_of, to_wire
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import PushReply

from ..model.batch import PartTicket, Push, RowsWork, Work, items_of
from .ingest_state import POLL_S, IngestState
from .sessions import Sessions
from .work_queue import UnappliedParts, WorkQueue


class Outcomes:
    """Tells the outcomes of one shard's work. Thread-safe, apart from `give_up`, which needs the lock."""

    def __init__(self, state: IngestState, sessions: Sessions, pending: UnappliedParts, queue: WorkQueue) -> None:
        self._state, self._sessions, self._pending, self._queue = state, sessions, pending, queue

    def journaled(self, group: Sequence[Work]) -> None:
        """Tell the waiters that these pushes are in the journal: they will be applied, also after a crash."""
        with self._state.changed:
            if self._state.failure is not None:
                return  # they have their answer; the journal may know better, as after any lost reply
            for push in [item for work in group for item in items_of(work) if isinstance(item, Push)]:
                self._sessions.journaled(push)
                for part in push.parts:
                    part.ticket.accept()

    def release(self, replies: Sequence[tuple[PartTicket, PushReply]]) -> None:
        """Give trainers the replies that they need to go on, for parts of a batch that is computed; its outcome follows."""
        with self._state.changed:
            if self._state.failure is None:
                for ticket, reply in replies:
                    ticket.release(reply)

    def settle(self, work: Work, replies: dict[int, PushReply]) -> None:
        """Record that work was applied."""
        with self._state.changed:
            if self._state.failure is not None:
                return  # everything had its answer then
            for item in items_of(work):
                self._forget(item, lambda ticket: replies[id(ticket)])
            self.written()

    def written(self) -> None:
        """Record that storage has taken rows, so that no try is waited for."""
        with self._state.changed:
            self._state.trouble.storage_works()
            self._state.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop applying for good: all pending and all later work gets ShardFailedError with this cause.

        After a FencedError it is ShardUnavailableError: another process has the shard and answers for it, so trainers are to try again.
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
        """Let accepted work fail; under the lock. Not `handed_out`: a push that waits for its step."""
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
    """The work that one shard has accepted and storage does not have yet. Thread-safe."""

    def __init__(self, state: IngestState, pending: UnappliedParts, queue: WorkQueue) -> None:
        self._state, self._pending, self._queue = state, pending, queue

    def flush(self, deadline: Deadline, *, table: str = "", steps_held: bool = False) -> str:
        """Wait until every push accepted before this call is applied, and its rows are in storage.

        A push whose sync step lacks another trainer's push does not count as accepted: the missing one may be the flushing trainer's own
        next push. Nor does a push whose last part is still to come.

        Returns:
            The step that was not waited for, and the trainers that it lacks; "" for none.
        """
        with self._state.changed:
            lacking, said = (self._queue.in_unfinished_steps(), "") if steps_held else self._queue.lacking()
            wanted = self._pending.numbers(without=[push for push in lacking if table not in push.table_keys])
            while any(number in self._pending for number in wanted):
                self._state.wait(deadline, f"{n_of(len(self._pending), 'push', 'pushes')} to be applied")
            if self._state.failure is not None:
                raise self._state.failure
            return said

    def drain(self, deadline: Deadline) -> bool:
        """Take nothing new from now on and wait until all accepted work is applied and stored; return whether it is.

        Pushes that wait for the others of their sync step do not count; their trainers send them again after the restart.
        """
        state = self._state
        with state.changed:
            state.drain()
            while not (quiet := self.quiet) and state.failure is None and not deadline.expired:
                state.changed.wait(min(POLL_S, deadline.remaining_s()))
            return quiet and state.failure is None

    @property
    def quiet(self) -> bool:
        """Whether all accepted work is applied; pushes that wait for others of their sync step, or for their last part, do not count."""
        with self._state.changed:
            return len(self._pending) == len(self._queue.in_unfinished_steps())

    def n_and_age_s(self) -> tuple[int, float]:
        """Return (pushes and row changes that wait, age of the oldest in seconds)."""
        with self._state.changed:
            return len(self._pending), self._pending.age_s(self._state.clock())

    def describe(self) -> str:
        """Describe the work that is not applied, for the last log line of a shard that could not drain."""
        with self._state.changed:
            text = self._pending.describe()
            return text + (f"; last error: {waits}" if (waits := self._state.waits_for) else "")
