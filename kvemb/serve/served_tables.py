"""What a serving client knows of its tables: cached rows, which ids exist, and since when the feed vouches for both.

A row from the cache is as good as one from storage while the feed is followed: every change is told, and makes it old. Where the feed is
not followed, or was not when the row was read, it is good for `max_age_s`. A filter stops ids that have no row: those that were there when
it was built, and whatever the feed has told since; without the feed it is not believed for longer than `max_age_s`. Thread-safe: one lock
for all tables, held for a bounded number of ids at a time.
"""

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import mix64
from kvemb.arrays.id_filter import IdFilter
from kvemb.process import ForkLock
from kvemb.schema.table_def import TableDef
from kvemb.serve.cached_rows import CachedRows

Ids = NDArray[np.uint64]
_AT_ONCE = 4096  # ids of a change for which the lock is held


class ServedFrom(IntEnum):
    """Where a row that was looked up comes from; from `OLD` on the answer is degraded: storage did not answer in time."""

    STORAGE = 0
    """Storage was asked."""
    CACHE = 1
    """This client has it, and it is good."""
    UNKNOWN = 2
    """The id has no row: the table's rule for unknown ids."""
    OLD = 3
    """This client has it; it may have changed."""
    DEFAULT = 4
    """This client does not have it: the table's rule for unknown ids."""


@dataclass(eq=False)
class ServedTable:
    """One table."""

    definition: TableDef
    cache: CachedRows | None  # None where rows are not kept
    filter: IdFilter | None = None  # of the ids that exist; None where it is not known yet, or would not fit
    building: IdFilter | None = None  # the filter that will take its place: the feed adds to it, too
    unfilterable: bool = False  # no filter is to be built
    # of the table's rule for unknown ids, see `MeanOf`: when it was computed, and the row; None until then
    mean: tuple[float, NDArray[Any]] | None = None

    @property
    def full(self) -> bool:
        """Whether the filter stops too few ids, since there are many more than when it was built: under 12 bits for each."""
        return self.filter is not None and 8 * self.filter.size_bytes < 12 * self.filter.n_added


@dataclass(eq=False)
class RowsFound:
    """One table's share of a look-up of m ids."""

    served: ServedTable  # the table
    # ids, keys: uint64 [m], and mixed
    ids: Ids
    keys: Ids
    rows: NDArray[Any]  # [m, dim], filled as rows are found
    versions: Ids  # uint64 [m], 0 where a row does not exist
    sources: NDArray[np.uint8]  # uint8 [m], see `ServedFrom`
    left: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    """Which of the ids storage is to be asked for."""
    absent: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    """Which of the ids the filter has stopped."""
    filter: IdFilter | None = None
    """That was asked, or would have been if there had been one."""
    seen: int = 0
    n_asked: int = 0
    age_s: float = 0.0
    """How long ago the oldest of the rows was known to be storage's."""


