"""One piece of a batch on its way to storage: its rows are looked up, compared with the index, computed and written, or erased.

A row that meets a conflict goes the same way again. Which rows make a piece, and how an error is met, `paramserver.engine.engine` says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvemb.errors import ForeignPageError, StorageError, n_of
from kvemb.stores.row_io import WritePart, WriteResult
from kvemb.stores.store import Store

from ..model.batch import ASSIGN, ERASE, CheckedRows
from ..model.tables import Tables
from ..model.transition import Replay, Timeline, may_exist, new_records, records_to_write, rows_to_erase
from .batch_records import Fetched, FetchedRecords, PreparedRows, RecordArena
from .row_access import RowAccess
from .storage_pace import CHANGED_BY_ANOTHER_WRITER, MAX_CONFLICT_ROUNDS, PASSING, AheadOfIndex

# Rows are computed in blocks of so many weights: the arrays of one step are still in the processor's cache for the next. The optimizers
# take blocks of the same size (measured there).
_BLOCK_WEIGHTS = 1 << 17

Computed = Callable[[Sequence[PreparedRows]], None]
"""Takes a whole batch's rows and new records, none of which is stored yet; good until the next batch."""


@dataclass(frozen=True, eq=False)
class Change:
    """A batch's change of its rows.

    Args:
        kind: APPLY, ASSIGN or ERASE.
        version: (epoch, k), packed, that the rows get.
        replay: where an earlier process journaled the batch, and may have stored it and others behind it.
    """

    kind: str
    version: int
    replay: Replay | None = None

    @property
    def newest(self) -> int:
        """The highest version that storage may hold by now."""
        return self.version if self.replay is None else self.replay.newest

    def ahead(self, written: Sequence[CheckedRows]) -> AheadOfIndex:
        """The versions that storage may hold and the index does not know; `written`: rows of the batch that may be stored."""
        tail = self.replay
        if tail is None and written:
            tail = Replay(self.version)
            for rows in written:
                tail.will_change(self.kind, rows, self.version)
        return AheadOfIndex(self.version, self.newest, tail)


