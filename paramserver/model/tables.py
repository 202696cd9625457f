"""A shard's tables in memory: definition, update method, index and step of each. The lock that the index needs is here.

Only the apply thread changes a table; other threads count and list. So the apply thread's own reads of the index need no lock.

A batch needs the places of its rows in the index up to three times: to tell how stale its push was, to compare storage with the index, and
to set the new versions when all is stored. A look-up with `keep` keeps them until then, so that all three are one look-up where the ids are
one and the same array: those of a push that was not merged with others.
"""

import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.record_cache import CacheBudget, RecordCache
from kvemb.arrays.row_index import END, IndexLookup, RowIndex
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.table_def import TableDef

from ..optim import build_optimizer

Ids = NDArray[np.uint64]
PORTION_ROWS = 1 << 16


class TableState:
    """One table in a shard's memory: index, cache of records, optimizer, step.

    Args:
        definition: the table.
        step: applies of this table on this shard so far.
        rows: (ids, versions) of the rows that exist, from a clean stop; None for a table without rows.
        budget: of the shard's cache of records; None for no cache.
    """

    def __init__(self, definition: TableDef, step: int = 0, rows: tuple[Ids, Ids] | None = None, budget: CacheBudget | None = None) -> None:
        self.definition = definition
        self.optimizer = build_optimizer(definition.optimizer)
        self.step, self.n_applied, self.n_erased = step, 0, 0  # rows written by batches, and erased, since this process started
        self.cache = RecordCache(definition.record.size_bytes, budget or CacheBudget(0))
        self._index = RowIndex(order=definition.order)
        self._kept: IndexLookup | None = None  # of the batch under way
        self._lock = threading.Lock()
        self.goes_whole = False
        if rows is not None:
            self._index.put(*rows)

    def let_go(self) -> None:
        """From now on erased rows may stay in storage: the table is being dropped, and its buckets are deleted in the end."""
        self.goes_whole = True

    @property
    def n_rows(self) -> int:
        """Rows that exist."""
        return len(self._index)

    def versions(self, ids: Ids, *, keep: bool = False) -> Ids:
        """Return the version of each id, 0 where it does not exist: uint64 [n]. Apply thread only.

        Args:
            ids: uint64 [n].
            keep: these are n unique rows of a batch to be applied; their array does not change until it is.
        """
        if not keep:
            return self._index.get(ids)
        self._kept = self._find(ids)
        return self._index.at(self._kept)

    def count_step(self) -> None:
        """Record one more apply. Apply thread only."""
        self.step += 1

    def applied(self, ids: Ids, version: int) -> None:
        """Record that n unique rows now have this version. Apply thread only."""
        found, self._kept = self._find(ids), None
        self.n_applied += len(ids)
        with self._lock:
            self._index.set_at(found, version)

    def erased(self, ids: Ids) -> int:
        """Record that n unique rows are gone; return how many existed. Apply thread only."""
        self._kept = None
        with self._lock:
            n_rows = self._index.erase(ids)
            self.n_erased += n_rows  # last: a thread that reads this number finds none of these rows
        return n_rows

    def make_room(self, ids: Ids) -> None:
        """Let the index grow for n more rows. Apply thread only."""
        self._kept = None
        with self._lock:
            self._index.make_room(ids)

    def took(self, ids: Ids, versions: Ids) -> None:
        """Add n unique rows that another shard has handed over. Apply thread only."""
        self._kept = None
        with self._lock:
            self._index.put(ids, versions)

    def raise_step(self, step: int) -> None:
        """Count at least so many applies. Apply thread only."""
        self.step = max(self.step, step)

    def portion(self, low: int = 0, high: int = END, n_rows: int = PORTION_ROWS, *, above: int = 0) -> tuple[Ids, Ids, int]:
        """Return ids and versions of the first rows of a range of keys, and the key where the next portion begins. Any thread.

        This is the one way in which rows are listed: in the order of their keys (`TableDef.order`), a bounded portion at a time. Rows may
        come and go between two portions: see `RowIndex.portion`.

        Args:
            low, high: the range, without `high`.
            n_rows: about so many.
            above: only rows whose version is above this one.
        """
        with self._lock:
            return self._index.portion(low, high, n_rows, above=above)

    def portions(self, slots: NDArray[np.bool_] | None = None, n_rows: int = PORTION_ROWS, *, above: int = 0) -> Iterator[tuple[Ids, Ids]]:
        """Yield the rows of some slots (bool [16384]; None: all), portion by portion; a portion may have none."""
        for at, high in [(0, END)] if slots is None else self.definition.key_ranges(slots):
            while at < high:
                ids, versions, at = self.portion(at, high, n_rows, above=above)
                ours = slice(None) if slots is None else slots[self.definition.placement.slots(ids)]
                yield ids[ours], versions[ours]

    def page(self, low: int, limit: int) -> Ids:
        """Return the ids of the first rows from a key on, in the order of their keys: `limit` of them, or all there are. Any thread."""
        pages, n = [np.empty(0, np.uint64)], 0
        while low < END and n < limit:
            ids, _, low = self.portion(low, n_rows=min(limit, PORTION_ROWS))
            pages.append(ids)
            n += len(ids)
        return np.concatenate(pages)[:limit]

    def some(self, limit: int, start: float) -> Ids:
        """Return some ids; see `RowIndex.some`. Any thread."""
        with self._lock:
            return self._index.some(limit, start)

    def known(self, ids: Ids) -> NDArray[np.bool_]:
        """Return which of n rows exist: bool [n]. Any thread."""
        with self._lock:
            known: NDArray[np.bool_] = self._index.get(ids) != 0
            return known

    def arrays(self) -> tuple[Ids, Ids]:
        """Return copies of all ids and versions, in no particular order: for the saved state and the cut of a save."""
        with self._lock:
            return self._index.arrays()

    def _find(self, ids: Ids) -> IndexLookup:
        kept = self._kept
        return kept if kept is not None and kept.ids is ids else self._index.find(ids)


