"""Flushing to the row log: the rows that changed since the last flush become a run of their own, so that the journal can be cut.

A flush begins when the journal has reached its size, when the index takes more memory than it may, or when it is asked for. It proceeds a
slice at a time between batches, and ends with a new state, which names the run. Only then the journal's entries up to the flush's cut are
discarded: neither journal nor recovery time grows. Where batches come faster than the flush goes on, slices grow with the journal.

Training goes on meanwhile. A row may be newer in the log than the cut, never older, and the journal's tail brings it up to date. Each step
is made on the apply thread, between batches: then the index, storage and the last applied version agree with each other.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items, as_rows
from kvemb.errors import JournalFullError, LostRowError, RecordError, StorageError
from kvemb.stores.store import Store

from ..engine.row_access import RowAccess
from ..engine.storage_pace import NO_BATCH, Pause, RepairPort
from ..journal import START, Position
from ..journal.write_ahead_log import AppliedMark, FencedLog
from ..model.tables import Tables, TableState, all_of
from .reconstruct import require_versions
from .run_set import Runs
from .run_writer import RunWriter, dropped_on_error
from .sorted_run import BLOCK_ROWS, Bytes, Ids, rows_of_a_block
from .state_file import ShardState

ReadRecords = Callable[[TableState, Ids], tuple[Bytes, NDArray[np.bool_]]]
"""(table, ids) -> records uint8 [n, record bytes], and which were found, bool [n]; checked to be these rows' records."""

_SLICE_BYTES = 4 << 20
_MOST_DOUBLINGS = 4  # no batch waits for more than 64 MB
_REPLAYED_BYTES = 4 << 20  # of the journal
_LOOK_BYTES = 1 << 20  # of the journal, from one look at the size of the index to the next
log = logging.getLogger("paramserver")


