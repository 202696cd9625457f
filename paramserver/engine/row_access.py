"""The one way to write rows in storage: look at the versions there, judge them, and write or erase under tokens.

A row may change between look and write: by a late write of our own whose answer was lost, a process that was shut out, another program. On
storage with compare-and-swap that is a conflict, after which the row is looked at again. On other storage no write of ours can arrive late
(the old connection is confirmed dead first), so a write needs no look.
"""

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import are_among
from kvemb.errors import StorageError, n_of
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.record import HEADER_SIZE, RecordFormat
from kvemb.schema.table_def import TableDef
from kvemb.stores.node_batch import read_coalesced
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.store import OtherNodes, Store

from .batch_records import FetchedRecords
from .storage_pace import CHANGED_BY_ANOTHER_WRITER, MAX_CONFLICT_ROUNDS, Pace

Ids = NDArray[np.uint64]
Mask = NDArray[np.bool_]
Judge = Callable[[Ids, Ids, Mask], Mask]
"""(ids, versions without meaning where not found, found) -> which of these rows may be erased: bool [n]. May raise."""
Exist = Callable[[Ids], Mask]
"""Says of ids which exist, rows that are to be erased perhaps among them: uint64 [m] -> bool [m]."""
T = TypeVar("T", bound=Sized)
_NONE = np.empty((0, 0), np.uint8)


class RowCalls(Protocol):
    """Reads and writes of rows: those of a store, of one node in repair, or of the other nodes of slots under way."""

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        """See `StoreRows.read`."""

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        """See `StoreRows.write`."""

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[Mask]:
        """See `StoreRows.erase`."""


@dataclass(frozen=True, eq=False)
class SeenRows:
    """The values under the keys of n rows, as one look found them.

    Args:
        versions: uint64 [n], 0 where there was no row of ours.
        foreign: bool [n], where another program's value was.
        tokens: uint64 [n] to write under, 0 where there was no value; None on storage without them.
    """

    versions: Ids
    foreign: Mask
    tokens: Ids | None


@dataclass(frozen=True, eq=False)
class _Unwritten:
    """Rows and their records that are still to be written."""

    ids: Ids
    records: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.ids)


