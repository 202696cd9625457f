"""The engine: fetch the rows of a batch, let the optimizer change them, write them back. One thread, one batch at a time.

A batch is idempotent row by row: a row that already has the batch's version was written by an earlier try and is left alone. So every
retryable storage error is answered by the same batch again, and a batch that was written by half is completed. The index learns of a batch
only when all of it is stored.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvemb.errors import DeadlineExceededError, NodeFullError, NodeUnavailableError, StorageError
from kvemb.keys import RowKeys
from kvemb.net.deadline import Deadline
from kvemb.record import make_version
from kvemb.stores.base import ReadPart, ReadResult, Store, WritePart, WriteResult
from paramserver.batch import APPLY, ERASE, Batch, CheckedRows
from paramserver.fetched import Fetched, from_cache
from paramserver.rewrite import new_records, rows_to_write
from paramserver.tables import Tables, TableState

RETRYABLE = (NodeUnavailableError, DeadlineExceededError, NodeFullError)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_MAX_CONFLICT_ROUNDS = 16

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
        results = self._fetch(todo)
        prepared = [self._prepare(kind, rows, got, version) for rows, got in zip(todo, results, strict=True)]
        prepared = [(rows, part) for rows, part in prepared if len(rows.ids)]
        if not prepared:
            return []
        written = self._store.write([part for _, part in prepared], Deadline.after(self._timeout_s))
        conflicts = [self._settle(rows, part, result) for (rows, part), result in zip(prepared, written, strict=True)]
        return [rows for rows in conflicts if len(rows.ids)]

    def _fetch(self, todo: Sequence[CheckedRows]) -> list[Fetched]:
        """Take rows from the cache, and those that it lacks from storage, all tables in one read."""
        cached = [self._tables.state(rows.definition).cache.find(rows.ids) for rows in todo]
        missing = [rows.take(at < 0) if (at >= 0).any() else rows for rows, at in zip(todo, cached, strict=True)]
        reads = [_read_part(rows) for rows in missing if len(rows.ids)]
        results = iter(self._store.read(reads, Deadline.after(self._timeout_s)) if reads else ())
        fetched = []
        for rows, at, lacking in zip(todo, cached, missing, strict=True):
            got = self._checked(lacking, next(results)) if len(lacking.ids) else None
            fetched.append(got if got is not None and lacking is rows else from_cache(self._tables.state(rows.definition).cache, at, got))
        return fetched

    def _checked(self, rows: CheckedRows, read: ReadResult) -> Fetched:
        got, record = read.in_key_order(), rows.definition.record
        record.check(got.records, rows.ids, got.found, ", ".join(self._store.addresses))
        return Fetched(got.records, got.found, got.tokens)

    def _settle(self, rows: CheckedRows, part: WritePart, result: WriteResult) -> CheckedRows:
        """Keep what was stored; return the rows that met a conflict."""
        cache = self._tables.state(rows.definition).cache
        if result.stored.all():
            cache.put(rows.ids, part.records, result.tokens)
            return rows.take(slice(0, 0))
        conflict = rows.take(~result.stored)
        cache.forget(conflict.ids)
        tokens = None if result.tokens is None else result.tokens[result.stored]
        cache.put(rows.ids[result.stored], part.records[result.stored], tokens)
        return conflict

    def _prepare(self, kind: str, rows: CheckedRows, got: Fetched, version: int) -> tuple[CheckedRows, WritePart]:
        """Compare versions with the index; return the rows still to write and their new records."""
        definition = rows.definition
        state = self._tables.state(definition)
        stored = np.where(got.found, definition.record.versions(got.records), np.uint64(0))
        write = rows_to_write(definition, rows.ids, state.versions(rows.ids), stored, version)
        records, found, tokens = got.records, got.found, got.tokens
        if not write.all():
            rows, records, found = rows.take(write), records[write], found[write]
            tokens = None if tokens is None else tokens[write]
        new = new_records(state, kind, rows, records, found, version)
        return rows, WritePart(_keys(rows), new, None if tokens is None else np.where(found, tokens, np.uint64(0)))

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
        n_existed = int((state.versions(rows.ids) != 0).sum())
        state.applied(rows.ids, version)
        if kind == APPLY:
            state.step += 1
        return n_existed


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
