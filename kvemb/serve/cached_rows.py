"""Rows of one table as a serving client keeps them, each with its version and the moment at which storage answered.

Kept in a `RecordCache`. A row never gives way to an older one: of two with a version the higher stays. A row that exists and one that does
not have no order, unless the one was asked for after the other had come: else neither is believed, and the next look-up asks again. The
feed makes rows old; a row that is old is still there, for when storage does not answer. A row that is on its way while the feed tells its
change may be older than that: it comes in as an old one. NumPy only; not thread-safe.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import GOLDEN
from kvemb.arrays.ids import as_items
from kvemb.arrays.record_cache import CacheBudget, RecordCache
from kvemb.arrays.row_index import IndexLookup

Ids = NDArray[np.uint64]
_HEAD = 16  # bytes before a row: its version '<u8', when storage answered '<f8'
_CELL_BITS = 16
_CELL_SHIFT = np.uint64(64 - _CELL_BITS)
_OLD, _GOOD = np.uint64(0), np.uint64(1)  # tokens


class CachedRows:
    """Rows of one table, within a budget that tables share.

    Args:
        dim, dtype: of a row.
        budget: of all tables.

    Example:
        >>> rows, ids = CachedRows(1, np.dtype(np.float32), CacheBudget(1 << 20)), np.array([7], np.uint64)
        >>> rows.put(ids, np.ones((1, 1), np.float32), np.array([5], np.uint64), began_s=1.0, answered_s=2.0, seen=rows.n_changes)
        >>> at, good = rows.find(ids, not_before_s=0.0)
        >>> rows.rows(at), good
        (array([[1.]], dtype=float32), array([ True]))
        >>> rows.tell(ids, np.array([6], np.uint64))
        >>> rows.find(ids, not_before_s=0.0)[1]
        array([False])
    """

    def __init__(self, dim: int, dtype: "np.dtype[Any]", budget: CacheBudget) -> None:
        self._dim, self._dtype, n_bytes = dim, dtype, dim * dtype.itemsize
        self._record_bytes = _HEAD + n_bytes + -n_bytes % 8  # versions are aligned
        self._cache = RecordCache(self._record_bytes, budget)
        self._versions, self._answered, self._items = self._fields(self._cache.records)
        self._changed = np.zeros(1 << _CELL_BITS, np.int64)  # by an id's hash: the number of the last change that was told of such ids
        self.n_changes = 0
        """How many changes were told; a pull notes it when it begins."""

    def find(self, ids: Ids, not_before_s: float) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return where each row is, -1 for none, and whether it is good: not told old, and no older than that. [n] each."""
        at = self._cache.find(ids)
        good = at >= 0
        good &= self._cache.tokens[at] == _GOOD
        good &= self._answered[at] >= not_before_s
        return at, good

    @property
    def found(self) -> IndexLookup | None:
        """Where the last `find` saw its ids, for `put`."""
        return self._cache.found

    def peek(self, ids: Ids) -> NDArray[np.int64]:
        """Return where each row is, -1 for none: int64 [n]."""
        return self._cache.peek(ids)

    def rows(self, at: NDArray[np.int64]) -> NDArray[Any]:
        """Return the rows that are there: [n, dim]."""
        return self._items[at].view(self._dtype).reshape(len(at), self._dim)

    def versions(self, at: NDArray[np.int64]) -> Ids:
        """Return their versions, 0 for one that does not exist: uint64 [n]."""
        return self._versions[at]

    def answered_s(self, at: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return when storage answered: float64 [n], on the monotonic clock."""
        return self._answered[at]

    def put(
        self,
        ids: Ids,
        rows: NDArray[Any],
        versions: Ids,
        *,
        began_s: float,
        answered_s: float,
        seen: int,
        found: IndexLookup | None = None,
    ) -> None:
        """Keep rows that a pull brought, and put newer ones that were kept already in their place in `rows` and `versions`.

        Args:
            ids: uint64 [n], each once.
            rows: [n, dim]; changed.
            versions: uint64 [n]; changed.
            began_s, answered_s: when the pull began and ended.
            seen: `n_changes` when it began; -1 where changes were not told then: the rows are old at once.
            found: where an earlier `find` saw the ids.
        """
        if found is None:
            self._cache.find(ids)
            found = self._cache.found
            assert found is not None
        tokens = np.where(self._changed[self._cells(ids)] > seen, _OLD, _GOOD)
        at = self._cache.at(found)
        kept = np.flatnonzero(at >= 0)  # intp [k]
        if not len(kept):
            self._put(found, rows, versions, tokens, answered_s)
            return
        here = at[kept]
        old, new = self._versions[here], versions[kept]
        alike = (old == 0) == (new == 0)
        later = self._answered[here] < began_s
        self._cache.tokens[here[~alike & ~later]] = _OLD
        newer = kept[alike & (old > new)]
        rows[newer], versions[newer] = self.rows(at[newer]), self._versions[at[newer]]
        taken = np.ones(len(ids), np.bool_)
        taken[kept] = alike | later
        some = np.flatnonzero(taken)
        self._put(found.take(some), rows[some], versions[some], tokens[some], answered_s)

    def tell(self, ids: Ids, versions: Ids) -> None:
        """Make rows old whose version is below the one told: uint64 [n] each, each id once."""
        self.n_changes += 1
        self._changed[self._cells(ids)] = self.n_changes
        at = self._cache.peek(ids)
        kept = np.flatnonzero(at >= 0)
        at = at[kept]
        self._cache.tokens[at[self._versions[at] < versions[kept]]] = _OLD

    def tell_all(self) -> None:
        """Make all rows old, and those that are on their way."""
        self.n_changes += 1
        self._changed[:] = self.n_changes
        self._cache.forget_tokens(lambda ids: np.ones(len(ids), np.bool_))

    def release(self) -> None:
        """Give the budget back; the rows are not to be used again."""
        self._cache.release()

    def _put(self, found: IndexLookup, rows: NDArray[Any], versions: Ids, tokens: Ids, answered_s: float) -> None:
        records = np.empty((len(rows), self._record_bytes), np.uint8)
        of_versions, of_answered, of_rows = self._fields(records)
        of_versions[:], of_answered[:], of_rows[:] = versions, answered_s, as_items(np.ascontiguousarray(rows))
        self._cache.put(found.ids, records, tokens, found=found)

    def _fields(self, records: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.float64], NDArray[np.void]]:
        """Views of records: versions, moments, rows as items; [n] each."""
        n_bytes = self._dim * self._dtype.itemsize
        head = records[:, :_HEAD]
        return head[:, :8].view("<u8")[:, 0], head[:, 8:].view("<f8")[:, 0], as_items(records[:, _HEAD : _HEAD + n_bytes])

    def _cells(self, ids: Ids) -> NDArray[np.intp]:
        return (ids * GOLDEN >> _CELL_SHIFT).view(np.intp)
