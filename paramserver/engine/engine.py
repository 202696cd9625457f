"""The engine: fetch the rows of a batch, let the optimizer change them, write them back. One thread, one batch at a time.

A batch is idempotent row by row: a row that already has the batch's version was written by an earlier try and is left alone. So every
retryable storage error is answered by the same rows again, and a batch that was written by half is completed. A large batch is stored piece
by piece (`paramserver.engine.batch_pieces`), and the index learns of each piece when all of it is stored: that is not tried again. The
batch counts, as one step of its tables, when its last piece is stored. Replay after a crash is the same code with the batches' old versions
and the rules of `transition.Replay`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import ForeignPageError, StorageError
from kvemb.schema.record import split_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import WritePart, WriteResult
from kvemb.stores.store import Store

from ..model.batch import APPLY, ERASE, Batch, CheckedRows
from ..model.prepared_rows import PreparedRows
from ..model.tables import Tables, TableState
from ..model.timeline import Timeline
from ..model.transition import Replay, new_records, records_to_write, rows_to_erase
from .arena import RecordArena
from .batch_boundary import BatchBoundary
from .batch_pieces import Pace, cut, size_bytes
from .engine_ports import ALONE, EnginePorts
from .fetched_rows import Fetched, FetchedRecords
from .repair_port import AheadOfIndex, Pause
from .row_access import RowAccess, until_none_is_left
from .storage_retry import CHANGED_BY_ANOTHER_WRITER, PASSING, until_stored
from .write_behind import WriteBehind

# Rows are computed in blocks of so many weights, so that what one step leaves is still in the processor's cache for the next; the
# optimizers take blocks of the same size (measured there).
_BLOCK_WEIGHTS = 1 << 17

Computed = Callable[[Sequence[PreparedRows]], None]
"""Takes a whole batch's rows and new records, none of which is stored yet; good until the next batch."""


@dataclass(frozen=True, eq=False)
class Applied:
    """What a batch did.

    Args:
        k: its number.
        n_existed: rows of it that existed before (of an erase: that were erased).
        rows: where asked for, the updated weights of the tables that were written in one round: uint8 [n, row bytes], in the storage
            dtype and the order of the batch's ids. None of a batch of several pieces.
        written: the rows and records of its last round, which is all of it unless a write met a conflict; good until the next batch. None
            of a batch of several pieces: the index, the cache and storage have them.
    """

    k: int
    n_existed: int
    rows: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    written: Sequence[PreparedRows] = ()


