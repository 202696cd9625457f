"""Ingest: everything between "a message came in" and "the committer takes it", under one lock.

It takes parts in order, bounds what waits (a stream that finds no room is simply not read any further: HTTP/2 flow control is the
backpressure), hands work to the one committer and tells every waiter: "accepted" when its push is in the journal, and the outcome. What is
decided is decided in pure code beside (sessions, barrier, aggregate); no I/O here.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvemb.errors import (
    BarrierError,
    DeadlineExceededError,
    FencedError,
    JournalFullError,
    KvembError,
    ShardFailedError,
    ShardUnavailableError,
    TableDroppedError,
    to_wire,
)
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import PushPart, PushReply

from ..engine.write_behind import WriteBehind
from ..model.batch import ERASE, CheckedRows, PartTicket, Push, ReceivedPart, RowsWork, Sink, Work, items_of
from ..model.table_registry import AFTER_A_DROP
from .aggregate import hyper_by_table
from .barrier import Barrier
from .sessions import Session, Sessions
from .trouble import Trouble
from .unapplied_parts import Limits, UnappliedParts
from .work_queue import WorkQueue

_POLL_S = 1.0  # of waits that have nothing to wake them but a notification that cannot be missed: only a belt to the braces

log = logging.getLogger("paramserver")

Record = Callable[[str, int], None]
"""(trainer, incarnation, or 0 for a goodbye): makes it durable. Raises JournalFullError, FencedError."""


class Ingest:
    """The queue of a shard.

    Args:
        sessions: of this shard.
        barrier: in sync mode; None applies as pushes come.
        limits: bounds.
        record: keeps hellos and goodbyes.
        behind: what holds applied rows back from storage; None where nothing does.
        clock: monotonic.
    """

    def __init__(
        self,
        sessions: Sessions,
        barrier: Barrier | None,
        limits: Limits | None = None,
        record: Record = lambda trainer, incarnation: None,
        behind: WriteBehind | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sessions = sessions
        self._barrier = barrier
        self._record, self._clock = record, clock
        self._dropping: set[str] = set()  # decided, and not in the journal yet
        self._tables_gone: set[str] = set()  # keys
        self._changed = threading.Condition()
        self._queue = WorkQueue(barrier)
        self._pending = UnappliedParts(limits or Limits(), sync=barrier is not None)
        self._draining = self._stopped = False
        self._failure: ShardFailedError | ShardUnavailableError | None = None
        self._lost: KvembError | None = None
        self._behind = behind
        self.trouble = Trouble()

    # --- trainers come and go --------------------------------------------------------------------------------------------------

    def hello(self, trainer: str, incarnation: int) -> tuple[int, int]:
        """Grant a hello and make it durable; return (incarnation, last sequence taken).

        Raises:
            KvembError: what `Sessions.check_hello`, `Barrier` and `Record` raise; the trainer may say hello again.
        """
        with self._changed:
            self._refuse_if_closed()
            while trainer in self._dropping:  # the journal must have that before it has this hello
                if self.trouble.journal:
                    raise ShardUnavailableError(f"a hello cannot be answered now: {self.trouble.journal}")
                self._changed.wait(_POLL_S)
                self._refuse_if_closed()
            self.sessions.check_hello(trainer, incarnation)
            if self._barrier is not None:
                self._barrier.check_join(trainer)
            session = self.sessions.hello(trainer, incarnation)
            if self._barrier is not None:
                for push in self._barrier.join(trainer, session.incarnation, self._clock()):
                    self._give_up(push, self.sessions.fenced(trainer, push.incarnation))
            self._changed.notify_all()
            granted, recorded = (session.incarnation, session.last_sequence), session.recorded
        if not recorded:
            try:
                self._record(trainer, granted[0])
            except JournalFullError as error:
                raise ShardUnavailableError(f"a hello cannot be answered now: {error}") from error
            session.record()
        return granted

    def first_step(self, trainer: str) -> int:
        """Return the number of the sync step that a trainer's next push is for; 0 in async mode, and while nobody knows."""
        with self._changed:
            return 0 if self._barrier is None else self._barrier.first_step(trainer)

    def bye(self, trainer: str, incarnation: int) -> None:
        """Let a trainer go; durable first, since a sync step without it may follow at once (or not, when the disk is full)."""
        with self._changed:
            self.sessions.find(trainer, incarnation)
        with suppress(JournalFullError):
            self._record(trainer, 0)
        with self._changed:
            self.sessions.bye(trainer, incarnation)
            if self._barrier is not None:
                self._barrier.leave(trainer)
            self._changed.notify_all()

    # --- work comes in ---------------------------------------------------------------------------------------------------------

    def submit(
        self,
        part: PushPart,
        tables: tuple[CheckedRows, ...],
        sink: Sink,
        cancelled: Callable[[], bool],
        prefetched: tuple[CheckedRows, ...] = (),
    ) -> None:
        """Take a checked part, waiting for room; the sink hears "accepted" when its push is in the journal, and the outcome later.

        Raises:
            PushRejectedError, TableDroppedError, FencedError: nothing was taken; the sequence may be used again.
            ShardUnavailableError, ShardFailedError: the shard takes no pushes.
        """
        size = sum(rows.size_bytes for rows in (*tables, *prefetched))
        with self._changed:
            session = self._wait_for_room(part, cancelled)
            if self._barrier is not None:
                self._barrier.heard(part.trainer, self._clock())
            ticket = session.known(part.sequence, part.digest)
            if ticket is not None:
                ticket.answer(sink)
                return
            new = ReceivedPart(tables, PartTicket(part.sequence, part.digest, size, return_rows=part.return_rows), prefetched)
            self._pending.check_size(session, new)
            together = [*(session.incomplete if session.incomplete_step == part.step else ()), new]
            self._refuse_dropped([rows for one in together for rows in (*one.tables, *one.prefetched)])
            hyper_by_table(together)
            session.accept(new, part.step)
            new.ticket.answer(sink)
            if not part.more:
                self._enqueue(session.complete(part.step, self._clock()))

    def answer_known(self, part: PushPart, sink: Sink) -> bool:
        """Answer a part that was taken before its table was dropped, and is sent again; return whether it is one."""
        with self._changed:
            if not self.sessions.is_live(part.trainer, part.incarnation):
                return False
            ticket = self.sessions.find(part.trainer, part.incarnation).known(part.sequence, part.digest)
            if ticket is not None:
                ticket.answer(sink)
            return ticket is not None

    def give_up(self, part: PushPart, error: KvembError) -> None:
        """Give up the push of a part that was refused: the parts of it taken before fail too, and leave their sequences free."""
        with self._changed:
            if self.sessions.is_live(part.trainer, part.incarnation):
                session = self.sessions.find(part.trainer, part.incarnation)
                if session.incomplete and session.incomplete_step == part.step and part.sequence == session.last_sequence + 1:
                    session.give_up_incomplete(to_wire(error))

    def submit_rows(self, work: RowsWork, deadline: Deadline) -> int:
        """Queue an assign or erase and wait until it is applied; return how many of its rows existed before.

        Raises:
            DeadlineExceededError: it stays queued and will be applied.
        """
        with self._changed:
            while not self._pending.has_room():
                self._refuse_if_closed()
                self._wait(deadline, "room in the shard's queue")
            self._refuse_if_closed()
            if work.kind != ERASE:
                self._refuse_dropped([work.rows])
            number = self._enqueue(work)
            while number in self._pending:
                self._wait(deadline, f"{work.kind} to be applied; it stays queued")
            if self._failure is not None and not work.applied:
                raise self._failure
            return work.n_existed

    def refuse_table(self, key: str) -> None:
        """Take no rows of a table from now on, also none that were checked before; it is being dropped."""
        with self._changed:
            self._tables_gone.add(key)

    def wake(self) -> None:
        """Let waiting submitters look at their `cancelled` again."""
        with self._changed:
            self._changed.notify_all()

    # --- the committer and the apply thread ------------------------------------------------------------------------------------

    def take(self, limit: int = 1) -> list[Work]:
        """Return at most `limit` pieces of work, waiting for the first; none when the shard stops.

        Raises:
            BarrierError: a sync step cannot be completed; the caller calls `fail`.
            KvembError: what `fail_from_outside` was told; likewise.
        """
        while True:
            with self._changed:
                group = self._take(limit)
                late = {} if group or self._barrier is None else self._fence_late(self._barrier)
            if not late:
                return group
            self._drop(late)

    def _take(self, limit: int) -> list[Work]:
        """The same; also returns with nothing when there are members to drop."""
        while not self._stopped:
            if self._lost is not None:
                lost, self._lost = self._lost, None
                raise lost
            if self._failure is None:
                group = self._queue.take(limit, self._clock())
                if group or (self._barrier is not None and self._barrier.lost(self._clock())):
                    return group
            due_s = self._queue.due_s()
            self._changed.wait(None if due_s is None else min(_POLL_S, max(0.0, due_s - self._clock())))
        return []

    def _fence_late(self, barrier: Barrier) -> dict[str, int]:
        """Let in nothing more from the members that a step has waited for too long; return their fences."""
        if self._stopped:
            return {}
        now_s = self._clock()
        late, why = barrier.lost(now_s), barrier.waits_for(now_s)
        self._dropping.update(late)
        for trainer in late:
            log.warning("trainer %s is dropped: %s", trainer, why)
        return {trainer: self.sessions.fence(trainer, why) for trainer in late}

    def _drop(self, late: dict[str, int]) -> None:
        """Go on without members: first durable, so that a restart knows them no more, then the step that waits for them."""
        recorded = all(self._record_for_sure(trainer, number) for trainer, fence in late.items() for number in (fence, 0))
        with self._changed:
            if self._barrier is not None and recorded:
                for trainer in late:
                    self._barrier.drop(trainer)
            self._dropping.difference_update(late)
            self._changed.notify_all()

    def _record_for_sure(self, trainer: str, incarnation: int) -> bool:
        """Record, again and again while the disk is full; return whether it was possible before the shard was stopped."""
        while True:
            try:
                self._record(trainer, incarnation)
                self.trouble.journal_works()
                return True
            except JournalFullError as error:
                self.trouble.journal_waits(f"{type(error).__name__}: {error}")
            with self._changed:
                if self._stopped:
                    return False
                self._changed.wait(_POLL_S)

    def journaled(self, group: Sequence[Work]) -> None:
        """Tell everybody that these pushes are in the journal: they will be applied, whatever happens."""
        with self._changed:
            if self._failure is not None:
                return  # they have their answer; the journal may know better, as after any lost reply
            for push in [item for work in group for item in items_of(work) if isinstance(item, Push)]:
                self.sessions.journaled(push)
                for part in push.parts:
                    part.ticket.accept()

    def fail_from_outside(self, error: KvembError) -> None:
        """Let the committer fail with this error before it takes more: told from outside that rows are lost."""
        with self._changed:
            self._lost = error
            self._changed.notify_all()

    def release(self, replies: Sequence[tuple[PartTicket, PushReply]]) -> None:
        """Tell trainers of parts of a batch that is computed what they need to go on; its outcome follows."""
        with self._changed:
            if self._failure is None:
                for ticket, reply in replies:
                    ticket.release(reply)

    def settle(self, work: Work, replies: dict[int, PushReply]) -> None:
        """Record that work was applied.

        Args:
            work: as taken.
            replies: outcome of each part, by id() of its ticket.
        """
        with self._changed:
            if self._failure is not None:
                return  # everything had its answer then
            for item in items_of(work):
                self._forget(item, lambda ticket: replies[id(ticket)])
            self.trouble.storage_works()
            self._changed.notify_all()

    def written(self) -> None:
        """Record that storage has taken rows: what was tried again is done."""
        with self._changed:
            self.trouble.storage_works()
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop applying for good: everything pending and everything later gets ShardFailedError with this cause.

        After a FencedError it is ShardUnavailableError: whoever took the shard over answers for it, so trainers are to ask again.
        """
        text = f"{type(error).__name__}: {error}"
        with self._changed:
            if self._failure is not None:
                return
            if isinstance(error, FencedError):
                self._failure = ShardUnavailableError(f"this process has lost the shard: {error}")
            else:
                self._failure = ShardFailedError(f"the shard stopped applying: {text.rstrip('.')}. Mend the cause, then restart the shard.")
            self.trouble.storage_waits(text)
            in_step = {id(push) for push in self._queue.in_unfinished_steps()} if isinstance(error, BarrierError) else set()
            for item in self._pending.all():
                cause = to_wire(error if id(item) in in_step else self._failure)
                self._forget(item, lambda ticket, cause=cause: PushReply(ticket.sequence, "failed", error=cause))  # type: ignore[misc]
            self.sessions.drop_all_incomplete(to_wire(self._failure))
            self._queue.clear()
            self._changed.notify_all()

    # --- waiting and asking ----------------------------------------------------------------------------------------------------

    def flush(self, deadline: Deadline) -> None:
        """Wait until every push taken before this call is applied, and its rows are in storage.

        Pushes whose last part is still to come are not waited for.

        Raises:
            DeadlineExceededError: with the last storage error, or what a sync step waits for.
            ShardFailedError: it will never be applied.
        """
        with self._changed:
            last = self._pending.last
            while self._pending.up_to(last):
                self._wait(deadline, f"{len(self._pending)} pushes to be applied")
            if self._failure is not None:
                raise self._failure
            newest_k = 0 if self._behind is None else self._behind.newest_k
            while self._owes_rows(newest_k):
                self._wait(deadline, "rows of applied pushes to be written to storage")

    def drain(self, deadline: Deadline) -> bool:
        """Take nothing new from now on and wait until everything accepted is applied and written; return whether it is.

        Pushes that wait for the others of their sync step were not accepted; their trainers send them again after the restart.
        """
        with self._changed:
            self._draining = True
            self._changed.notify_all()
            while (self._n_owed() or self._owes_rows()) and self._failure is None and not deadline.expired:
                self._changed.wait(min(_POLL_S, deadline.remaining_s()))
            return not self._n_owed() and not self._owes_rows() and self._failure is None

    def _owes_rows(self, newest_k: int | None = None) -> bool:
        """Whether rows of batches up to this one (None: of any) are still to be written; has that done then."""
        if self._behind is None or not self._behind.owes(self._behind.newest_k if newest_k is None else newest_k):
            return False
        self._behind.ask()
        return True

    def _n_owed(self) -> int:
        return len(self._pending) - len(self._queue.in_unfinished_steps())

    def stop(self) -> None:
        """Let the committer end after what it is doing."""
        with self._changed:
            self._draining = self._stopped = True
            self._changed.notify_all()

    def pending(self) -> tuple[int, float]:
        """Return (pushes and row changes that wait, age of the oldest in seconds)."""
        with self._changed:
            return len(self._pending), self._pending.age_s(self._clock())

    def describe_pending(self) -> str:
        """Say what is not applied, for the last words of a shard that could not drain."""
        with self._changed:
            text = self._pending.describe()
            if self._behind is not None and self._behind.n_rows:
                text += f"; {self._behind.n_rows} applied rows are not written to storage"
            return text + (f"; last error: {waits}" if (waits := self.waits_for) else "")

    @property
    def waits_for(self) -> str:
        """What pushes wait for at the moment, disk, storage or a trainer, or ""."""
        with self._changed:
            late = "" if self._barrier is None else self._barrier.waits_for(self._clock())
        return "; ".join(filter(None, (str(self.trouble), late)))

    def to_save(self) -> tuple[list[tuple[str, int, int]], tuple[tuple[str, int], ...], bool]:
        """Return what a restart needs to know of trainers: sessions, members of a sync job, whether that was complete."""
        with self._changed:
            if self._barrier is None:
                return self.sessions.to_save(), (), False
            return self.sessions.to_save(), self._barrier.membership.members, self._barrier.membership.complete

    @property
    def failure(self) -> str:
        """Why the shard stopped applying, or ""."""
        return str(self._failure) if self._failure is not None else ""

    @property
    def n_trainers(self) -> int:
        """Trainers that are here."""
        with self._changed:
            return len(self.sessions.live)

    # --- inside the lock -------------------------------------------------------------------------------------------------------

    def _wait_for_room(self, part: PushPart, cancelled: Callable[[], bool]) -> Session:
        while True:
            self._refuse_if_closed()
            session = self.sessions.find(part.trainer, part.incarnation)
            if session.known(part.sequence, part.digest) is not None or self._pending.has_room(session):
                return session
            if cancelled():
                raise ShardUnavailableError("the stream was closed while its part waited for room; nothing of the part was taken")
            self._changed.wait(_POLL_S)

    def _enqueue(self, item: Push | RowsWork) -> int:
        number = self._pending.add(item)
        self._queue.add(item)
        self._changed.notify_all()
        return number

    def _give_up(self, push: Push, error: KvembError) -> None:
        self._forget(push, lambda ticket: PushReply(ticket.sequence, "failed", error=to_wire(error)))

    def _forget(self, item: Push | RowsWork, reply: Callable[[PartTicket], PushReply]) -> None:
        self._pending.remove(item)
        if isinstance(item, Push):
            self.sessions.settled(item)
            if self._barrier is not None:
                self._barrier.settled(item, self._clock())
            for part in item.parts:
                part.ticket.finish(reply(part.ticket))

    def _refuse_dropped(self, tables: Sequence[CheckedRows]) -> None:
        for rows in tables:
            if rows.definition.key in self._tables_gone:
                name = rows.definition.name
                raise TableDroppedError(f"table {name!r} was dropped meanwhile; nothing of this was accepted. {AFTER_A_DROP}.")

    def _refuse_if_closed(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._draining:
            raise ShardUnavailableError("the shard is draining: it takes nothing new and will stop; send it again after its restart")

    def _wait(self, deadline: Deadline, what: str) -> None:
        if self._failure is not None:
            raise self._failure
        if self._stopped:
            raise ShardUnavailableError(f"the shard stopped before {what}")
        if deadline.expired:
            cause = f"; last error: {waits}" if (waits := self.waits_for) else ""
            raise DeadlineExceededError(f"waited {deadline.timeout_s:.1f} s for {what}{cause}")
        self._changed.wait(min(_POLL_S, deadline.remaining_s()))