class Tables:
    """The tables of which this shard has had work, by name. Thread-safe.

    Args:
        states: known from a clean stop.
        budget: for the caches of tables met later; None for no cache.
    """

    def __init__(self, states: list[TableState], budget: CacheBudget | None = None) -> None:
        self.cache_budget = budget or CacheBudget(0)
        self._map: ClusterMap | None = None
        self._states = {state.definition.key: state for state in states}
        self._lock = threading.Lock()

    def state(self, definition: TableDef) -> TableState:
        """Return the table's state; a table met for the first time has no rows."""
        with self._lock:
            if definition.key not in self._states:
                self._states[definition.key] = TableState(definition, budget=self.cache_budget)
            return self._states[definition.key]

    def forget(self, definition: TableDef) -> None:
        """Forget a table that was dropped, once nothing changes it any more."""
        with self._lock:
            self._states.pop(definition.key, None)

    def follow(self, cluster_map: ClusterMap) -> None:
        """Forget the cached tokens of rows whose slots have changed their node, where they are not valid; call it before each batch.

        Apply thread only.
        """
        before, self._map = self._map, cluster_map
        if before is None or before.slot_nodes is cluster_map.slot_nodes:
            return
        moved = before.slot_nodes != cluster_map.slot_nodes
        for state in self.all() if moved.any() else []:
            state.cache.forget_tokens(partial(_have_moved, state.definition, moved))

    def all(self) -> list[TableState]:
        """Return every state, by name."""
        with self._lock:
            return [state for _, state in sorted(self._states.items())]


def _have_moved(definition: TableDef, moved: NDArray[np.bool_], ids: Ids) -> NDArray[np.bool_]:
    """Which rows lie in moved slots, where rows have keys of their own: on all storage with tokens."""
    have_moved: NDArray[np.bool_] = moved[definition.keys(ids, pages=False).slots()]
    return have_moved