class Engine:
    """The one writer of this shard's rows.

    Args:
        store: open.
        tables: the shard's tables.
        epoch: of this process's versions.
        k: of the last batch applied.
        timeout_s: deadline of one storage call.
        timeline: what is known of versions; unless given, only that of the epoch.
        rows_applied: so far, all processes of the shard together.
        ports: what it asks and tells.
    """

    def __init__(
        self,
        store: Store,
        tables: Tables,
        *,
        epoch: int,
        k: int,
        timeout_s: float,
        timeline: Timeline | None = None,
        rows_applied: int = 0,
        ports: EnginePorts = ALONE,
    ) -> None:
        self._store = store
        self._tables = tables
        self._access = RowAccess(store, timeout_s)
        self._pace = Pace(timeout_s)
        self._scratch = RecordArena()
        self._prepared: list[PreparedRows] = []  # in the last round
        self._computed: Computed | None = None  # still to be called for the batch at work
        self.epoch = epoch
        self._timeline = timeline or Timeline(epoch)
        self.k = k
        self.rows_applied = rows_applied
        self.batch_boundary = BatchBoundary()
        self._observer, self._repair, self.behind = ports.observer, ports.repair, ports.behind

    def run(
        self,
        batch: Batch,
        version: int,
        pause: Pause,
        replay: Replay | None = None,
        *,
        keep_rows: bool = False,
        computed: Computed | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> Applied:
        """Apply one batch: returns when every row of it is stored, or held back by write-behind within its bound.

        Args:
            batch: the rows.
            version: (epoch, k), packed, that its rows get; above that of every batch before.
            pause: called between tries.
            replay: when the batch was journaled by an earlier process, which may have stored it and others behind it.
            keep_rows: whether the updated weights are wanted.
            computed: called once before anything is written; not where that is too late, because an earlier try wrote some of it, nor where
                the batch has no rows, or more than one piece.
            between: called between two pieces, when `rows_applied` counts the rows of the first; raises to give up.

        Raises:
            StorageError: not retryable, or `pause` or `between` raised. Rows of the batch may have been written, and the index knows those
                of the pieces that were stored whole; the batch does not count.
        """
        with self.batch_boundary.batch():
            self._prepared, self._computed = [], computed
            if self.behind is not None and batch.kind != APPLY and batch.tables:
                self.behind.write(pause)
            applied = self._run(batch, version, pause, replay, between)
            if keep_rows:
                applied = replace(applied, rows=self._rows(batch))
            if self.behind is not None and self.behind.due(self.k):
                self.behind.write(pause)
            return applied

    @property
    def stored_k(self) -> int:
        """The last batch up to which storage has every row. Any thread."""
        k = self.k
        return k if self.behind is None else self.behind.stored_k(k)

    def write_dirty(self, pause: Pause) -> None:
        """Write what write-behind holds back; between batches, apply thread only.

        Raises:
            StorageError: as `run`.
        """
        if self.behind is not None:
            with self.batch_boundary.batch():
                self.behind.write(pause)

    def _run(self, batch: Batch, version: int, pause: Pause, replay: Replay | None, between: Callable[[], None]) -> Applied:
        left, n_existed, n_pieces = list(batch.tables), 0, 0
        while left:
            if n_pieces:
                between()
                if self.behind is not None and self.behind.due(self.k):  # its bound holds during a long batch, too
                    self.behind.write(pause)
            piece, left = self._store_piece(batch.kind, left, version, pause, replay)
            n_existed += sum(self._commit(batch.kind, rows, version) for rows in piece)
            n_pieces += 1
            self.rows_applied += sum(len(rows.ids) for rows in piece)
        for rows in batch.tables if batch.kind == APPLY else ():
            self._tables.state(rows.definition).count_step()
        self.k = split_version(version)[1]
        if n_pieces > 1:
            self._prepared = []
        return Applied(self.k, n_existed, written=self._prepared)

    def _store_piece(
        self, kind: str, left: list[CheckedRows], version: int, pause: Pause, replay: Replay | None
    ) -> tuple[list[CheckedRows], list[CheckedRows]]:
        """Store the first rows of those left, as many as one exchange takes; try until that is done, and return them and the others.

        What is found lost meanwhile is restored first.
        """
        ahead = AheadOfIndex(version, version) if replay is None else AheadOfIndex(version, replay.newest, replay)

        def store() -> tuple[list[CheckedRows], list[CheckedRows]]:
            piece, rest = cut(left, self._pace.n_bytes)
            if rest:
                self._computed = None
            try:
                with self._pace.exchange(size_bytes(piece)):
                    self._store_all(kind, piece, version, replay)
            except (*PASSING, ForeignPageError):
                self._forget(piece)
                raise
            return piece, rest

        def mend(error: StorageError) -> None:
            self._repair.rows(Batch(kind, tuple(cut(left, self._pace.n_bytes)[0])), ahead)

        return until_stored(store, pause, self._repair, mend, ahead)

    def _forget(self, piece: Sequence[CheckedRows]) -> None:
        """Which rows were written is not known now: fetch them all, and let their versions tell. Dirty rows were not to be written."""
        for rows in piece:
            self._tables.state(rows.definition).cache.forget(rows.ids, pinned=False)

    def _store_all(self, kind: str, piece: Sequence[CheckedRows], version: int, replay: Replay | None) -> None:
        tables = piece if replay is None else [replay.still_wanted(rows, version) for rows in piece]
        todo = [rows for rows in tables if len(rows.ids)]
        if kind == ERASE:
            todo = todo if replay is None else [self._not_newer(rows, version) for rows in todo]
            self._erase([rows for rows in todo if len(rows.ids)], version, version if replay is None else replay.newest)
            return
        self._scratch.reset()
        behind = self.behind if kind == APPLY and replay is None else None
        with nullcontext() if behind is None else behind.batch(split_version(version)[1]):
            self._rounds(kind, todo, version, version if replay is None else replay.newest, behind)

    def _rounds(self, kind: str, todo: list[CheckedRows], version: int, newest: int, behind: WriteBehind | None) -> None:
        until_none_is_left(todo, lambda left: self._round(kind, left, version, newest, behind), _many_changes)

    def _round(self, kind: str, todo: Sequence[CheckedRows], version: int, newest: int, behind: WriteBehind | None) -> list[CheckedRows]:
        """Read, compute, write once; return the rows that met a conflict."""
        self._prepared = []
        fetched = self._fetch(todo)
        prepared = [self._prepare(kind, rows, got, version, newest) for rows, got in zip(todo, fetched, strict=True)]
        self._tell_computed(todo, prepared)
        now = [one for one in (prepared if behind is None else map(behind.hold, prepared)) if len(one.rows.ids)]
        written = self._access.write([one.part for one in now])
        conflicts = [self._settle(one, result) for one, result in zip(now, written, strict=True)]
        if newest != version:
            self._keep_done(todo, fetched, version)
        self._prepared = prepared
        return [rows for rows in conflicts if len(rows.ids)]

    def _tell_computed(self, todo: Sequence[CheckedRows], prepared: Sequence[PreparedRows]) -> None:
        """Say once what will be written, if that is every row of the batch: only its first round begins with all of them."""
        computed, self._computed = self._computed, None
        if computed is not None and all(len(one.rows.ids) == len(rows.ids) for one, rows in zip(prepared, todo, strict=True)):
            computed(prepared)

    def _rows(self, batch: Batch) -> dict[str, NDArray[np.uint8]]:
        """The updated weights of the tables that the last round made whole: copies, uint8 [n, row bytes] in the batch's order."""
        n_rows = {rows.definition.name: len(rows.ids) for rows in batch.tables}
        whole = [one for one in self._prepared if len(one.rows.ids) == n_rows[one.rows.definition.name] > 0]
        return {one.rows.definition.name: one.weights for one in whole}

    def _fetch(self, todo: Sequence[CheckedRows]) -> list[Fetched]:
        """Take rows from the cache, and those that it lacks from storage, all tables in one read."""
        caches = [self._tables.state(rows.definition).cache for rows in todo]
        places = [cache.find(rows.ids) for cache, rows in zip(caches, todo, strict=True)]
        lacking = [at < 0 for at in places]
        missing = [rows if none.all() else rows.take(none) for rows, none in zip(todo, lacking, strict=True) if none.any()]
        read = iter(self._access.read([(rows.definition, rows.ids) for rows in missing]))
        return [Fetched(cache, at, next(read) if none.any() else None) for cache, at, none in zip(caches, places, lacking, strict=True)]

    def _settle(self, prepared: PreparedRows, result: WriteResult) -> CheckedRows:
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

    def _keep_done(self, todo: Sequence[CheckedRows], fetched: Sequence[Fetched], version: int) -> None:
        """In a replay: keep the rows that were read and are stored already, so that the batches to come need not read them again."""
        for rows, got in zip(todo, fetched, strict=True):
            if got.read is None:
                continue
            ids, read = rows.ids[got.at < 0], got.read
            done = read.found & (rows.definition.record.versions(read.records) >= np.uint64(version))
            tokens = None if read.tokens is None else read.tokens[done]
            self._tables.state(rows.definition).cache.put(ids[done], read.records[done], tokens)

    def _prepare(self, kind: str, rows: CheckedRows, got: Fetched, version: int, newest: int) -> PreparedRows:
        """Compare versions with the index; return the rows still to write and their new records."""
        definition, state, n = rows.definition, self._tables.state(rows.definition), len(rows.ids)
        records = self._scratch.take(n, definition.record.size_bytes)
        tokens, write, new = np.zeros(n, np.uint64), np.ones(n, bool), np.ones(n, bool)
        known = state.versions(rows.ids, keep=True)
        stop = 0
        for block, old in got.blocks(max(1, _BLOCK_WEIGHTS // definition.dim)):
            these = rows if len(old.found) == n else rows.take(block)
            stored = np.where(old.found, definition.record.versions(old.records), np.uint64(0))
            todo = records_to_write(definition, these.ids, known[block], stored, version=version, newest=newest, timeline=self._timeline)
            if not todo.all():
                write[block] = todo
                these, old = these.take(todo), old.take(todo)
            self._tell(definition, these.ids, old)
            start, stop = stop, stop + len(these.ids)
            new_records(state, kind, these, old.records, old.found, version=version, out=records[start:stop])
            new[start:stop] = ~old.found
            if old.tokens is not None:
                tokens[start:stop] = np.where(old.found, old.tokens, np.uint64(0))
        at = got.at
        if stop < len(write):
            rows, at = rows.take(write), at[write]
        return PreparedRows(rows, WritePart(self._access.keys(definition, rows.ids, new[:stop]), records[:stop], tokens[:stop]), at)

    def _tell(self, definition: TableDef, ids: NDArray[np.uint64], old: FetchedRecords) -> None:
        """Let the observer hear of rows about to change, those that exist."""
        if not old.found.all():
            ids, old = ids[old.found], old.take(old.found)
        if len(ids):
            self._observer.overwriting(definition, ids, definition.record.versions(old.records), old.records)

    def _erase(self, todo: Sequence[CheckedRows], version: int, newest: int) -> None:
        empty = np.empty((0, 0), np.uint8)
        if self._observer.wants_erased:
            for rows in todo:
                for block, old in self._fetch([rows])[0].blocks(max(1, _BLOCK_WEIGHTS // rows.definition.dim)):
                    self._tell(rows.definition, rows.ids[block], old)
        for rows in todo:
            self._tables.state(rows.definition).cache.forget(rows.ids)
        if self._store.capabilities.cas:
            for rows in todo:
                may = partial(rows_to_erase, rows.definition, version=version, newest=newest, epoch=self.epoch)
                self._access.erase(rows.definition, rows.ids, may)
            return
        if self._store.capabilities.pages:  # where a row lies in a page, erasing one that does not exist would make its page
            todo = [rows.take(self._tables.state(rows.definition).versions(rows.ids) != 0) for rows in todo]
            todo = [rows for rows in todo if len(rows.ids)]
        if todo:
            self._store.erase([WritePart(self._access.keys(rows.definition, rows.ids), empty) for rows in todo], self._access.deadline())

    def _not_newer(self, rows: CheckedRows, version: int) -> CheckedRows:
        """The rows that an erase may still take away: those created again behind it have a version above its own."""
        self._tables.state(rows.definition).cache.forget(rows.ids)
        got = self._fetch([rows])[0].read
        assert got is not None
        return rows.take(got.found & (rows.definition.record.versions(got.records) < np.uint64(version)))

    def _commit(self, kind: str, rows: CheckedRows, version: int) -> int:
        state: TableState = self._tables.state(rows.definition)
        if kind == ERASE:
            self._observer.erased(rows.definition, rows.ids, version)
            return state.erased(rows.ids)
        n_rows = state.n_rows
        state.applied(rows.ids, version)
        return len(rows.ids) - (state.n_rows - n_rows)


def _many_changes(left: Sequence[CheckedRows]) -> StorageError:
    rows = left[0]
    return StorageError(f"table {rows.definition.name!r}: {len(rows.ids)} rows {CHANGED_BY_ANOTHER_WRITER}")