class RowAccess:
    """Reads rows of one shard to be judged by version, and writes or erases them under tokens. One thread.

    One class of many methods: reads, writes and erasing share its calls, its pace and its other nodes.
    """

    def __init__(
        self,
        store: Store,
        timeout_s: float,
        *,
        calls: RowCalls | None = None,
        error: type[StorageError] = StorageError,
        pace: Pace | None = None,
    ) -> None:
        self._store, self._timeout_s, self._error = store, timeout_s, error
        self._calls: RowCalls = calls or store.rows
        self.pace = pace or Pace(timeout_s)

    def by(self, calls: RowCalls) -> "RowAccess":
        """Return the same access by other reads and writes, at the same pace."""
        return RowAccess(self._store, self._timeout_s, calls=calls, error=self._error, pace=self.pace)

    def keys(self, definition: TableDef, ids: Ids, new: Mask | None = None) -> RowKeys:
        """Return the keys of rows; `new` (bool [n]) says which do not exist, where that is known."""
        return definition.keys(ids, pages=self._store.capabilities.pages, new=new)

    def deadline(self) -> Deadline:
        """Return the deadline of one call that begins now."""
        return Deadline.after(self._timeout_s)

    def read(self, tables: Sequence[tuple[TableDef, Ids]]) -> list[FetchedRecords]:
        """Read whole records of several tables at once, with tokens."""
        if not tables:
            return []
        sizes = [definition.record.size_bytes for definition, _ in tables]
        parts = [ReadPart(self.keys(*table), size, size, tokens=True) for table, size in zip(tables, sizes, strict=True)]
        results, found = read_coalesced(parts, lambda few: self._calls.read(few, self.deadline())), []
        for (definition, ids), part, result in zip(tables, parts, results, strict=True):
            got = result.in_key_order()
            definition.record.check(got.records, ids, got.found, self._store.rows.whereabouts(part.keys))
            found.append(FetchedRecords(got.records, got.found, got.tokens))
        return found

    def write(self, parts: Sequence[WritePart]) -> list[WriteResult]:
        """Write records under the tokens that they carry; conflicts are in the results.

        Rows whose slots move between nodes are written to both: first to the new one, as readers go from the old one to that.
        """
        if not parts:
            return []
        if (second := self._second) is not None and not second.flipped:
            for part in parts:
                self._write_second(second, part)
        results = self._calls.write(parts, self.deadline())
        if (now := self._second) is not None and (now.flipped or now is not second):
            # Another thread follows the map. Where slots flipped between the two writes, both went to one node; no plan goes on from there
            # before this batch is over.
            for part, result in zip(parts, results, strict=True):
                self._write_second(now, taken(part, result.stored))
        return results

    def parts_to_erase(self, definition: TableDef, ids: Ids, exist: Exist) -> list[WritePart]:
        """Return what erases n rows, on storage that has pages: pages in which no row remains, and the rows of others."""
        pages, rest = _emptied(definition, ids, exist)
        return [WritePart(keys, _NONE) for keys in (definition.whole(pages), self.keys(definition, rest)) if len(keys)]

    def erase_whole(self, definition: TableDef, ids: Ids) -> None:
        """Erase all rows of the buckets or pages of these; on storage without them, these rows."""
        if self._store.capabilities.pages:
            self._calls.erase([WritePart(definition.whole(np.unique(definition.containers(ids))), _NONE)], self.deadline())
        else:
            self.erase(definition, ids)

    def erase_blindly(self, parts: Sequence[WritePart]) -> None:
        """Erase rows of any version, on storage without compare-and-swap."""
        other = self._other
        self._erase_other(other, parts)
        self._calls.erase(parts, self.deadline())
        if (now := self._other) is not other:  # see `write`
            self._erase_other(now, parts)

    def write_second(self, definition: TableDef, ids: Ids, records: NDArray[np.uint8]) -> None:
        """Write rows that are in storage to their other node, too, if they have one: their writer may have died before it did."""
        if (second := self._second) is not None and len(ids):
            self._write_second(second, WritePart(self.keys(definition, ids), np.ascontiguousarray(records)))

    @property
    def _second(self) -> OtherNodes | None:
        other = self._other
        return other if other is not None and other.written else None

    @property
    def _other(self) -> OtherNodes | None:
        """The other nodes that may hold rows, also while these are erased there: a remaining row would come back with its slot."""
        return self._store.rows.moving if self._calls is self._store.rows else None

    def _erase_other(self, other: OtherNodes | None, parts: Sequence[WritePart]) -> None:
        if other is not None:
            moving = [some for some in (_moving(other, part) for part in parts) if len(some.keys)]
            if moving:
                other.erase(moving, self.deadline())

    def _write_second(self, second: OtherNodes, part: WritePart) -> None:
        """Write those rows of a part that have another node there; with compare-and-swap after a look at them (docs/adr/0081)."""
        moving = _moving(second, part)
        if not self._store.capabilities.cas and len(moving.keys):
            second.write([moving], self.deadline())
            return
        for _ in range(MAX_CONFLICT_ROUNDS):
            if not len(moving.keys):
                return
            moving = self._write_older(second, moving)
        if len(moving.keys):
            raise self._error(f"{n_of(len(moving.keys), 'row')} {CHANGED_BY_ANOTHER_WRITER}")

    def _write_older(self, second: OtherNodes, part: WritePart) -> WritePart:
        """Look at rows there, and write those that are not newer; return those that changed in between.

        A row that is newer there is not touched: the write to its first node will show where its version comes from.
        """
        read = ReadPart(part.keys, part.records.shape[1], HEADER_SIZE, tokens=True, foreign=True)
        seen = second.read([read], self.deadline())[0].in_key_order()
        assert seen.tokens is not None
        assert seen.foreign is not None
        tokens = np.where(seen.found | seen.foreign, seen.tokens, np.uint64(0))  # uint64 [n]; 0: no value there
        older = ~seen.found | (RecordFormat.versions(seen.records) <= RecordFormat.versions(part.records))  # bool [n]: to be written
        part = taken(WritePart(part.keys, part.records, tokens), older)
        return taken(part, ~second.write([part], self.deadline())[0].stored) if len(part.keys) else part

    def look(self, definition: TableDef, ids: Ids, *, tokens: bool = True, deadline: Deadline | None = None) -> SeenRows:
        """Look at the values under the keys of n rows."""
        record = definition.record
        part = ReadPart(self.keys(definition, ids), record.size_bytes, HEADER_SIZE, tokens=tokens, foreign=True)
        read = self._calls.read([part], deadline or self.deadline())[0].in_key_order()
        assert read.foreign is not None
        foreign = read.foreign | (read.found & ~record.belong(read.records, ids))  # bool [n]: no record, or another row's
        versions = np.where(read.found & ~foreign, record.versions(read.records), np.uint64(0))
        return SeenRows(versions, foreign, None if read.tokens is None else np.where(read.found | foreign, read.tokens, np.uint64(0)))

    def write_over(
        self, definition: TableDef, ids: Ids, records: NDArray[np.uint8], judge: Callable[[Ids, Ids, Ids], None] | None = None
    ) -> None:
        """Write records over any value that is there.

        Args:
            ids: uint64 [n], unique.
            records: uint8 [n, record bytes].

        Raises:
            StorageError: some may have been written.
        """

        def one_round(left: _Unwritten) -> _Unwritten:
            keys, tokens = self.keys(definition, left.ids), None
            if self._store.capabilities.cas and judge is not None:
                seen = self.look(definition, left.ids)
                tokens = seen.tokens
                judge(left.ids, seen.versions, definition.record.versions(left.records))
            elif self._store.capabilities.cas:
                tokens = _tokens(self._calls, keys, left.records.shape[1], self.deadline())
            part = WritePart(keys, np.ascontiguousarray(left.records), tokens)
            stored = self.write([part])[0].stored
            return _Unwritten(left.ids[:0], left.records[:0]) if stored.all() else _Unwritten(left.ids[~stored], left.records[~stored])

        self._until_none_is_left(definition, _Unwritten(ids, records), one_round, len(ids) * records.shape[1])

    def erase(self, definition: TableDef, ids: Ids, may: Judge | None = None, *, exist: Exist | None = None) -> None:
        """Erase rows that are there; one that does not exist is not touched, since erasing it would make its page.

        On storage with compare-and-swap a late erase cannot delete a newer row: a row that changed since the look is looked at again.

        Args:
            ids: uint64 [n], unique.

        Raises:
            RecordError: `may` is to judge a value that another program wrote; nothing was erased.
            StorageError: rows may have been erased, some possibly later, but none that was written again since (on storage with tokens).
        """
        if exist is not None and self._store.capabilities.pages:
            pages, ids = _emptied(definition, ids, exist)
            if len(pages):
                self.erase_blindly([WritePart(definition.whole(pages), _NONE)])
        other = self._other
        self._erase_at(other, definition, ids, may)
        n_bytes = len(ids) * definition.record.size_bytes
        self._until_none_is_left(definition, ids, lambda left: self._erase_once(definition, left, may), n_bytes)
        if (now := self._other) is not other:  # see `write`
            self._erase_at(now, definition, ids, may)

    def _erase_at(self, other: OtherNodes | None, definition: TableDef, ids: Ids, may: Judge | None) -> None:
        if other is not None and (moving := other.has(self.keys(definition, ids))).any():
            self.by(other).erase(definition, ids[moving], may)

    def _erase_once(self, definition: TableDef, ids: Ids, may: Judge | None) -> Ids:
        """Look at rows once, and erase those that are there; return those that changed in between."""
        record, deadline = definition.record, self.deadline()
        part = ReadPart(self.keys(definition, ids), record.size_bytes, HEADER_SIZE, tokens=True, foreign=may is None)
        rows = self._calls.read([part], deadline)[0].in_key_order()
        here = rows.found if rows.foreign is None else rows.found | rows.foreign  # bool [n]: to be erased
        if may is not None:
            record.check(rows.records, ids, rows.found)  # otherwise a foreign value's bytes would be taken for a version
            here = may(ids, record.versions(rows.records), rows.found)
        ids = ids[here]  # uint64 [m], as are the tokens; gone: bool [m]
        if not len(ids):
            return ids
        tokens = None if rows.tokens is None else rows.tokens[here]
        gone = self._calls.erase([WritePart(self.keys(definition, ids), _NONE, tokens)], deadline)[0]
        return ids[~gone]

    def _until_none_is_left(self, definition: TableDef, left: T, one_round: Callable[[T], T], n_bytes: int) -> None:
        """Call again with the rows that met a conflict until none did."""
        for _ in range(MAX_CONFLICT_ROUNDS):
            if not len(left):
                return
            with self.pace.exchange(n_bytes):
                left = one_round(left)
        if len(left):
            raise self._error(f"table {definition.name!r}: {n_of(len(left), 'row')} {CHANGED_BY_ANOTHER_WRITER}")


