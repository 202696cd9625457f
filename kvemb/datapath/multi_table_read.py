"""Rows of several tables, read in one batch; tables whose records are laid out alike are read, parsed and checked as if they were one.

A training step asks tens of small tables for a thousand rows each. Most of a batch's cost is then the price of NumPy's calls. So those are
made once for all tables of a layout: `kvemb.schema.keys.coalesce_keys` makes their keys one part of the read, and each table's share of its
result is a slice. Each thread keeps the memory that records are read into for its next pull (`ThreadArena`). Thread- and fork-safe.
"""

import threading
from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items
from kvemb.net.deadline import Deadline
from kvemb.process.cached_property import batch_value
from kvemb.schema.keys import coalesce_keys
from kvemb.schema.record import HEADER_SIZE
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, ReadResult
from kvemb.stores.store import Store

_MOST_TABLES = 1 << 16  # of one `coalesce_keys`
_KEPT_BYTES = 64 << 20  # of memory, per thread; a larger call takes the rest from the system and returns it
_ALIGN_BYTES = 64
_NO_VERSIONS = np.empty(0, np.uint64)
_GATHERED_AT_ONCE = 1024  # items; a gather into the caller's array goes through a buffer that should stay in a core's cache


class ThreadArena(threading.local):
    """Memory of the calling thread, taken piece by piece and good until its next `reset`; a forked child goes on with copies.

    The system clears new memory page by page, which costs more than all the work of a pull on its bytes.
    """

    def __init__(self) -> None:
        self._kept, self._used = np.empty(0, np.uint8), 0

    def reset(self, n_bytes: int) -> None:
        """Take everything back, and have room for so many bytes (in few pieces)."""
        self._used = 0
        if len(self._kept) < min(n_bytes, _KEPT_BYTES):
            self._kept = np.empty(min(n_bytes + n_bytes // 8, _KEPT_BYTES), np.uint8)

    def take(self, n: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return uint8 [n, size_bytes] of no defined content."""
        start = -(-self._used // _ALIGN_BYTES) * _ALIGN_BYTES
        stop = start + n * size_bytes
        if stop > len(self._kept):
            return np.empty((n, size_bytes), np.uint8)
        self._used = stop
        return self._kept[start:stop].reshape(n, size_bytes)


Missing = list[tuple[TableDef, NDArray[np.uint64]]]
"""Ids of rows that storage does not have, uint64 [n], by table."""


@batch_value
class WantedRows:
    """Rows of one table to be read."""

    definition: TableDef
    ids: NDArray[np.uint64]  # uint64 [n], unique, n > 0


@batch_value
class TableShare:
    """The rows of one table as they arrived; good until the memory that they were read into is taken again."""

    # [k] items, the raw bytes of weights in the table's `row_dtype`, of any stride; the initializer's of rows that do not exist
    values: NDArray[Any]
    found_versions: NDArray[np.uint64]  # uint64 [k], 0 where the row does not exist; [0] unless they were asked for
    at: NDArray[np.intp] | None  # intp [n], where among those the row of each id is; None for 0, 1, 2, …
    ours: bool = False

    def rows(self, inverse: NDArray[np.intp] | None, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the weights of ids, [m] items, in `out` if given; `inverse`, intp [m], says which of the n ids, None: all in order."""
        # at intp [m]: which of the k values each row is, one gather for two; None: all k values in their order
        at = inverse if self.at is None else self.at if inverse is None else self.at.take(inverse)
        if out is None:
            if at is None:
                return self.values if self.ours else self.values.copy()
            return self.values[at]
        if at is None:
            out[...] = self.values
            return out
        for start in range(0, len(at), _GATHERED_AT_ONCE):
            rows = slice(start, start + _GATHERED_AT_ONCE)
            out[rows] = self.values[at[rows]]
        return out

    def versions(self, inverse: NDArray[np.intp] | None) -> NDArray[np.uint64]:
        """Return the versions of the same ids: uint64 [m]."""
        at = inverse if self.at is None else self.at if inverse is None else self.at.take(inverse)  # as in `rows`
        return self.found_versions.copy() if at is None else self.found_versions.take(at)


def read_tables(
    store: Store,
    wanted: Sequence[WantedRows],
    deadline: Deadline,
    memory: ThreadArena,
    *,
    versions: bool = False,
    missing: Missing | None = None,
) -> list[TableShare]:
    """Read rows of several tables in one round trip per node."""
    paged = store.capabilities.pages
    groups: Sequence[Sequence[int]] = [range(1)] if len(wanted) == 1 else _of_one_layout(wanted, paged)
    reads = [_OneLayout([wanted[index] for index in group], paged, memory) for group in groups]
    results = store.rows.read([read.part for read in reads], deadline)
    for read, result in zip(reads, results, strict=True):
        read.take(result, store)
    shares: dict[int, TableShare] = {}
    for group, read in zip(groups, reads, strict=True):
        shares.update(zip(group, read.shares(versions, missing), strict=True))
    return [shares[index] for index in range(len(wanted))]


def _of_one_layout(wanted: Sequence[WantedRows], paged: bool) -> Sequence[Sequence[int]]:
    """Group the tables whose records have one size, dtype and kind of place."""
    by_layout: dict[Hashable, list[int]] = {}
    for index, one in enumerate(wanted):
        definition = one.definition
        layout = definition.record.size_bytes, definition.dim, definition.dtype, definition.pages if paged else None
        by_layout.setdefault(layout, []).append(index)
    return [some[at : at + _MOST_TABLES] for some in by_layout.values() for at in range(0, len(some), _MOST_TABLES)]


class _OneLayout:
    """A read of tables of one layout; the keys, but not the result, hold one table's rows after the other's."""

    def __init__(self, wanted: Sequence[WantedRows], paged: bool, memory: ThreadArena) -> None:
        record = wanted[0].definition.record
        each = [one.definition.keys(one.ids, pages=paged) for one in wanted]
        keys = each[0] if len(each) == 1 else coalesce_keys(each)
        into = memory.take(len(keys.ids), record.prefix_bytes)
        self._wanted = wanted
        self._order: NDArray[np.intp] | None = None
        self._expected: NDArray[np.uint32] | None = None
        self.part = ReadPart(keys, record.size_bytes, record.prefix_bytes, into=into, meanwhile=self._prepare)  # of the read

    def _prepare(self, order: NDArray[np.intp] | None) -> None:
        """Compute what the result is compared with and put in place by; `order` is the result's."""
        wanted = self._wanted
        # k rows of all tables; a slice of `_bounds` is one table's share of the keys' order; _at [k]: where each key's row is in the result
        self._bounds = [slice(*ends) for ends in pairwise(accumulate([len(one.ids) for one in wanted], initial=0))]
        self._order, self._at = order, None  # None: the result has the keys' order
        each = [one.definition.record.header_words(one.ids) for one in wanted]
        self._expected = each[0] if len(each) == 1 else np.concatenate(each)  # uint32 [k]: the first words as they must be, in that order
        if order is not None:
            self._at = np.empty_like(order)
            self._at[order] = np.arange(len(order))
            self._expected = self._expected.take(order)  # [k], in order of arrival

    def take(self, result: ReadResult, store: Store) -> None:
        """Take the result, and refuse a wrong record, before anything is used of any table."""
        self._result = result
        if self._expected is None or self._order is not result.order:
            self._prepare(result.order)
        words = result.records[:, :4].view("<u4")[:, 0]  # [k]: the first word of each record, in order of arrival
        wrong = words != self._expected  # bool [k], in order of arrival
        if 1 not in wrong.tobytes() or not (wrong & result.found).any():
            return
        for one, rows in zip(self._wanted, self._bounds, strict=True):  # the first table with a wrong record is named
            at = rows if self._at is None else self._at[rows]
            where = store.rows.whereabouts(one.definition.keys(one.ids, pages=store.capabilities.pages))
            one.definition.record.check(result.records[at], one.ids, result.found[at], where)

    def shares(self, with_versions: bool, missing: Missing | None) -> list[TableShare]:
        record, result = self._wanted[0].definition.record, self._result
        values = self._weights([] if missing is None else missing)
        versions = _NO_VERSIONS
        if with_versions:  # [k], in order of arrival as `values`
            versions = np.where(result.found, record.versions(result.records), np.uint64(0))
        if self._at is None:
            return [TableShare(values[rows], versions[rows], None) for rows in self._bounds]
        return [TableShare(values, versions, self._at[rows]) for rows in self._bounds]

    def _weights(self, not_found: Missing) -> NDArray[Any]:
        """Return weights in order of arrival, one item per row; adds those that the initializer made to `not_found`."""
        definition, records = self._wanted[0].definition, self._result.records
        if definition.dtype not in ("float16", "bfloat16"):  # where they lie, between the headers
            weights = as_items(records[:, HEADER_SIZE : definition.record.prefix_bytes])
        else:
            weights = as_items(definition.record.weights(records))
        if 0 not in self._result.found.tobytes():
            return weights
        # missing [q]: the rows that storage does not have, in the order of the keys, so that each table's are a run of it, up to its end
        missing = np.flatnonzero(~(self._result.found if self._at is None else self._result.found.take(self._at)))
        ends = np.searchsorted(missing, [rows.stop for rows in self._bounds]).tolist()
        for one, rows, (start, stop) in zip(self._wanted, self._bounds, pairwise([0, *ends]), strict=True):
            if start < stop:
                new = missing[start:stop]  # [q of this table], in the order of the keys of all tables
                ids = one.ids.take(new - rows.start)
                not_found.append((one.definition, ids))
                weights[new if self._at is None else self._at.take(new)] = as_items(one.definition.initial_rows(ids))
        return weights