class PieceWriter:
    """Writes one piece of a batch after the other to storage, for one shard. One thread."""

    def __init__(self, store: Store, tables: Tables, timeline: Timeline, timeout_s: float) -> None:
        self._store, self._tables, self._timeline = store, tables, timeline
        self._access, self._arena = RowAccess(store, timeout_s), RecordArena()
        self._computed: Computed | None = None  # still to be called for the batch at work
        self.has_begun = False  # to write, or erase, rows of the batch
        self.prepared: list[PreparedRows] = []  # in the last round

    def begin(self, computed: Computed | None) -> None:
        """Begin a batch; `computed` is called once before anything is written, unless that is too late, or the batch has several pieces."""
        self.prepared, self._computed, self.has_begun = [], computed, False

    def store(self, change: Change, piece: Sequence[CheckedRows], *, whole: bool) -> None:
        """Bring the rows of a piece to storage; a row that already has this version is not touched.

        Raises:
            StorageError: rows may have been written. Which is not known where a node was away: then they leave the cache, are read again
                at the next try, and their versions tell.
        """
        if not whole:
            self._computed = None
        tables = piece if change.replay is None else [change.replay.still_wanted(rows, change.version) for rows in piece]
        todo = [rows for rows in tables if len(rows.ids)]
        try:
            if change.kind == ERASE:
                todo = todo if change.replay is None else [self._not_newer(rows, change.version) for rows in todo]
                self._erase([rows for rows in todo if len(rows.ids)], change)
                return
            self._arena.reset()
            looks = change.kind != ASSIGN or change.replay is not None
            for _ in range(MAX_CONFLICT_ROUNDS):
                if not todo:
                    return
                todo, looks = self._round(change, todo, looks=looks), True
            if todo:
                raise _many_changes(todo)
        except (*PASSING, ForeignPageError):
            for rows in piece:
                self._tables.state(rows.definition).cache.forget(rows.ids)
            raise

    def _round(self, change: Change, todo: Sequence[CheckedRows], *, looks: bool) -> list[CheckedRows]:
        """Read (see `_fetch`), compute, write once; return the rows that met a conflict."""
        self.prepared = []
        self._tables.follow(self._store.nodes.cluster_map)
        fetched = self._fetch(todo, looks=looks)
        prepared = [self._prepare(change, rows, got) for rows, got in zip(todo, fetched, strict=True)]
        computed, self._computed = self._computed, None  # only the first round begins with all rows
        if computed is not None and all(len(one.rows.ids) == len(rows.ids) for one, rows in zip(prepared, todo, strict=True)):
            computed(prepared)
        now, self.has_begun = [one for one in prepared if len(one.rows.ids)], True
        written = self._access.write([one.part for one in now])
        conflicts = [self._settle(change.kind, one, result) for one, result in zip(now, written, strict=True)]
        if change.newest != change.version:
            self._keep_done(todo, fetched, change.version)
        self.prepared = prepared
        return [rows for rows in conflicts if len(rows.ids)]

    def _fetch(self, todo: Sequence[CheckedRows], *, looks: bool = True) -> list[Fetched]:
        """Take rows from the cache, and those that it lacks from storage, all tables in one read.

        Without `looks`, rows of which the index knows none are not read: any value that is there would be written over (docs/adr/0093).
        """
        caches = [self._tables.state(rows.definition).cache for rows in todo]
        places = [cache.find(rows.ids) for cache, rows in zip(caches, todo, strict=True)]  # of each table int64 [n]; -1: not in the cache
        lacking = [at < 0 for at in places]  # of each table bool [n]
        if not looks and all(self._are_new(rows) for rows in todo):
            sizes = [(len(rows.ids), rows.definition.record.size_bytes) for rows in todo]
            return [Fetched(cache, at, FetchedRecords.of_none(*size)) for cache, at, size in zip(caches, places, sizes, strict=True)]
        missing = [rows if none.all() else rows.take(none) for rows, none in zip(todo, lacking, strict=True) if none.any()]
        read = iter(self._access.read([(rows.definition, rows.ids) for rows in missing]))
        return [Fetched(cache, at, next(read) if none.any() else None) for cache, at, none in zip(caches, places, lacking, strict=True)]

    def _are_new(self, rows: CheckedRows) -> bool:
        """Whether the index knows none of these rows; then none is in the cache."""
        return not self._tables.state(rows.definition).versions(rows.ids, keep=True).any()

    def _settle(self, kind: str, prepared: PreparedRows, result: WriteResult) -> CheckedRows:
        """Put stored rows into the cache; return the rows that met a conflict.

        Assigned rows are kept only among rows that are cached already: nobody trains them yet, and there may be many.
        """
        rows, part = prepared.rows, prepared.part
        cache = self._tables.state(rows.definition).cache
        if result.stored.all():
            if kind != ASSIGN or (prepared.at >= 0).any():
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
            ids, read = rows.ids[got.at < 0], got.read  # uint64 [r], the rows that were read, and their records in the same order
            done = read.found & (rows.definition.record.versions(read.records) >= np.uint64(version))
            tokens = None if read.tokens is None else read.tokens[done]
            self._tables.state(rows.definition).cache.put(ids[done], read.records[done], tokens)

    def _prepare(self, change: Change, rows: CheckedRows, got: Fetched) -> PreparedRows:
        """Compare versions with the index; return the rows still to write and their new records."""
        definition, state, n = rows.definition, self._tables.state(rows.definition), len(rows.ids)
        # write: bool [n], which rows are to be written. These rows fill the first `stop` places of the others. records: uint8 [n, record
        # bytes], the new ones; tokens: uint64 [n], 0 = no such row yet; new: bool [n], whether the row is created.
        records = self._arena.take(n, definition.record.size_bytes)
        tokens, write, new = np.zeros(n, np.uint64), np.ones(n, bool), np.ones(n, bool)
        known = state.versions(rows.ids, keep=True)  # uint64 [n], by the index; 0 = no such row
        stop = 0
        for block, old in got.blocks(max(1, _BLOCK_WEIGHTS // definition.dim)):
            these = rows if len(old.found) == n else rows.take(block)  # the block's m rows; `old`: their records, as found
            # uint64 [m]: versions as they are stored, 0 = not found. todo: bool [m], which of these rows are still to be written.
            stored = np.where(old.found, definition.record.versions(old.records), np.uint64(0))
            todo = records_to_write(
                definition, these.ids, known[block], stored, version=change.version, newest=change.newest, timeline=self._timeline
            )
            if not todo.all():
                self._access.write_second(definition, these.ids[~todo], old.records[~todo])
                write[block] = todo
                these, old = these.take(todo), old.take(todo)
            start, stop = stop, stop + len(these.ids)
            new_records(state, change.kind, these, old.records, old.found, version=change.version, out=records[start:stop])
            new[start:stop] = ~old.found
            if old.tokens is not None:
                tokens[start:stop] = np.where(old.found, old.tokens, np.uint64(0))
        at = got.at
        if stop < len(write):
            rows, at = rows.take(write), at[write]
        return PreparedRows(rows, WritePart(self._access.keys(definition, rows.ids, new[:stop]), records[:stop], tokens[:stop]), at)

    def _erase(self, todo: Sequence[CheckedRows], change: Change) -> None:
        self.has_begun = True
        for rows in todo:
            self._tables.state(rows.definition).cache.forget(rows.ids)
        if change.replay is None:  # a replay may be later than the end of the drop
            todo = [rows for rows in todo if not self._tables.state(rows.definition).goes_whole]
        if self._store.capabilities.cas:
            for rows in todo:
                may = partial(rows_to_erase, rows.definition, version=change.version, newest=change.newest, epoch=self._timeline.epoch)
                self._access.erase(rows.definition, rows.ids, may)
            return
        if self._store.capabilities.pages:  # where a row lies in a page, erasing one that does not exist would make its page
            todo = [rows.take(self._tables.state(rows.definition).versions(rows.ids) != 0) for rows in todo]
            todo = [rows for rows in todo if len(rows.ids)]
        parts: list[WritePart] = []
        for rows in todo:
            exist = partial(may_exist, self._tables.state(rows.definition), change.replay)
            parts += self._access.parts_to_erase(rows.definition, rows.ids, exist)
        if parts:
            self._access.erase_blindly(parts)

    def _not_newer(self, rows: CheckedRows, version: int) -> CheckedRows:
        """The rows that an erase may still take away: those created again after it have a version above its own."""
        self._tables.state(rows.definition).cache.forget(rows.ids)
        got = self._fetch([rows])[0].read
        assert got is not None
        return rows.take(got.found & (rows.definition.record.versions(got.records) < np.uint64(version)))


def _many_changes(left: Sequence[CheckedRows]) -> StorageError:
    rows = left[0]
    return StorageError(f"table {rows.definition.name!r}: {n_of(len(rows.ids), 'row')} {CHANGED_BY_ANOTHER_WRITER}")
