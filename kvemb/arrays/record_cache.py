"""A cache of records: rows of fixed size in one array per table, within a budget of bytes for all of them. Pure, NumPy only.

The parameter servers keep the records that they wrote, with memcached's tokens. A shard is the only writer of its rows, so storage holds
the same records, as long as the write was answered. Rows of a batch that was not answered are dropped (`forget`) and fetched.

When the budget is used up, a table takes the room of rows of its own that were not used lately. (CLOCK: a hand goes round, passes over rows
that were used since its last visit, and takes the others.) Memory is claimed from the system as rows come, not before. Not thread-safe.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items
from kvemb.arrays.row_index import IndexLookup, RowIndex

Ids = NDArray[np.uint64]
_INDEX_GROWTH = 1.5  # an erased row keeps its place in the index; the fewer places are free, the sooner all rows are moved
MIN_ROWS = 1024  # every table may keep so many, however many the others hold


@dataclass
class CacheBudget:
    """Bytes that all tables share, and the counts of their look-ups and hits."""

    limit_bytes: int
    used_bytes: int = 0
    n_lookups: int = 0
    n_hits: int = 0


class RecordCache:
    """Keeps records of one table that were written lately, found by id, while the shared budget lasts."""

    def __init__(self, record_bytes: int, budget: CacheBudget) -> None:
        self._budget = budget
        self._record_bytes = record_bytes
        capacity = max(MIN_ROWS, budget.limit_bytes // self._row_bytes) if budget.limit_bytes else 0
        # All by place, [capacity]; places from `_n_taken` on have never held a row.
        self.records = np.empty((capacity, record_bytes), np.uint8)
        self.tokens = np.zeros(capacity, np.uint64)  # memcached's; 0 where none is known
        self._ids = np.zeros(capacity, np.uint64)  # whose record lies there, or lay there last
        self._used = np.zeros(capacity, bool)  # whether the row was used since the hand's last visit
        self._live = np.zeros(capacity, bool)  # whether the place holds a row: `forget` gives it up
        self._places = RowIndex(_INDEX_GROWTH)  # id -> place + 1
        self._kept: IndexLookup | None = None  # of the last `find`
        self._n_taken = 0
        self._hand = 0

    @property
    def _row_bytes(self) -> int:
        # Record, token, id, two flags, and the share of the index (17 bytes a place at a load between 0.57 and 0.85).
        return self._record_bytes + 8 + 8 + 2 + 30

    def find(self, ids: Ids) -> NDArray[np.int64]:
        """Return where each row lies in `records` and `tokens`, -1 where it is not kept: int64 [n]."""
        self._kept = self._places.find(ids)
        at = self._at(self._kept)  # int64 [n]: the place of each id, -1 for none
        kept = at >= 0  # bool [n]
        n_hits = int(np.count_nonzero(kept))
        self._used[at if n_hits == len(at) else at[kept]] = True
        self._budget.n_lookups += len(ids)
        self._budget.n_hits += n_hits
        return at

    def put(
        self,
        ids: Ids,  # uint64 [n]
        records: NDArray[np.uint8],  # uint8 [n, record bytes]; copied
        tokens: Ids | None,  # uint64 [n] kept beside them, or None
        at: NDArray[np.int64] | None = None,
    ) -> None:
        """Keep n unique rows."""
        found, self._kept = self._kept, None
        if not len(self.records):
            return
        if at is None:  # the ids in this array may not be those that were looked up any more
            found = self._places.find(ids)
            at = self._at(found)
        new = np.flatnonzero(at < 0)  # intp [q]: which of the n ids have no place yet
        if not len(new):
            self._set(at, records, tokens)
            self._used[at] = True
            return
        if len(new) < len(ids):
            # Rows that are kept already come first: making room for the others may well take their places, which is fine then.
            kept = np.flatnonzero(at >= 0)  # intp [n - q]
            self._set(at[kept], records, tokens, kept)
            self._used[at[kept]] = True
        places = self._make_room(len(new))  # int64 [p], p <= q: a place for each of the first p new rows
        new = new[: len(places)]  # more rows than there is room for: the rest is not kept
        self._ids[places] = ids[new]
        self._live[places] = True
        if found is None or found.ids is not ids:
            found = self._places.find(ids)
        self._places.set_at(found.take(new), (places + 1).view(np.uint64))
        self._set(places, records, tokens, new)
        self._used[places] = False  # a row seen once is the first to go: a pass over cold rows does not drive out the hot ones

    def forget(self, ids: Ids) -> None:
        """Drop those of these rows that are kept."""
        at = self.peek(ids)
        at = at[at >= 0]  # int64 [k]: the places of those that are kept
        self._places.erase(self._ids[at])
        self._live[at] = False
        self._used[at] = False

    def forget_tokens(self, of: Callable[[Ids], NDArray[np.bool_]]) -> None:
        """Drop the tokens of the rows that `of` names: given uint64 [n] ids, it returns bool [n]."""
        n = self._n_taken
        self.tokens[:n][of(self._ids[:n])] = 0

    def release(self) -> None:
        """Give the budget back, since the table is gone; the cache is not to be used again."""
        n_bytes = self._n_taken * self._row_bytes  # first: threads of several tables change the sum
        self._budget.used_bytes -= n_bytes

    def peek(self, ids: Ids) -> NDArray[np.int64]:
        """Return places as `find` does, -1 for none; it does not count as use."""
        return self._at(self._places.find(ids))

    def _at(self, found: IndexLookup) -> NDArray[np.int64]:
        at = self._places.at(found).view(np.int64)  # [n]: place + 1, 0 for an id that is not kept
        at -= 1
        return at

    def _make_room(self, n: int) -> NDArray[np.int64]:
        """Return places for at most n new rows: unused ones within the budget, then those of rows not used lately."""
        budget = self._budget
        room = max((budget.limit_bytes - budget.used_bytes) // self._row_bytes, MIN_ROWS - self._n_taken, 0)
        n_unused = min(n, room, len(self.records) - self._n_taken)
        evicted = self._evict(min(n - n_unused, self._n_taken))
        unused = np.arange(self._n_taken, self._n_taken + n_unused)
        self._n_taken += n_unused
        n_bytes = n_unused * self._row_bytes
        budget.used_bytes += n_bytes
        return np.concatenate([unused, evicted])

    def _evict(self, n: int) -> NDArray[np.int64]:
        """Turn the hand until n rows are given up; at most two rounds, since the first clears every mark."""
        taken: list[NDArray[np.int64]] = []  # the places given up, window by window
        left = 2 * self._n_taken
        while n > 0 and left > 0:
            # window: the next places that the hand passes over; idle: those of them whose rows were not used since its last visit
            window = np.arange(self._hand, min(self._hand + max(4 * n, MIN_ROWS), self._hand + left, self._n_taken))
            idle = window[~self._used[window]]
            if len(idle) > n:
                idle = idle[:n]
                window = window[: int(idle[-1]) - self._hand + 1]
            self._used[window] = False
            self._used[idle] = True  # taken in this round: not to be taken twice
            taken.append(idle)
            n, left = n - len(idle), left - len(window)
            self._hand = int(window[-1]) + 1 if len(window) and window[-1] + 1 < self._n_taken else 0
        places = np.concatenate(taken) if taken else np.empty(0, np.int64)  # some hold no row: it was forgotten
        self._places.erase(self._ids[places[self._live[places]]])
        self._live[places] = False
        return places

    def _set(
        self,
        places: NDArray[np.int64],
        records: NDArray[np.uint8],
        tokens: Ids | None,
        which: NDArray[np.intp] | None = None,
    ) -> None:
        """Copy records and tokens, or those of them that `which` numbers in ascending order, to their places."""
        n = len(places)
        to: NDArray[np.int64] | slice = places  # where rows go; `at`: which of the given rows go there, n as well
        if n and places[-1] - places[0] == n - 1 and (np.diff(places) == 1).all():
            to = slice(int(places[0]), int(places[0]) + n)  # side by side, as places of new rows mostly are: one copy of all
        at: NDArray[np.intp] | slice = slice(0, n) if which is None or (n and which[-1] == n - 1) else which
        as_items(self.records)[to] = as_items(np.ascontiguousarray(records))[at]  # one item per record
        if tokens is not None:
            self.tokens[to] = tokens[at]
