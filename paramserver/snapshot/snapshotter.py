"""Taking a local snapshot: the rows newer than the last one become a run of their own, a slice at a time, between batches.

Training goes on meanwhile. A row may be newer in the snapshot than the cut, never older, and the journal's tail brings it up to date. Call
every step on the apply thread, between batches: then the index, storage and the last applied version agree with each other.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import LostRowError
from kvemb.schema.record import split_version
from kvemb.stores.store import Store

from ..engine.row_access import RowAccess
from ..model.tables import TableState
from .run_set import Runs
from .run_writer import RunWriter

Ids = NDArray[np.uint64]
Bytes = NDArray[np.uint8]

ReadRecords = Callable[[TableState, Ids], tuple[Bytes, NDArray[np.bool_]]]
"""(table, ids) -> records uint8 [n, record bytes], and which were found, bool [n]; checked to be these rows' records."""

_SLICE_BYTES = 4 << 20


@dataclass
class SnapshotProgress:
    """How far a local snapshot is: rows and bytes written so far.

    Args:
        n_rows: rows written.
        n_erased: rows of older runs found to be gone.
        size_bytes: of the records written, merging of runs not included.
    """

    n_rows: int = 0
    n_erased: int = 0
    size_bytes: int = 0


class Snapshotter:
    """Takes snapshots of one shard, one at a time.

    Args:
        runs: where the snapshot is written.
        read: the records of rows, from the cache or storage (`from_storage`).
        applied: the version of the last batch applied.
    """

    def __init__(self, runs: Runs, read: ReadRecords, applied: Callable[[], int]) -> None:
        self._runs, self._read, self._applied = runs, read, applied

    def steps(self, tables: Sequence[TableState], save: Callable[[], None] = lambda: None) -> Generator[SnapshotProgress, None, None]:
        """Take a snapshot, a slice of rows for every value that is asked for; it counts when the iterator has ended.

        Its cut is the version applied when the first value is asked for. Once it has ended, the journal's entries up to the cut may be
        discarded. Given up at any point (by an error, a crash, or `close`), it leaves the snapshot before it in force.

        Args:
            tables: all of the shard.
            save: saves an image of the index as it is, durably; called when all rows are written and before they count. A restart must not
                begin with an older image than this: it would ask for rows as they were before the snapshot.

        Raises:
            LostRowError: a row is missing in storage, or older than the index says.
            StorageError: from reading.
            JournalFullError: the run cannot be written.
        """
        cut, last = self._applied(), self._runs.cut
        newer = [(table, _newer(table, last)) for table in tables]
        progress = SnapshotProgress()
        writers = [self._runs.begin(table.definition) for table in tables]
        try:
            for writer, (table, ids) in zip(writers, newer, strict=True):
                yield from self._table(writer, table, ids, cut, progress)
            save()
            self._runs.publish(writers, cut, only=True)
        except BaseException:
            for writer in writers:
                writer.drop()
            raise
        for table in tables:
            for _ in self._runs.merge(table.definition):
                yield progress

    def _table(self, writer: RunWriter, table: TableState, newer: Ids, cut: int, progress: SnapshotProgress) -> Iterator[SnapshotProgress]:
        """Write one table's run.

        Ids of older runs that the index does not have are noted as erased: the journal's entries that erased them may go now. Ids of older
        runs that changed since the cut join the newer rows: such a row may have been erased before the cut and created again behind it.
        """
        gone: list[tuple[Ids, Ids]] = []
        changed = [newer]
        for ids, _ in self._runs.between(table.definition):
            versions = table.versions(ids)
            dead = ids[versions == 0]  # uint64 [m]: in an older run, and not in the index
            gone.append((dead, np.full(len(dead), self._applied(), np.uint64)))
            changed.append(ids[versions > np.uint64(cut)])
            yield progress
        order = table.definition.order
        keys = np.unique(order.keys(np.concatenate(changed)))  # uint64 [m]: of all rows to be written
        yield from self._rows(writer, table, order.ids(keys), gone, progress)
        # uint64 [e], the erased ids' keys, unique and ascending; intp [e], where each is first, with the version as of which it is gone.
        keys, first = np.unique(order.keys(np.concatenate([newer[:0], *(ids for ids, _ in gone)])), return_index=True)
        as_of = np.concatenate([newer[:0], *(versions for _, versions in gone)])[first]
        writer.add_erased(order.ids(keys), as_of)
        progress.n_erased += len(keys)

    def _rows(
        self, writer: RunWriter, table: TableState, ids: Ids, gone: list[tuple[Ids, Ids]], progress: SnapshotProgress
    ) -> Iterator[SnapshotProgress]:
        n_slice = max(1, _SLICE_BYTES // table.definition.record.size_bytes)
        for start in range(0, len(ids), n_slice):
            these = ids[start : start + n_slice]
            expected = table.versions(these)
            # uint64: the ids that the index still has, [m], their versions, [m], and the ids that it has no more.
            dead, these, expected = these[expected == 0], these[expected != 0], expected[expected != 0]
            gone.append((dead, np.full(len(dead), self._applied(), np.uint64)))  # erased since the cut
            records, found = self._read(table, these)
            _check(table, these, expected, np.where(found, table.definition.record.versions(records), np.uint64(0)))
            writer.add_rows(these, records)
            progress.size_bytes += records.nbytes
            progress.n_rows += len(these)
            yield progress


def from_storage(store: Store, timeout_s: float) -> ReadRecords:
    """Return a function that takes records from the tables' caches, and those that they lack from storage.

    Args:
        store: open.
        timeout_s: deadline of one read.
    """

    access = RowAccess(store, timeout_s)

    def read(table: TableState, ids: Ids) -> tuple[Bytes, NDArray[np.bool_]]:
        at = table.cache.find(ids)  # int64 [n]: places in the cache, or -1
        records, found = np.empty((len(ids), table.definition.record.size_bytes), np.uint8), at >= 0
        records[found] = table.cache.records[at[found]]
        missing = np.flatnonzero(~found)  # intp [m]: the rows to read from storage
        if len(missing):
            (got,) = access.read([(table.definition, ids[missing])])
            records[missing], found[missing] = got.records, got.found
        return records, found

    return read


def _newer(table: TableState, version: int) -> Ids:
    return np.concatenate([ids for ids, _ in table.portions(above=version)])


def _check(table: TableState, ids: Ids, expected: Ids, got: Ids) -> None:
    wrong = got != expected  # newer: by a batch that the journal does not have
    if wrong.any():
        at = int(np.argmax(wrong))
        state = f"version {split_version(int(got[at]))}" if got[at] else "no row"
        raise LostRowError(
            f"table {table.definition.name!r}, id {table.definition.shown_id(int(ids[at]))}: {state} in storage, expected version "
            f"{split_version(int(expected[at]))} by the shard's index ({int(wrong.sum())} such rows in a slice of the snapshot)"
        )