class ServedTables:
    """The tables of one serving client, by name."""

    def __init__(self, cache_mb: float, filter_mb: float, max_age_s: float) -> None:
        self.max_age_s, self._cache_bytes, self._filter_bytes = max_age_s, int(cache_mb * (1 << 20)), int(filter_mb * (1 << 20))
        self.lock = ForkLock()
        self.by_name: dict[str, ServedTable] = {}
        self._since_s, self._broken_s = math.inf, -math.inf  # since when the feed is followed, and when that ended; inf: not ended

    def reset(self) -> None:
        """Forget everything: in a forked child another thread may have been in the middle of a change."""
        self.by_name = {}
        self._since_s, self._broken_s = math.inf, -math.inf

    def add(self, definition: TableDef) -> ServedTable:
        """Serve a table; return it."""
        cache = CachedRows(definition.dim, definition.row_dtype, self._cache_bytes) if self._cache_bytes else None
        with self.lock:
            return self.by_name.setdefault(definition.name, ServedTable(definition, cache, unfilterable=not self._filter_bytes))

    def drop(self, name: str) -> None:
        """Forget a table."""
        with self.lock:
            self.by_name.pop(name, None)

    def drop_all(self, keys: Collection[str]) -> None:
        """Forget the tables with these keys, `TableDef.key`."""
        with self.lock:
            self.by_name = {name: one for name, one in self.by_name.items() if one.definition.key not in keys}

    # --- look-ups --------------------------------------------------------------------------------------------------------------------

    def find(self, found: RowsFound, now_s: float) -> None:
        """Fill in what the cache has and what the filter stops; `left` is what remains."""
        with self.lock:
            cache = found.served.cache
            if cache is None:
                found.left = np.arange(len(found.ids))
            else:
                records, good = cache.find(found.keys, self._not_before_s(now_s))
                found.seen = cache.n_changes
                hits, found.left = np.flatnonzero(good), np.flatnonzero(~good)
                if len(hits):
                    which = hits if len(found.left) else slice(None)
                    self._take(found, which, records[which], ServedFrom.CACHE, now_s)
            found.filter = found.served.filter
            if found.filter is not None and len(found.left) and self._broken_s >= now_s - self.max_age_s:
                may = found.filter.may_have(found.keys[found.left])
                found.absent, found.left = found.left[~may], found.left[may]

    def find_old(self, found: RowsFound, now_s: float) -> None:
        """Fill in whatever rows the cache has of those that are left, however old; that an id had none then, says nothing of now."""
        with self.lock:
            if found.served.cache is None:
                return
            records, kept = found.served.cache.peek(found.keys[found.left])
            kept[kept] = found.served.cache.versions(records[kept]) != 0
            if not kept.any():
                return
            self._take(found, found.left[kept], records[kept], ServedFrom.OLD, now_s)
            found.left = found.left[~kept]

    def keep(self, found: RowsFound, ids: Ids, rows: NDArray[Any], versions: Ids, began_s: float) -> None:
        """Keep what a pull of n unique ids brought; rows that are newer here take their place in `rows` and `versions`."""
        served = found.served
        if served.cache is None and served.building is None and served.filter is found.filter:
            return
        keys = mix64(ids)
        with self.lock:
            for one in (served.filter, served.building):  # an id that was seen must not be stopped by a filter that has come since
                if one is not None and one is not found.filter:
                    one.add(keys[versions != 0])
            if served.cache is not None:
                told = began_s >= self._since_s or self._since_s == math.inf
                seen = found.seen if told else -1  # the feed was followed from the middle of the pull on
                served.cache.put(keys, rows, versions, began_s=began_s, answered_s=time.monotonic(), seen=seen)

    def _take(
        self, found: RowsFound, which: slice | NDArray[np.intp], records: NDArray[np.uint8], source: ServedFrom, now_s: float
    ) -> None:
        cache = found.served.cache
        assert cache is not None
        found.rows[which], found.versions[which], found.sources[which] = cache.rows(records), cache.versions(records), source
        known_s = float(cache.answered_s(records).min())
        if source is ServedFrom.CACHE and known_s >= self._since_s:
            known_s = max(known_s, min(self._broken_s, now_s))
        found.age_s = max(found.age_s, now_s - known_s)

    # --- the feed --------------------------------------------------------------------------------------------------------------------

    @property
    def followed(self) -> bool:
        """Whether every change is told."""
        return self._broken_s == math.inf

    def follow(self, since_s: float | None = None) -> None:
        """Every change since then is told; None: since the feed was followed first, also what changed while it was broken."""
        with self.lock:
            self._since_s, self._broken_s = self._since_s if since_s is None else since_s, math.inf

    def broken(self, since_s: float) -> None:
        """Changes since then are not told, but will be."""
        with self.lock:
            self._broken_s = min(self._broken_s, since_s)

    def lost(self) -> None:
        """Changes were missed: rows are old, and filters are built anew."""
        with self.lock:
            self._since_s, self._broken_s = math.inf, -math.inf
            for served in self.by_name.values():
                served.filter = served.building = None
        self.tell_all()

    def tell(self, name: str, ids: Ids, versions: Ids, *, erased: bool) -> None:
        """Take over a change of rows: uint64 [n] each."""
        for start in range(0, len(ids), _AT_ONCE):
            some, theirs = mix64(ids[start : start + _AT_ONCE]), versions[start : start + _AT_ONCE]
            with self.lock:
                served = self.by_name.get(name)
                if served is None:
                    return
                for one in (served.filter, served.building):
                    if one is not None and not erased:
                        one.add(some)
                if served.cache is not None:
                    served.cache.tell(some, theirs)

    def tell_all(self) -> None:
        """All rows have changed."""
        with self.lock:
            for served in self.by_name.values():
                if served.cache is not None:
                    served.cache.tell_all()

    def _not_before_s(self, now_s: float) -> float:
        """How old a row may be: since when storage must have answered."""
        aged_s = now_s - self.max_age_s
        return min(self._since_s, aged_s) if self._broken_s >= aged_s else aged_s

    # --- filters ---------------------------------------------------------------------------------------------------------------------

    def unfiltered(self) -> ServedTable | None:
        """Return a table whose filter is to be built, if there is one and the feed is followed."""
        with self.lock:
            wanted = [one for one in self.by_name.values() if not one.unfilterable and (one.filter is None or one.full)]
        return wanted[0] if wanted and self.followed else None

    def begin_filter(self, served: ServedTable, n_rows: int) -> IdFilter | None:
        """Begin a filter for so many rows; None where there is no room for a byte for each."""
        with self.lock:
            others = sum(one.filter.size_bytes for one in self.by_name.values() if one.filter is not None and one is not served)
            size_bytes = min(5 * n_rows // 2 + (1 << 16), self._filter_bytes - others)
            if size_bytes < max(n_rows, 8):
                served.filter, served.unfilterable = None, True
                return None
            served.building = IdFilter(size_bytes)
            return served.building

    def fill(self, building: IdFilter, ids: Ids) -> None:
        """Add ids to a filter that is being built."""
        for start in range(0, len(ids), _AT_ONCE):
            with self.lock:
                building.add(mix64(ids[start : start + _AT_ONCE]))

    def end_filter(self, served: ServedTable, building: IdFilter) -> None:
        """Take a filter into use, unless changes were missed meanwhile."""
        with self.lock:
            if served.building is building:
                served.filter, served.building = building, None
                served.unfilterable = served.full  # as large as it may be: building it again would not help
