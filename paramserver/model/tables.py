"""A shard's tables: definition, update method, rows and step of each. The lock that the index needs is here.

A table's rows are known by its index, in memory, and by the shard's row log, on disk. The index has every row that has changed since the
log was last written (published), and as many of the others as the shard's memory for indexes allows: those that were written last. Rows
that were erased since stand apart. Only right after the log is published rows leave the index. So while that has every row, the log is not
asked; and where it is asked, it is right about every row that is neither in the index nor apart.

Only the apply thread changes a table; other threads count and list. So the apply thread's own reads of the index need no lock.

A batch needs the places of its rows in the index up to three times: to tell how stale its push was, to compare storage with the index, and
to set the new versions when all is stored. A look-up with `keep` keeps them until then, so that all three are one look-up where the ids are
one and the same array: those of a push that was not merged with others.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.record_cache import CacheBudget, RecordCache
from kvemb.arrays.row_index import END, IndexLookup, RowIndex
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.table_def import TableDef

from ..optim import build_optimizer

Ids = NDArray[np.uint64]
PORTION_ROWS = 1 << 16
_NONE = np.empty(0, np.uint64)
_SAMPLED_ROWS = 1 << 16
_MOST_RANGES = 256  # of which each costs as much as some thousand rows
_LEFT = 0.75  # of the memory for indexes: the rest is for what changes until they are too large again
_TOO_LARGE, _UNPUBLISHED_BYTES = 1.25, 16 << 20


class RowLog(Protocol):
    """The rows of a shard on its disk (`paramserver.row_log.run_set`, which may not be imported here). Any thread."""

    def versions(self, definition: TableDef, ids: Ids) -> tuple[Ids, NDArray[np.bool_]]:
        """Return the versions of n rows, uint64 [n], and which of them exist, bool [n]."""

    def between(self, definition: TableDef, low: int, high: int) -> Iterator[tuple[Ids, Ids]]:
        """Yield ids and versions of the rows in a range of keys, in order, some thousands at a time."""


@dataclass(frozen=True, eq=False)
class RowsAtStart:
    """The rows of a table when its shard starts.

    Args:
        published: version up to which the log has every change.
        rows: the index: all rows that are newer than in the log, and others.
        gone: rows that were erased since the log was published, and as of which version.
        in_memory: whether the index has all rows.
        n_rows: that exist; None: as many as the index has.
    """

    published: int
    rows: RowIndex
    gone: RowIndex
    in_memory: bool
    n_rows: int


def all_of(portions: Iterable[tuple[Ids, Ids]]) -> tuple[Ids, Ids]:
    """Return ids and versions of all portions of rows."""
    ids, versions = zip((_NONE, _NONE), *portions, strict=True)
    return np.concatenate(ids), np.concatenate(versions)


class TableState:
    """One table of a shard: its rows, cache of records, optimizer, step.

    One class: its methods read or change one index, under one lock, of which some rows are apart or on disk.

    Attributes:
        n_rows: rows that exist.
    """

    def __init__(
        self,
        definition: TableDef,
        step: int = 0,
        rows: tuple[Ids, Ids] | None = None,
        budget: CacheBudget | None = None,
        *,
        log: RowLog | None = None,
        known: RowsAtStart | None = None,
    ) -> None:
        self.definition = definition
        self.optimizer = build_optimizer(definition.optimizer)
        self.step, self.n_applied, self.n_erased = step, 0, 0  # rows written by batches, and erased, since this process started
        self.cache = RecordCache(definition.record.size_bytes, budget or CacheBudget(0))
        self._index = RowIndex(order=definition.order) if known is None else known.rows
        self._kept: IndexLookup | None = None  # of the batch under way
        self._asked: IndexLookup | None = None  # the same, once the log was asked for the rows that it lacks
        self._log, self._in_memory = log, known is None or known.in_memory  # whether the index has all rows
        self._gone = RowIndex(order=definition.order) if known is None else known.gone  # and the versions as of which they are gone
        self._published = 0 if known is None else known.published  # version up to which the log has every change
        self._lock = threading.Lock()
        self.goes_whole = False
        if rows is not None:
            self._index.put(*rows)
        self.n_rows = len(self._index) if known is None else known.n_rows

    def let_go(self) -> None:
        """From now on erased rows may stay in storage: the table is being dropped, and its buckets are deleted in the end."""
        self.goes_whole = True

    @property
    def index_bytes(self) -> int:
        """Memory of the index, and of what it knows of erased rows until the log notes them."""
        return self._index.size_bytes + self._gone.size_bytes

    def versions(self, ids: Ids, *, keep: bool = False) -> Ids:
        """Return the version of each id, 0 where it does not exist: uint64 [n]. Apply thread only.

        Args:
            ids: uint64 [n].
        """
        if keep:
            self._kept = self._find(ids)
        versions = self._index.at(self._kept) if keep and self._kept is not None else self._index.get(ids)
        if not self._in_memory and (self._asked is None or self._asked.ids is not ids):
            self._fill_in(ids, versions, self._gone, keep=keep)
        return versions

    def count_step(self) -> None:
        """Record one more apply. Apply thread only."""
        self.step += 1

    def applied(self, ids: Ids, version: int) -> None:
        """Record that n unique rows now have this version. Apply thread only."""
        if not self._in_memory:
            self.versions(ids, keep=True)  # afterwards the index lacks new rows alone
        found, self._kept, self._asked = self._find(ids), None, None
        self.n_applied += len(ids)
        with self._lock:
            self.n_rows -= len(self._index)
            self._index.set_at(found, version)
            self.n_rows += len(self._index)

    def erased(self, ids: Ids, version: int) -> int:
        """Record that n unique rows are gone as of this version; return how many existed. Apply thread only."""
        existed = ids[self.versions(ids, keep=True) != 0]
        self._kept = self._asked = None
        with self._lock:
            self._index.erase(existed)
            if self._log is not None:
                self._gone.put(existed, np.full(len(existed), version, np.uint64))
            self.n_rows -= len(existed)
            self.n_erased += len(existed)  # last: a thread that reads this number finds none of these rows
        return len(existed)

    def gave(self, ids: Ids) -> None:
        """Forget n unique rows that existed: another shard has them now, and the log notes that they are gone. Apply thread only."""
        self._kept = self._asked = None
        with self._lock:
            self._index.erase(ids)
            self._gone.erase(ids)
            self.n_rows -= len(ids)
            self.n_erased += len(ids)

    def make_room(self, ids: Ids) -> None:
        """Let the index grow for n more rows. Apply thread only."""
        self._kept = self._asked = None
        with self._lock:
            self._index.make_room(ids)

    def took(self, ids: Ids, versions: Ids, n_new: int) -> None:
        """Add n unique rows that another shard has handed over, and the log has; `n_new` of them were not here. Apply thread only."""
        self._kept = self._asked = None
        with self._lock:
            self._index.put(ids, versions)
            self.n_rows += n_new
            self._gone.erase(ids)

    def published(self, version: int) -> None:
        """Note that the row log has every change up to a version: so it knows which rows were erased until then. Apply thread only."""
        self._published = version
        ids, versions, _ = self._gone.portion(0, n_rows=len(self._gone) + 1, above=version)
        with self._lock:
            self._gone = RowIndex(order=self.definition.order)  # a new one: another thread may be listing rows
            self._gone.put(ids, versions)

    def let_leave(self, share: float) -> None:
        """Let the rows that were written longest ago leave the index, right after `published`, until about this share of it is left."""
        assert self._log is not None
        versions = np.sort(self._index.get(self._index.some(_SAMPLED_ROWS, 0.0)))
        if not len(versions):
            return
        oldest = versions[min(len(versions) - 1, int((1 - share) * len(versions)))]
        with self._lock:
            self._in_memory = False
            self._kept = self._asked = None
            self._index.forget_up_to(min(int(oldest), self._published))

    def raise_step(self, step: int) -> None:
        """Count at least so many applies. Apply thread only."""
        self.step = max(self.step, step)

    def portion(self, low: int = 0, high: int = END, n_rows: int = PORTION_ROWS, *, above: int = 0) -> tuple[Ids, Ids, int]:
        """Return ids and versions of the first rows of a range of keys, and the key where the next portion begins. Any thread.

        This is the one way in which rows are listed: in the order of their keys (`TableDef.order`), a bounded portion at a time. Rows may
        come and go between two portions: see `RowIndex.portion`.
        """
        with self._lock:
            ids, versions, next_ = self._index.portion(low, high, n_rows, above=above)
            gone = self._gone
        if self._in_memory or 0 < self._published <= above:  # 0: all rows are asked for, and the log may have some that were taken over
            return ids, versions, next_
        found = [(ids, versions)]
        for logged, as_logged in self._in_log.between(self.definition, low, next_):
            with self._lock:  # a row may have come into the index since, or changed there
                now = self._index.get(logged)
                now = np.where(now != 0, now, as_logged)
                live = (gone.get(logged) == 0) & (self._gone.get(logged) == 0) & (now > np.uint64(above))
            found.append((logged[live], now[live]))
            if (n_rows := n_rows - len(logged)) <= 0:
                next_ = int(self.definition.order.keys(logged[-1:])[0]) + 1
                break
        return *self._merged(found, next_), next_

    def portions(self, slots: NDArray[np.bool_] | None = None, n_rows: int = PORTION_ROWS, *, above: int = 0) -> Iterator[tuple[Ids, Ids]]:
        """Yield the rows of some slots (bool [16384]; None: all), portion by portion; a portion may have none."""
        ranges = [(0, END)] if slots is None else self.definition.key_ranges(slots)
        for at, high in ranges if len(ranges) <= _MOST_RANGES else [(0, END)]:
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
        known: NDArray[np.bool_] = self.versions_now(ids) != 0
        return known

    def versions_now(self, ids: Ids) -> Ids:
        """Return the version of each id, 0 where it does not exist: uint64 [n]. Any thread; `versions` is that of the apply thread."""
        with self._lock:
            versions, gone = self._index.get(ids), self._gone
        if not self._in_memory:
            self._fill_in(ids, versions, gone)
        return versions

    def gone(self) -> Iterator[tuple[Ids, Ids]]:
        """Yield the rows that were erased since the row log was published, and as of which version, in the order of their keys."""
        low = 0
        while low < END:
            ids, versions, low = self._gone.portion(low)
            yield ids, versions

    @property
    def _in_log(self) -> RowLog:
        assert self._log is not None
        return self._log

    def _fill_in(self, ids: Ids, versions: Ids, gone: RowIndex, *, keep: bool = False) -> None:
        """Look in the log for those of n rows whose version is 0, and fill them in; with `keep` the index has them from now on."""
        lacking = np.flatnonzero(versions == 0)
        if len(lacking):
            logged, exist = self._in_log.versions(self.definition, ids[lacking])
            with self._lock:
                exist &= gone.get(ids[lacking]) == 0
                versions[lacking[exist]] = logged[exist]
                if keep:
                    self._index.put(ids[lacking[exist]], logged[exist])
        if keep:
            self._asked = self._kept

    def _merged(self, found: Sequence[tuple[Ids, Ids]], end: int) -> tuple[Ids, Ids]:
        """Return rows in the order of their keys, up to that before `end`; of one that comes twice, as it came first."""
        ids, versions = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        keys, first = np.unique(self.definition.order.keys(ids), return_index=True)
        first = first[keys <= np.uint64(end - 1)]
        return ids[first], versions[first]

    def _find(self, ids: Ids) -> IndexLookup:
        kept = self._kept
        return kept if kept is not None and kept.ids is ids else self._index.find(ids)


class Tables:
    """The tables of which this shard has had work, by name. Thread-safe."""

    def __init__(
        self, states: list[TableState], budget: CacheBudget | None = None, *, log: RowLog | None = None, index_bytes: int | None = None
    ) -> None:
        self.cache_budget = budget or CacheBudget(0)
        self._log, self._index_bytes = log, index_bytes
        self._map: ClusterMap | None = None
        self._states = {state.definition.key: state for state in states}
        self._lock = threading.Lock()

    def state(self, definition: TableDef) -> TableState:
        """Return the table's state; a table met for the first time has no rows."""
        with self._lock:
            if definition.key not in self._states:
                self._states[definition.key] = TableState(definition, budget=self.cache_budget, log=self._log)
            return self._states[definition.key]

    def known(self, definition: TableDef, ids: Ids) -> NDArray[np.bool_]:
        """See `TableState.known`."""
        return self.state(definition).known(ids)

    def forget(self, definition: TableDef) -> None:
        """Forget a table that was dropped, once nothing changes it any more."""
        with self._lock:
            state = self._states.pop(definition.key, None)
        if state is not None:
            state.cache.release()

    def published(self, version: int) -> None:
        """Note that the row log has every change up to a version, durably. Rows leave indexes that are too large. Apply thread only."""
        states = self.all()
        for state in states:
            state.published(version)
        n_bytes = sum(state.index_bytes for state in states)
        if self._index_bytes is not None and self._index_bytes < n_bytes:
            for state in states:
                state.let_leave(_LEFT * self._index_bytes / n_bytes)

    @property
    def index_is_large(self) -> bool:
        """Whether the indexes take so much more memory than they may that rows should leave before the journal asks for it. Any thread."""
        most = self._index_bytes
        return most is not None and sum(state.index_bytes for state in self.all()) > _TOO_LARGE * most + _UNPUBLISHED_BYTES

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
