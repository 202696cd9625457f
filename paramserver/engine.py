"""The engine: fetch the rows of a batch, let the optimizer change them, write them back. One thread, one batch at a time.

A batch is idempotent row by row: a row that already has the batch's version was written by an earlier try and is left alone. So every
retryable storage error is answered by the same batch again, and a batch that was written by half is completed. The index learns of a batch
only when all of it is stored.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import DeadlineExceededError, NodeFullError, NodeUnavailableError, StorageError
from kvemb.keys import RowKeys
from kvemb.net.deadline import Deadline
from kvemb.record import make_version
from kvemb.stores.base import ReadPart, ReadResult, Store, WritePart, WriteResult
from paramserver.batch import APPLY, ERASE, Batch, CheckedRows
from paramserver.fetched import Fetched, Records
from paramserver.rewrite import new_records, rows_to_write
from paramserver.tables import Tables, TableState

RETRYABLE = (NodeUnavailableError, DeadlineExceededError, NodeFullError)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_MAX_CONFLICT_ROUNDS = 16
# Rows are computed in blocks of so many weights, so that what one step leaves is still in the processor's cache for the next; the
# optimizers take blocks of the same size (measured there).
_BLOCK_WEIGHTS = 1 << 17
# New records of a batch are built in memory that the last batch used: the system clears fresh memory first, at half the price of using it.
_KEPT_BYTES = 128 << 20

Pause = Callable[[StorageError, float], None]
"""Called with a retryable error before the next try: waits so many seconds, or raises to give the batch up."""


@dataclass(frozen=True, eq=False)
class Applied:
    """What a batch did: its k, and the number of its rows that existed before (of an erase: that were erased)."""

    k: int
    n_existed: int


class Engine:
    """The one writer of this shard's rows.

    Args:
        store: open.
        tables: the shard's tables.
        epoch: of this process's versions.
        k: batches before this one.
        timeout_s: deadline of one storage call.
    """

    def __init__(self, store: Store, tables: Tables, *, epoch: int, k: int, timeout_s: float) -> None:
        self._store = store
        self._tables = tables
        self._timeout_s = timeout_s
        self._memory = np.empty(0, np.uint8)
        self._memory_used = 0
        self.epoch = epoch
        self.k = k
        self.rows_applied = 0

    def run(self, batch: Batch, pause: Pause) -> Applied:
        """Apply one batch: returns when every row of it is stored.

        Raises:
            StorageError: not retryable, or `pause` raised; rows of the batch may have been written, the index has not changed.
        """
        version = make_version(self.epoch, self.k + 1)
        pauses = _pauses()
        while True:
            try:
                self._store_all(batch, version)
                break
            except RETRYABLE as error:
                # Which rows were written is not known now: fetch them all, and let their versions tell.
                for rows in batch.tables:
                    self._tables.state(rows.definition).cache.forget(rows.ids)
                pause(error, next(pauses))
        n_existed = sum(self._commit(batch.kind, rows, version) for rows in batch.tables)
        self.k += 1
        self.rows_applied += batch.n_rows
        return Applied(self.k, n_existed)

    def _store_all(self, batch: Batch, version: int) -> None:
        todo = [rows for rows in batch.tables if len(rows.ids)]
        if batch.kind == ERASE:
            self._erase(todo)
            return
        for _ in range(_MAX_CONFLICT_ROUNDS):
            if not todo:
                return
            todo = self._round(batch.kind, todo, version)
        rows = todo[0]
        raise StorageError(
            f"table {rows.definition.name!r}: {len(rows.ids)} rows were changed between every read and write of {_MAX_CONFLICT_ROUNDS} "
            "tries; is another program writing to these nodes?"
        )

    def _round(self, kind: str, todo: Sequence[CheckedRows], version: int) -> list[CheckedRows]:
        """Read, compute, write once; return the rows that met a conflict."""
        self._memory_used = 0
        fetched = self._fetch(todo)
        prepared = [self._prepare(kind, rows, got, version) for rows, got in zip(todo, fetched, strict=True)]
        prepared = [one for one in prepared if len(one.rows.ids)]
        if not prepared:
            return []
        written = self._store.write([one.part for one in prepared], Deadline.after(self._timeout_s))
        conflicts = [self._settle(one, result) for one, result in zip(prepared, written, strict=True)]
        return [rows for rows in conflicts if len(rows.ids)]

    def _fetch(self, todo: Sequence[CheckedRows]) -> list[Fetched]:
        """Take rows from the cache, and those that it lacks from storage, all tables in one read."""
        cached = [self._tables.state(rows.definition).cache.find(rows.ids) for rows in todo]
        missing = [rows.take(at < 0) if (at >= 0).any() else rows for rows, at in zip(todo, cached, strict=True)]
        reads = [_read_part(rows) for rows in missing if len(rows.ids)]
        results = iter(self._store.read(reads, Deadline.after(self._timeout_s)) if reads else ())
        return [
            Fetched(self._tables.state(rows.definition).cache, at, self._checked(lacking, next(results)) if len(lacking.ids) else None)
            for rows, at, lacking in zip(todo, cached, missing, strict=True)
        ]

    def _checked(self, rows: CheckedRows, read: ReadResult) -> Records:
        got, record = read.in_key_order(), rows.definition.record
        record.check(got.records, rows.ids, got.found, ", ".join(self._store.addresses))
        return Records(got.records, got.found, got.tokens)

    def _settle(self, prepared: "_Prepared", result: WriteResult) -> CheckedRows:
        """Keep what was stored; return the rows that met a conflict."""
        rows, part = prepared.rows, prepared.part
        cache = self._tables.state(rows.definition).cache
        if result.stored.all():
            cache.put(rows.ids, part.records, result.tokens, prepared.at)
            return rows.take(slice(0, 0))
        conflict = rows.take(~result.stored)
        cache.forget(conflict.ids)
        tokens = None if result.tokens is None else result.tokens[result.stored]
        cache.put(rows.ids[result.stored], part.records[result.stored], tokens)
        return conflict

    def _prepare(self, kind: str, rows: CheckedRows, got: Fetched, version: int) -> "_Prepared":
        """Compare versions with the index; return the rows still to write and their new records."""
        definition, state = rows.definition, self._tables.state(rows.definition)
        records = self._new_array(len(rows.ids), definition.record.size_bytes)
        tokens, write = np.zeros(len(rows.ids), np.uint64), np.ones(len(rows.ids), bool)
        stop = 0
        for block, old in got.blocks(max(1, _BLOCK_WEIGHTS // definition.dim)):
            these = rows.take(block)
            stored = np.where(old.found, definition.record.versions(old.records), np.uint64(0))
            todo = rows_to_write(definition, these.ids, state.versions(these.ids), stored, version)
            if not todo.all():
                write[block] = todo
                these, old = these.take(todo), old.take(todo)
            start, stop = stop, stop + len(these.ids)
            new_records(state, kind, these, old.records, old.found, version=version, out=records[start:stop])
            if old.tokens is not None:
                tokens[start:stop] = np.where(old.found, old.tokens, np.uint64(0))
        at = got.at
        if stop < len(write):
            rows, at = rows.take(write), at[write]
        return _Prepared(rows, WritePart(_keys(rows), records[:stop], tokens[:stop]), at)

    def _new_array(self, n: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return uint8 [n, size_bytes] that is good until the next round."""
        start, stop = self._memory_used, self._memory_used + n * size_bytes
        if stop > _KEPT_BYTES:
            return np.empty((n, size_bytes), np.uint8)
        if stop > len(self._memory):
            self._memory = np.empty(stop, np.uint8)  # earlier tables of this round go on using the old one
        self._memory_used = stop
        return self._memory[start:stop].reshape(n, size_bytes)

    def _erase(self, todo: Sequence[CheckedRows]) -> None:
        empty = np.empty((0, 0), np.uint8)
        for rows in todo:
            self._tables.state(rows.definition).cache.forget(rows.ids)
        if todo:
            self._store.erase([WritePart(_keys(rows), empty) for rows in todo], Deadline.after(self._timeout_s))

    def _commit(self, kind: str, rows: CheckedRows, version: int) -> int:
        state: TableState = self._tables.state(rows.definition)
        if kind == ERASE:
            return state.erased(rows.ids)
        n_rows = state.n_rows
        state.applied(rows.ids, version)
        if kind == APPLY:
            state.step += 1
        return len(rows.ids) - (state.n_rows - n_rows)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Rows to write, what to write, and their places in the cache as they were when they were fetched."""

    rows: CheckedRows
    part: WritePart
    at: NDArray[np.int64]


def _keys(rows: CheckedRows) -> RowKeys:
    return RowKeys(rows.definition.tag, rows.ids)


def _read_part(rows: CheckedRows) -> ReadPart:
    size = rows.definition.record.size_bytes
    return ReadPart(_keys(rows), size, size, tokens=True)


def _pauses() -> Iterator[float]:
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