class LogFlush:
    """Flushes the tables of one shard to its row log, one flush at a time.

    Attributes:
        n_rows, size_bytes: of records that the flush under way, or the last one, has written.
    """

    def __init__(self, runs: Runs, tables: Tables, read: ReadRecords, applied: Callable[[], int]) -> None:
        self._runs, self._tables, self._read, self._applied = runs, tables, read, applied
        self.n_rows = self.size_bytes = 0

    def steps(self, state: Callable[[], ShardState]) -> Generator[None, None, None]:
        """Flush, a slice of rows for every value that is asked for; it counts when the iterator has ended.

        Its cut is the version applied when the first value is asked for. Once it has ended, the journal's entries up to the cut may be
        discarded. Given up at any point (by an error, a crash, or `close`), it leaves the log as it was.
        """
        cut, last, tables = self._applied(), self._runs.cut, self._tables.all()
        newer = [all_of(table.portions(above=last))[0] for table in tables]
        self.n_rows = self.size_bytes = 0
        with dropped_on_error([self._runs.begin(table.definition) for table in tables]) as writers:
            for writer, table, ids in zip(writers, tables, newer, strict=True):
                yield from self._rows(writer, table, ids)
            for writer, table in zip(writers, tables, strict=True):  # at last, in one step: nothing is erased after this
                for ids, versions in table.gone():
                    writer.add_erased(ids, versions)
            self._runs.publish(writers, replace(state(), cut=cut))
        self._tables.published(cut)

    def merges(self) -> Iterator[None]:
        """Merge the runs of tables that have too many, a block at a time; flushes may come and go meanwhile."""
        for table in self._tables.all():
            yield from self._runs.merge(table.definition)

    def _rows(self, writer: RunWriter, table: TableState, ids: Ids) -> Iterator[None]:
        """Write rows as they are now; one that has been erased since is among the `gone` of its table."""
        n_slice = max(1, _SLICE_BYTES // table.definition.record.size_bytes)
        n_slice -= n_slice % rows_of_a_block(table.definition.record.size_bytes) if n_slice > BLOCK_ROWS else 0
        for start in range(0, len(ids), n_slice):
            these = ids[start : start + n_slice]
            expected = table.versions(these)
            these, expected = these[expected != 0], expected[expected != 0]
            records, found = self._read(table, these)
            got = np.where(found, table.definition.record.versions(records), np.uint64(0))  # newer: by a batch that the journal lacks
            require_versions(table.definition, these, got, expected, "in storage")
            writer.add_rows(these, records)
            self.size_bytes += records.nbytes
            self.n_rows += len(these)
            yield


def from_storage(store: Store, timeout_s: float) -> ReadRecords:
    """Return a function that takes records from the tables' caches, and those that they lack from storage."""

    stored = without_cache(store, timeout_s)

    def read(table: TableState, ids: Ids) -> tuple[Bytes, NDArray[np.bool_]]:
        at = table.cache.find(ids)  # int64 [n]: places in the cache, or -1
        found = at >= 0
        missing = np.flatnonzero(~found)  # intp [m]: the rows to read from storage
        if len(missing) and len(missing) == len(ids):
            return stored(table, ids)
        records = as_rows(as_items(table.cache.records)[np.maximum(at, 0)])
        if len(missing):
            got, found[missing] = stored(table, ids[missing])
            as_items(records)[missing] = as_items(got)
        return records, found

    return read


def without_cache(store: Store, timeout_s: float) -> ReadRecords:
    """Return a function that takes records from storage; see `from_storage`. Each is for one thread."""
    access = RowAccess(store, timeout_s)

    def read(table: TableState, ids: Ids) -> tuple[Bytes, NDArray[np.bool_]]:
        (got,) = access.read([(table.definition, ids)])
        return got.records, got.found

    return read


class FlushSchedule:
    """Says when one shard flushes, and cuts its journal afterwards. Apply thread only, but for `ask` and `flush_behind`.

    Attributes:
        due_bytes: `step` has nothing to do while the journal is not larger; -1 while a flush or a merge is under way, or a flush asked for.
    """

    name, passing = "a flush to the row log", (StorageError, JournalFullError, OSError)

    def __init__(
        self,
        fenced_log: FencedLog,
        flush: LogFlush,
        tables: Tables,
        mark: AppliedMark,
        *,
        repair: RepairPort,
        state: Callable[[Position], ShardState],
        max_bytes: int,
        held: Callable[[], bool],
        wake: Callable[[], None],
    ) -> None:
        self._fenced_log, self.journal, self._flush, self._tables = fenced_log, fenced_log.journal, flush, tables
        self._mark, self._repair, self._wake, self._not_before_s = mark, repair, wake, 0.0
        self._state, self._max_bytes, self._held = state, max_bytes, held
        self._limit_bytes, self._past_bytes = max_bytes, 0
        self.due_bytes = 0  # the index is looked at, too
        self._steps: Generator[None, None, None] | None = None
        self._merges: Iterator[None] | None = None
        self._applied = self._cut = START
        self._begun_s = 0.0
        self._lock = threading.Lock()
        self._asked: list[threading.Event] = []
        self._answers: list[threading.Event] = []

    def ask(self) -> threading.Event:
        """Have everything flushed that is applied by now; the event is set once that is done."""
        done = threading.Event()
        with self._lock:
            self._asked.append(done)
            self.due_bytes = -1
        self._wake()
        return done

    def flush_behind(self, n_bytes: int = _REPLAYED_BYTES) -> threading.Event:
        """Flush if the journal has got more than so many bytes since the last one. The event is set when that is done, or needless."""
        if self.behind_bytes > n_bytes:
            return self.ask()
        (done := threading.Event()).set()
        return done

    @property
    def behind_bytes(self) -> int:
        """Bytes that the journal has got since the last flush, about. Any thread."""
        return max(0, self.journal.size_bytes - self._past_bytes)

    @property
    def due_s(self) -> float:
        return self._not_before_s if self.journal.size_bytes > self.due_bytes else math.inf

    def step(self, pause: Pause) -> bool:
        """Begin a flush if one is due, or go on with it; else go on with a merge. Return whether there is more to do.

        Raises:
            StorageError, JournalFullError, OSError: the flush was given up; the log is as it was before.
        """
        try:
            return self._step(self._mark.now[1])
        except (LostRowError, RecordError) as error:
            log.error("while the shard flushed to its row log: %s", error)
            self._repair.nodes(NO_BATCH, pause, suspects=self._repair.addresses)
            return False

    def _step(self, applied: Position) -> bool:
        self._applied = applied
        if self._steps is None:
            if not self._begins():
                return self._merge()
            self._cut, self._begun_s = applied, time.monotonic()
            self._steps = self._flush.steps(self._state_now)
        try:
            # Twice as many slices a batch for each time that the journal has outgrown its bound: batches wait, and it stops growing.
            outgrown = self.journal.size_bytes // self._max_bytes - 1
            for _ in range(1 << max(0, min(outgrown, _MOST_DOUBLINGS))):
                if next(self._steps, self) is self:
                    self._end()
                    break
            return True
        except BaseException:
            self.give_up()
            raise

    def _merge(self) -> bool:
        merges, self._merges = self._merges, None
        if merges is None or next(merges, self) is self:
            return False
        self._merges, self.due_bytes = merges, -1
        return True

    def _state_now(self) -> ShardState:
        self._fenced_log.commit()  # else a folder that was put in the place of ours would get our state
        return self._state(self._applied)

    def _begins(self) -> bool:
        """Whether a flush is due now, which then answers all requests; else the journal grows a bit before the next look."""
        with self._lock:
            large = self.journal.size_bytes > self._limit_bytes or (self.behind_bytes and self._tables.index_is_large)
            if self._asked or large:
                self._answers, self._asked, self.due_bytes = [*self._answers, *self._asked], [], -1
                return True
            self.due_bytes = min(self.journal.size_bytes + _LOOK_BYTES, self._limit_bytes)
        return False

    def give_way(self, for_s: float) -> None:
        """Give up the flush under way, and begin none for a while: index and row log change otherwise than by batches."""
        self.give_up()
        self._not_before_s = time.monotonic() + for_s

    def give_up(self) -> None:
        """Give up the flush under way, if any; a new one begins when it is due."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()
            with self._lock:
                self._asked, self._answers = [*self._answers, *self._asked], []

    def _end(self) -> None:
        self._steps, before = None, self.journal.size_bytes
        if not self._held():
            self._fenced_log.discard_before(self._cut)
        # Entries behind the cut stay: the next flush is due only when half the limit has come on top of them.
        self._past_bytes = self.journal.size_bytes
        self._limit_bytes = max(self._max_bytes, self._past_bytes + self._max_bytes // 2)
        answers, self._answers = self._answers, []
        self._merges = self._merges or self._flush.merges()
        for done in answers:
            done.set()
        mb = [n_bytes / 1e6 for n_bytes in (self._flush.size_bytes, before, self._past_bytes)]
        took = self._flush.n_rows, mb[0], time.monotonic() - self._begun_s, *mb[1:]
        log.info("flushed to the row log: %d rows, %.1f MB in %.1f s; the journal went from %.1f MB to %.1f MB", *took)
