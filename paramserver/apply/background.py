"""The apply thread's work between batches, a slice at a time: requested repairs, moves, flushes to the row log, comparison of cold rows.

All of it needs index and storage at rest, which they are only between batches. A task that fails because storage or disk does not answer is
tried again later; one that finds rows lost has them repaired.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import (
    DeadlineExceededError,
    JournalFullError,
    KvembError,
    LostRowError,
    RecordError,
    ShardUnavailableError,
    StorageError,
)
from kvemb.net.deadline import Deadline, WhyWaiting
from kvemb.schema.cluster_map import ClusterMap

from ..engine.storage_pace import NO_BATCH, Pause
from ..eviction.evictor import Evictor
from ..journal import Position
from ..model.tables import TableState
from ..moves.phase_runner import PhaseRunner
from ..repair.repairer import Repairer
from ..repair.scrub import Scrub
from ..row_log.log_flush import FlushSchedule
from ..shard_process import freed_memory

_RETRY_S = 5.0
_REPLAYED_BYTES = 4 << 20  # of the journal
_AFTER_A_HANDOVER_S = 0.1
log = logging.getLogger("paramserver")


@dataclass(eq=False)
class BackgroundTicket:
    """A request for repair or comparison; `rows`: how many were restored, once it is done."""

    rows: int = 0
    finished: bool = False
    error: KvembError | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self, deadline: Deadline) -> None:
        """Wait until the repair has ended."""
        if not self.done.wait(deadline.remaining_s()):
            raise DeadlineExceededError(f"the repair did not end within {deadline.timeout_s:g} s; it goes on")
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """Wake the threads that wait; without an outcome the shard has stopped."""
        if self.error is None and not self.finished:
            self.error = ShardUnavailableError("the shard stopped before the repair had ended; ask again when it is back")
        self.done.set()


@dataclass(eq=False, kw_only=True)
class RepairTicket(BackgroundTicket):
    """A requested repair of nodes.

    Args:
        addresses: nodes to compare row by row although their markers may be in order.
    """

    addresses: frozenset[str]
    nodes: int = 0


@dataclass(eq=False, kw_only=True)
class CompareTicket(BackgroundTicket):
    """A comparison of some rows of a table."""

    table: TableState
    ids: NDArray[np.uint64]


class BackgroundWork:
    """The background work of one shard. `step` is for the apply thread, the rest for any thread."""

    def __init__(
        self,
        repairer: Repairer,
        flushes: FlushSchedule,
        scrub: Scrub,
        wake: Callable[[], None],
        *,
        mover: PhaseRunner | None = None,
        evictor: Evictor | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        self._mover, self._evictor = mover, evictor
        self._at_rest: ClusterMap | None = None  # a map without a plan, which the mover has followed: nothing is to be done for it
        self.applied: Position | None = None  # as `step` was told last
        self._repairer, self._flushes, self._wake, self.scrub, self._timeout_s = repairer, flushes, wake, scrub, timeout_s
        self._lock = threading.Lock()
        self._asked: list[RepairTicket] = []
        self._to_compare: list[CompareTicket] = []
        self._scrub_waits, self._eviction_waits = WhyWaiting(), WhyWaiting()
        self._not_before_s = 0.0
        self._policies_changed = False

    def ask_repair(self, addresses: Iterable[str] = ()) -> RepairTicket:
        """Have every lost node repaired, and these nodes compared with the index; returns at once. One repair answers all requests."""
        ticket = RepairTicket(addresses=frozenset(addresses))
        with self._lock:
            self._asked.append(ticket)
        self._wake()
        return ticket

    def ask_compare(self, table: TableState, ids: NDArray[np.uint64]) -> CompareTicket:
        """Have some rows compared with storage; returns at once."""
        ticket = CompareTicket(table=table, ids=ids)
        with self._lock:
            self._to_compare.append(ticket)
        self._wake()
        return ticket

    def look_at_policies(self) -> None:
        """Have the policies of tables looked at, which may have changed; returns at once."""
        self._policies_changed = True
        self._wake()

    def flush_behind(self, n_bytes: int = _REPLAYED_BYTES) -> threading.Event:
        """Have the shard flush to its row log where its journal has got more than so many bytes since it last did; returns at once.

        Returns:
            An event that is set when it is done, or nothing is to be done.
        """
        if self._flushes.behind_bytes <= n_bytes:
            (done := threading.Event()).set()
            return done
        done = self._flushes.ask()
        self._wake()
        return done

    def due_in_s(self) -> float:
        """Seconds until `step` has something to do without a request."""
        moving_s = None if self._mover is None or self._mover.maps.cluster_map is self._at_rest else self._mover.due_in_s()
        due_s = self.scrub.due_s if self._evictor is None else min(self.scrub.due_s, self._evictor.due_s)
        waits_s = max(0.0, due_s - time.monotonic())
        return waits_s if moving_s is None else min(waits_s, moving_s)

    def step(self, applied: Position, pause: Pause) -> bool:
        """Do a slice of the work; return whether more can be done at once."""
        loaded, self.applied = applied != self.applied, applied
        moving, mover = False, self._mover
        if mover is not None and (now := mover.maps.cluster_map) is not self._at_rest:
            moving = self._step_moves(mover, now, loaded=loaded)
        with self._lock:
            asked, self._asked = self._asked, []
            to_compare, self._to_compare = self._to_compare, []
        if asked:
            self._repair(asked, pause)
        if to_compare:
            self._compare(to_compare)
        now_s = time.monotonic()
        if (evictor := self._evictor) is not None:
            policies_changed, self._policies_changed = self._policies_changed, False
            if policies_changed or now_s >= evictor.due_s or (evictor.sent is not None and evictor.sent.applied):
                self._step_eviction(evictor, policies_changed=policies_changed)
        due = self._flushes.journal.size_bytes > self._flushes.due_bytes and now_s >= self._not_before_s
        if (due and self._step_flush(applied, pause)) or moving:
            return True
        if now_s >= self.scrub.due_s:
            self._step_scrub()
        return False

    def _step_moves(self, mover: PhaseRunner, now: ClusterMap, *, loaded: bool) -> bool:
        if mover.changes_runs:
            self._flushes.give_up()
            self._not_before_s = time.monotonic() + _AFTER_A_HANDOVER_S
        more = mover.step(loaded=loaded)
        before, self._at_rest = self._at_rest, now if now.plan is None and mover.due_in_s() is None else None
        if before is None and self._at_rest is not None:  # a start, with what it loaded or read, or a move is over
            freed_memory.give_back()
        return more

    def _step_flush(self, applied: Position, pause: Pause) -> bool:
        try:
            return self._flushes.step(applied)
        except (LostRowError, RecordError) as error:
            log.error("while the shard flushed to its row log: %s", error)
            self._repairer.nodes(NO_BATCH, pause, suspects=self._repairer.addresses)
        except (StorageError, JournalFullError, OSError) as error:
            log.warning("a flush to the row log was given up and will be tried again: %s", error)
            self._not_before_s = time.monotonic() + _RETRY_S
        return False

    def _repair(self, asked: list[RepairTicket], pause: Pause) -> None:
        try:
            rows_before = self._repairer.figures.rows
            n_nodes = self._repairer.nodes(NO_BATCH, pause, suspects=frozenset().union(*(ticket.addresses for ticket in asked)))
            for ticket in asked:
                ticket.nodes, ticket.rows = n_nodes, self._repairer.figures.rows - rows_before
                ticket.finished = True
        except KvembError as error:
            for ticket in asked:
                ticket.error = error
            raise
        finally:
            for ticket in asked:
                ticket.end()

    def _compare(self, tickets: list[CompareTicket]) -> None:
        """Compare rows and answer the requests. An error of storage goes to the caller only; a row lost for good stops the shard, too."""
        try:
            for ticket in tickets:
                try:
                    ticket.rows = self._repairer.compare(ticket.table, ticket.ids, self._timeout_s)
                    ticket.finished = True
                except KvembError as error:
                    ticket.error = error
                    if not isinstance(error, StorageError) or isinstance(error, LostRowError):
                        raise
        finally:
            for ticket in tickets:
                ticket.end()

    def _step_eviction(self, evictor: Evictor, *, policies_changed: bool) -> None:
        try:
            evictor.step(policies_changed=policies_changed)
            self._eviction_waits.over()
        except StorageError as error:
            if self._eviction_waits.is_news(f"{type(error).__name__}: {error}"):
                log.warning("weights of rows that may be evicted cannot be read now: %s", error)

    def _step_scrub(self) -> None:
        try:
            self.scrub.step()
            self._scrub_waits.over()
        except LostRowError:
            raise
        except StorageError as error:
            if self._scrub_waits.is_news(f"{type(error).__name__}: {error}"):
                log.warning("rows that no push touches are not compared with storage now: %s", error)
