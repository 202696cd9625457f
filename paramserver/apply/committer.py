"""The committer: takes work from ingest, merges it to batches, journals them, acknowledges them, and hands them to the apply thread.

The order of the journal is the order of application: batch k is numbered here. Several batches share one commit when several are ready.
A push is acknowledged once its batch is committed and the shard is known to be still ours (`FencedLog`). The hand-over is bounded, so that
pushes that come in while the engine is busy are merged instead of queued. A full disk stops acknowledgements, not the shard: the same
entries are tried again until there is room.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import are_among
from kvemb.protocol.shard_routing import MapSource
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef

from ..ingest.ingest import Ingest
from ..ingest.ingest_state import AbandonedError
from ..ingest.work_queue import HeldBack, merge_pushes
from ..journal import BatchEntry, Position, Watermark
from ..journal.write_ahead_log import FencedLog
from ..model.batch import APPLY, ERASE, Batch, CheckedRows, EvictionWork, Push, RefusedStep, RowsWork, Work, items_of
from ..model.tables import Tables, TableState
from ..shard_process.owned_thread import OwnedThread

DEPTH = 2
Judge = Callable[[Sequence[Push], int, Callable[[], Sequence[Batch]]], HeldBack]
"""(pushes, number of their batch, the batches that may not be applied yet) -> which of their gradients are left out."""
log = logging.getLogger("paramserver")


@dataclass(frozen=True, eq=False)
class Committed:
    """A batch that is in the journal.

    Args:
        version: (epoch, k), packed.
        batch: for the engine.
        work: the pushes or row change that it was made of.
        end: position after its entry.
    """

    version: int
    batch: Batch
    work: Work
    end: Position


class Handover:
    """Committed batches on their way to the apply thread, in order; bounded. Thread-safe."""

    def __init__(self, depth: int = DEPTH) -> None:
        self._depth = depth
        self._changed = threading.Condition()
        self._waiting: deque[Committed] = deque()
        self._at_work: Committed | None = None
        self._woken = False
        self.closed = False

    def wait_for_room(self) -> int:
        """Wait until there is room; return for how many batches, 0 when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or len(self._waiting) < self._depth)
            return 0 if self.closed else self._depth - len(self._waiting)

    def put(self, batch: Committed) -> None:
        """Append a batch; never blocks, room was waited for."""
        with self._changed:
            self._waiting.append(batch)
            self._changed.notify_all()

    def get(self, *, timeout_s: float | None = None) -> Committed | None:
        """Return the next batch; None when closed, when woken up, and when there is none within `timeout_s` (None: wait for ever).

        The one returned before is applied by then.
        """
        with self._changed:
            self._at_work = None
            self._changed.wait_for(lambda: self.closed or self._woken or bool(self._waiting), timeout_s)
            self._woken = False
            if self.closed or not self._waiting:
                return None
            self._changed.notify_all()
            self._at_work = self._waiting.popleft()
            return self._at_work

    def unapplied(self) -> list[Batch]:
        """Return the batches that may not be applied yet, in their order, the one at work among them."""
        with self._changed:
            return [one.batch for one in (self._at_work, *self._waiting) if one is not None]

    def wake(self) -> None:
        """Wake the thread that waits for a batch, so that it looks for other work."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out nothing more; waiting batches stay in the journal."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()


class Committer:
    """Owns the thread that merges pushes, numbers and journals the batch, and only then promises it."""

    def __init__(
        self,
        ingest: Ingest,
        tables: Tables,
        fenced_log: FencedLog,
        handover: Handover,
        *,
        judges: Callable[[], Sequence[Judge]],
        sync: bool,
        epoch: int,
        k: int,
        maps: MapSource | None = None,
        look: Callable[[], None] = lambda: None,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._ingest, self._tables, self._fenced_log, self._handover = ingest, tables, fenced_log, handover
        self._judges, self._maps, self._look = judges, maps, look
        self._followed: ClusterMap | None = None
        self._sync, self._epoch, self._failed = sync, epoch, failed
        self.k = k  # of the last batch numbered: pushes acknowledged before are in it or in earlier ones
        self._counting = threading.Lock()
        self._steps: dict[str, int] = {}  # per table, after the last batch numbered
        self._group: list[Committed] = []  # numbered, and not in the journal for certain
        self.thread = OwnedThread(self._run, name="kvemb-journal", wakes=(ingest.state.stop, handover.close))

    def rise(self, epoch: int) -> int:
        """Number batches in a higher epoch from now on; return the last number that may have been given in the one before. Any thread."""
        self._epoch = epoch  # before `k` is read: a batch that is being numbered now may still get the older one
        return self.k + 1

    def _run(self) -> None:
        try:
            while room := self._handover.wait_for_room():
                group = self._ingest.take(room)
                if not group:
                    return
                self._commit(group)
        except AbandonedError:
            return
        except Exception as error:
            self._failed(error)

    def _commit(self, group: Sequence[Work]) -> None:
        for at, work in enumerate(group, 1):
            if isinstance(work, EvictionWork):
                work.decide(self._unchanged(work.rows, [rows for one in group[at:] for rows in _rows_of(one)]))
            self._group.append(self._append(work))
        self._ingest.state.trouble.until_there_is_room(self._fenced_log.commit, self.thread.wait)
        self._ingest.outcomes.journaled(group)
        for batch in self._group:
            self._handover.put(batch)
        self._group = []

    def _append(self, work: Work) -> Committed:
        """Number a piece of work and append it to the journal."""
        batch = self._batch(work)
        version = make_version(self._epoch, self.k + 1)
        steps = tuple(self._count(rows.definition, batch.kind) for rows in batch.tables)
        entry = BatchEntry(version, batch, steps, tuple(_watermarks(work)))
        if self._maps is not None and (now := self._maps.cluster_map) is not self._followed:
            self._ingest.state.trouble.until_there_is_room(self._look, self.thread.wait)
            self._followed = now
        end = self._ingest.state.trouble.until_there_is_room(lambda: self._fenced_log.append(entry), self.thread.wait)
        self.k += 1
        return Committed(version, batch, work, end)

    def _unchanged(self, rows: CheckedRows, others: Sequence[CheckedRows]) -> NDArray[np.bool_]:
        """Which rows have the versions that they were chosen by, and are in no batch that is on its way, nor among these others."""
        others = [*(one for batch in self._unapplied() for one in batch.tables), *others]
        unchanged: NDArray[np.bool_] = self._tables.state(rows.definition).versions_now(rows.ids) == rows.versions
        for one in others:
            if one.definition.key == rows.definition.key:
                unchanged &= ~are_among(rows.ids, one.ids)
        return unchanged

    def _unapplied(self) -> list[Batch]:
        """The batches that are numbered and may not be applied yet, in order; ask before the index, which knows those applied meanwhile."""
        return [*self._handover.unapplied(), *(one.batch for one in self._group)]

    def _batch(self, work: Work) -> Batch:
        if isinstance(work, RowsWork):
            return Batch(work.kind, (work.rows_left if isinstance(work, EvictionWork) else work.rows,), work.reason)
        # A batch without tables changes nothing: it is there for its watermarks.
        if isinstance(work, RefusedStep):
            return Batch(ERASE, ())
        return merge_pushes(work, sync=self._sync, held_back=[judge(work, self.k + 1, self._unapplied) for judge in self._judges()])

    def raise_step(self, state: TableState, step: int) -> None:
        """Let a table count at least so many applies, with batches on their way on top. Between two batches, apply thread only.

        Batches that are in the journal and not applied yet say fewer there than they are applied with, which a replay puts up with.
        """
        with self._counting:
            more, key = step - state.step, state.definition.key
            if more > 0:
                state.raise_step(step)
                if key in self._steps:
                    self._steps[key] += more

    def _count(self, definition: TableDef, kind: str) -> int:
        """How many applies a table has had before a batch that is numbered now; the batch counts from here on, if it is one."""
        with self._counting:
            step = self._steps.get(definition.key)
            if step is None:  # no batch of it is on its way, so the apply thread does not change its step now
                step = self._tables.state(definition).step
            self._steps[definition.key] = step + (kind == APPLY)
            return step


def _rows_of(work: Work) -> Iterator[CheckedRows]:
    """The rows that a piece of work may change."""
    if isinstance(work, RowsWork):
        yield work.rows
    else:
        yield from (rows for push in items_of(work) if isinstance(push, Push) for part in push.parts for rows in part.tables)


def _watermarks(work: Work) -> Iterator[Watermark]:
    """The last sequence of each session among the pushes."""
    if isinstance(work, RowsWork):
        return
    pushes: Sequence[Push] = work.pushes if isinstance(work, RefusedStep) else work
    last: dict[tuple[str, int], int] = {}
    for push in pushes:
        session = push.trainer, push.incarnation
        last[session] = max(last.get(session, 0), push.parts[-1].ticket.sequence)
    yield from (Watermark(trainer, incarnation, sequence) for (trainer, incarnation), sequence in last.items())