def _emptied(definition: TableDef, ids: Ids, exist: Exist) -> tuple[Ids, Ids]:
    """Return the pages in which no row remains without these n rows, and those of the rows that lie in none of them."""
    pages = definition.emptied(ids, exist)
    return pages, ids[~are_among(definition.containers(ids), pages)] if len(pages) else ids


def _tokens(calls: RowCalls, keys: RowKeys, record_bytes: int, deadline: Deadline) -> Ids:
    """Return the tokens of any values under keys: uint64 [n], 0 where there is none."""
    read = calls.read([ReadPart(keys, record_bytes, 0, tokens=True)], deadline)[0]
    assert read.tokens is not None
    tokens = np.empty_like(read.tokens)
    tokens[slice(None) if read.order is None else read.order] = np.where(read.found, read.tokens, np.uint64(0))
    return tokens


def _moving(second: OtherNodes, part: WritePart) -> WritePart:
    """Return the rows of a part that have another node, without tokens: those are good for one node."""
    some = taken(part, second.has(part.keys))
    return WritePart(some.keys.of_any_rows(), some.records)


def taken(part: WritePart, rows: Mask) -> WritePart:
    """Return the rows of a part that `rows` (bool [n]) selects."""
    if rows.all():
        return part
    records = part.records[rows] if len(part.records) == len(part.keys) else part.records
    return WritePart(part.keys[np.flatnonzero(rows)], records, None if part.tokens is None else part.tokens[rows])
