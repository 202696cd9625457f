"""The engine: fetch the rows of a batch, let the optimizer change them, write them back. One thread, one batch at a time.

A batch is idempotent row by row: a row that already has the batch's version was written by an earlier try and is not touched. So every
retryable storage error is answered by the same rows again, and a batch that was written by half is completed. A large batch is stored piece
by piece (`paramserver.engine.storage_pace`). The index learns of each piece when all of it is stored: that is not tried again. The batch
counts, as one step of its tables, when its last piece is stored. Replay after a crash is the same code with the batches' old versions and
the rules of `transition.Replay`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from kvemb.errors import DeadlineExceededError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.record import split_version
from kvemb.stores.store import Store

from ..model.batch import APPLY, ERASE, Batch, CheckedRows
from ..model.tables import Tables
from ..model.transition import Replay, Timeline
from .batch_records import PreparedRows
from .piece_writer import Change, Computed, PieceWriter
from .storage_pace import AheadOfIndex, Pace, Pause, RepairPort, Tries, cut, size_bytes


class BatchBoundary:
    """A gate that one batch of a shard holds at a time; a caller that needs rows and index at rest holds it between two batches."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = False
        self._n_waiting = 0

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Hold the gate for one batch; callers that wait in `between` go first."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and not self._n_waiting)
            self._busy = True
        try:
            yield
        finally:
            self._free()

    @contextmanager
    def between(self, deadline: Deadline) -> Iterator[None]:
        """Hold the gate while no batch is under way."""
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


@dataclass(frozen=True, eq=False)
class Applied:
    """The result of one batch.

    Args:
        k: its number.
        n_existed: rows of it that existed before (of an erase: that were erased).
        written: the rows and records of its last round, which is all of it unless a write met a conflict; good until the next batch. None
            of a batch of several pieces: the index, the cache and storage have them.
    """

    k: int
    n_existed: int
    written: Sequence[PreparedRows] = ()


class Engine:
    """The one writer of this shard's rows."""

    def __init__(
        self,
        store: Store,
        tables: Tables,
        timeline: Timeline,
        *,
        k: int,
        timeout_s: float,
        repair: RepairPort,
        rows_applied: int = 0,
    ) -> None:
        self._tables, self._pace = tables, Pace(timeout_s)
        self._writer = PieceWriter(store, tables, timeline, timeout_s)
        self._timeline, self.k, self.rows_applied = timeline, k, rows_applied
        self.batch_boundary = BatchBoundary()
        self._repair = repair

    def run(
        self,
        batch: Batch,
        version: int,
        pause: Pause,
        replay: Replay | None = None,
        *,
        computed: Computed | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> Applied:
        """Apply one batch: returns when every row of it is stored.

        Raises:
            StorageError: not retryable, or `pause` or `between` raised. Rows of the batch may have been written, and the index knows those
                of the pieces that were stored whole; the batch does not count.
        """
        change = Change(batch.kind, version, replay)
        with self.batch_boundary.batch():
            self._writer.begin(computed)
            left, n_existed, n_pieces = list(batch.tables), 0, 0
            while left:
                if n_pieces:
                    between()
                for attempt in Tries(pause, self._repair, partial(self._mend, change, left), partial(self._ahead, change, left)):
                    with attempt:
                        piece, rest = cut(left, self._pace.n_bytes)
                        with self._pace.exchange(size_bytes(piece)):
                            self._writer.store(change, piece, whole=not rest)
                left = rest
                n_existed += sum(self._commit(change, rows) for rows in piece)
                n_pieces += 1
                self.rows_applied += sum(len(rows.ids) for rows in piece)
            for rows in batch.tables if batch.kind == APPLY else ():
                self._tables.state(rows.definition).count_step()
            self.k = split_version(change.version)[1]
            return Applied(self.k, n_existed, [] if n_pieces > 1 else self._writer.prepared)

    @property
    def epoch(self) -> int:
        """Of the versions that this process writes now. Any thread."""
        return self._timeline.epoch

    def rise(self, epoch: int, k: int) -> None:
        """Go on in a higher epoch, in which all batches behind k are numbered. Between batches, apply thread only."""
        self._timeline.rise(epoch, k, self.k)

    @property
    def version(self) -> int:
        """Of the last batch applied, or below: every row that a later batch writes has a higher one, also a batch of the epoch before."""
        return self._timeline.version(self.k)

    def _mend(self, change: Change, left: list[CheckedRows], error: StorageError) -> None:
        """Restore those of the first remaining rows that are lost."""
        self._repair.rows(Batch(change.kind, tuple(cut(left, self._pace.n_bytes)[0])), self._ahead(change, left))

    def _ahead(self, change: Change, left: list[CheckedRows]) -> AheadOfIndex:
        return change.ahead(left if self._writer.has_begun else ())

    def _commit(self, change: Change, rows: CheckedRows) -> int:
        state = self._tables.state(rows.definition)
        if change.kind == ERASE:
            return state.erased(rows.ids, change.version)
        n_rows = state.n_rows
        state.applied(rows.ids, change.version)
        return len(rows.ids) - (state.n_rows - n_rows)
