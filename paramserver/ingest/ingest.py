"""Ingest: the way of work from a message to the committer, under one lock.

It takes parts in order and bounds the work that waits. (A stream that finds no room is not read any further: HTTP/2 flow control is the
backpressure.) It hands work to the one committer, and answers trainers: "accepted" when their push is in the journal, later the outcome.
The decisions are made in pure code beside it (sessions, sync_steps, work_queue); no I/O here.
"""

import time
from collections.abc import Callable

from kvemb.errors import KvembError, ShardUnavailableError, to_wire
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import PushPart

from ..model.batch import DROPPED, CheckedRows, EvictionWork, PartTicket, Push, ReceivedPart, RowsWork, Sink, Work
from ..model.table_registry import Registry
from .attendance import Attendance, Record, StepsByMap
from .ingest_state import POLL_S, IngestState
from .outcomes import Backlog, Outcomes
from .part_checks import LoadGate, MapGate
from .sessions import Session, Sessions
from .step_waits import lost
from .sync_steps import SyncSteps
from .work_queue import Limits, UnappliedParts, WorkQueue, hyper_by_table

_HELD_POLL_S = 0.02  # a newer map is seen by reading it: no notification comes


class Ingest:
    """Takes work in, and gives it to the committer."""

    def __init__(
        self,
        sessions: Sessions,
        steps: SyncSteps | None,
        limits: Limits | None = None,
        record: Record = lambda trainer, incarnation: None,
        clock: Callable[[], float] = time.monotonic,
        gate: MapGate | None = None,
        registry: Registry | None = None,
        loads: LoadGate | None = None,
    ) -> None:
        self.sessions, self.gate, self.loads = sessions, gate or MapGate(), LoadGate()
        self.state = IngestState(steps, clock)
        self._queue, self._pending = WorkQueue(self.state), UnappliedParts(limits or Limits(), sync=steps is not None)
        self.outcomes = Outcomes(self.state, sessions, self._pending, self._queue)
        self.attendance = Attendance(self.state, sessions, self.outcomes, record)
        self.backlog = Backlog(self.state, self._pending, self._queue)
        self._lost: KvembError | None = None
        self._eviction: EvictionWork | None = None
        self._require_open = _takes_all if registry is None else registry.require_open
        self.steps = StepsByMap(self.state, sessions, self._queue, self.outcomes, self.gate, registry)

    # --- trainers bring work ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        part: PushPart,
        tables: tuple[CheckedRows, ...],
        sink: Sink,
        cancelled: Callable[[], bool],
        prefetched: tuple[CheckedRows, ...] = (),
    ) -> None:
        """Take a checked part, waiting for room; the sink is told "accepted" when its push is in the journal, and the outcome later.

        Raises:
            PushRejectedError, TableDroppedError, SlotsMovedError, FencedError: nothing was taken; the sequence may be used again.
        """
        size = sum(rows.size_bytes for rows in (*tables, *prefetched))
        with self.state.changed:
            session = self._wait_for_room(part, cancelled)
            if self.state.steps is not None:
                self.state.become(self.state.steps.heard(part.trainer, self.state.clock()))
            ticket = session.known(part.sequence, part.digest)
            if ticket is not None:
                ticket.answer(sink)
                return
            new = ReceivedPart(tables, PartTicket(part.sequence, part.digest, size), prefetched, part.tables_serial)
            self._pending.check_size(session, new)
            together = [*(session.incomplete if session.incomplete_step == part.step else ()), new]
            named = [rows for one in together for rows in (*one.tables, *one.prefetched)]
            for rows in named:  # while it is altered a sync job's steps wait as a whole, with all their parts
                self._require_open(rows.definition.key, waits=self.state.steps is None)
            if len(together) > 1:
                hyper_by_table(together)
            session.accept(new, part.step)
            new.ticket.answer(sink)
            if not part.more:
                self._enqueue(session.complete(part.step, self.state.clock()))

    def admit(self, part: PushPart, sink: Sink, cancelled: Callable[[], bool]) -> bool:
        """Look at a part before its rows are checked: wait while parts routed by its map are held, and answer one that was taken before.

        Returns:
            Whether the part is new: then check it, by the map in force, and submit it.
        """
        with self.state.changed:
            session = self._wait_for_room(part, cancelled)
            ticket = session.known(part.sequence, part.digest)
            if ticket is not None:
                ticket.answer(sink)
            return ticket is None

    def give_up(self, part: PushPart, error: KvembError) -> None:
        """Give up the push of a part that was refused: its parts taken before fail, too, and their sequences are free again."""
        with self.state.changed:
            if self.sessions.is_live(part.trainer, part.incarnation):
                session = self.sessions.find(part.trainer, part.incarnation)
                if session.incomplete and session.incomplete_step == part.step and part.sequence == session.last_sequence + 1:
                    session.give_up_incomplete(to_wire(error))

    def submit_rows(self, work: RowsWork, deadline: Deadline, map_serial: int) -> int:
        """Queue an assign or erase and wait until it is applied; return how many of its rows existed before.

        Raises:
            SlotsMovedError: a map of other shards is in force; nothing was taken.
            TableDroppedError, ShardUnavailableError: the table takes no rows any more, or not while it is altered; nothing was taken.
            DeadlineExceededError: it stays queued and will be applied.
        """
        with self.state.changed:
            while not self._pending.has_room() or self.gate.holds(map_serial):
                self.state.refuse_if_closed()
                self.state.wait(deadline, "room in the shard's queue, or the end of a move of slots")
            self.state.refuse_if_closed()
            self.gate.require(map_serial)
            if work.reason != DROPPED:
                self._require_open(work.rows.definition.key, waits=True)
            number = self._enqueue(work)
            while number in self._pending:
                self.state.wait(deadline, f"{work.kind} to be applied; it stays queued")
            if self.state.failure is not None and not work.applied:
                raise self.state.failure
            return work.n_existed

    def evict(self, work: EvictionWork) -> None:
        """Have rows erased with the next work that is taken; in sync mode right before a step, so that all its trainers still saw them.

        Nothing waits for it before it is taken. The one before was taken.
        """
        with self.state.changed:
            assert self._eviction is None
            self._eviction = work
            self.state.changed.notify_all()

    def wake(self) -> None:
        """Let waiting submitters look at their `cancelled` again."""
        with self.state.changed:
            self.state.changed.notify_all()

    def _wait_for_room(self, part: PushPart, cancelled: Callable[[], bool]) -> Session:
        while True:
            self.state.refuse_if_closed()
            if self.state.steps is not None:
                self.steps.look()
            session = self.sessions.find(part.trainer, part.incarnation)
            if part.sequence > session.last_sequence:
                self.gate.require(part.map_serial)
            if session.known(part.sequence, part.digest) is not None:
                return session
            held = self.gate.holds(part.map_serial, of_step=self.state.steps is not None)
            if self._pending.has_room(session) and not held:
                return session
            if cancelled():
                raise ShardUnavailableError("the stream was closed while its part waited for room; nothing of the part was taken")
            self.state.changed.wait(_HELD_POLL_S if held else POLL_S)

    def _enqueue(self, item: Push | RowsWork) -> int:
        number = self._pending.add(item)
        self._queue.add(item)
        self.state.changed.notify_all()
        return number

    # --- the committer takes it ------------------------------------------------------------------------------------------------

    def take(self, limit: int = 1) -> list[Work]:
        """Return at most `limit` pieces of work, waiting for the first; none when the shard stops."""
        while True:
            with self.state.changed:
                group = self._take(limit)
                late = {} if group else self.attendance.fence_late()
            if not late:
                return group
            self.attendance.drop(late)

    def _take(self, limit: int) -> list[Work]:
        """As `take`; also returns without work when there are members to drop."""
        while not self.state.stopped:
            if self.state.steps is not None:
                self.steps.look()
            if self._lost is not None:
                why, self._lost = self._lost, None
                raise why
            if self.state.failure is None:
                group = self._queue.take(limit, self.state.clock())
                if self._eviction is not None:
                    group = self._with_eviction(self._eviction, group)
                if group or (self.state.steps is not None and lost(self.state.steps, self.state.clock())):
                    return group
            due_s = self._queue.due_s()
            self.state.changed.wait(None if due_s is None else min(POLL_S, max(0.0, due_s - self.state.clock())))
        return []

    def _with_eviction(self, work: EvictionWork, group: list[Work]) -> list[Work]:
        sync = self.state.steps is not None
        if self.gate.holds(self.gate.now.shards_serial):  # in a hand-over of slots its rows have no writer
            return group
        at = next((at for at, one in enumerate(group) if not isinstance(one, RowsWork)), None) if sync else len(group)
        if at is None:
            return group
        self._eviction = None
        try:
            self._require_open(work.rows.definition.key, waits=True)
        except KvembError:
            work.finish(0)
            return group
        self._pending.add(work)
        return [*group[:at], work, *group[at:]]

    def fail_from_outside(self, error: KvembError) -> None:
        """Let the committer fail with this error before it takes more: another thread has found rows lost."""
        with self.state.changed:
            self._lost = error
            self.state.changed.notify_all()


def _takes_all(key: str, *, waits: bool) -> None:
    """Without a registry no table is ever altered."""
