"""What becomes of work that was taken: it is journaled, released, applied, or fails, and whoever waits for it is told."""

from collections.abc import Callable, Sequence

from kvemb.errors import BarrierError, to_wire
from kvemb.protocol.messages import PushReply

from ..model.batch import PartTicket, Push, RowsWork, Work, items_of
from .barrier import Barrier
from .ingest_state import IngestState
from .sessions import Sessions
from .unapplied_parts import UnappliedParts
from .work_queue import WorkQueue


class Outcomes:
    """Tells the outcomes of one shard's work. Thread-safe, but for `give_up`.

    Args:
        state, sessions, barrier, pending, queue: ingest's.
    """

    def __init__(self, state: IngestState, sessions: Sessions, barrier: Barrier | None, pending: UnappliedParts, queue: WorkQueue) -> None:
        self._state, self._sessions, self._barrier, self._pending, self._queue = state, sessions, barrier, pending, queue

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
            if self._barrier is not None and handed_out:
                self._barrier.settled(item, self._state.clock())
            for part in item.parts:
                part.ticket.finish(reply(part.ticket))
