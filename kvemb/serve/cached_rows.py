"""Rows of one table as a serving client keeps them, each with its version and the moment at which storage answered.

A row never gives way to an older one: of two with a version the higher stays. A row that exists and one that does not have no order, unless
the one was asked for after the other had come: else neither is believed, and the next look-up asks again. The feed makes rows old; a row
that is old is still there, for when storage does not answer. A row that is on its way while the feed tells its change may be older than
that: it comes in as an old one.

A key (a mixed id) has eight places, of which the row used longest ago is given up. So a small look-up takes few operations on arrays, a
third of what an index of all rows takes (docs/adr/0104). NumPy only; not thread-safe.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items

Ids = NDArray[np.uint64]
Places = NDArray[np.int64]
_WAYS = 8
_ENTRY_BYTES = 40  # of a row beside its weights
_CELLS = np.uint64((1 << 16) - 1)
_HALF = np.uint64(32)
_NEVER, _LEAST_S = 0.0, 1e-9  # no moment of the monotonic clock, and before every one


class CachedRows:
    """Rows of one table.

    Args:
        dim, dtype: of a row.
        size_bytes: of all, about; claimed from the system as rows come.

    Example:
        >>> rows, keys = CachedRows(1, np.dtype(np.float32), 1 << 20), np.array([7 << 32], np.uint64)
        >>> rows.put(keys, np.ones((1, 1), np.float32), np.array([5], np.uint64), began_s=1.0, answered_s=2.0, seen=rows.n_changes)
        >>> at, good = rows.find(keys, not_before_s=0.0)
        >>> rows.rows(at), good
        (array([[1.]], dtype=float32), array([ True]))
        >>> rows.tell(keys, np.array([6], np.uint64))
        >>> rows.find(keys, not_before_s=0.0)[1]
        array([False])
    """

    def __init__(self, dim: int, dtype: "np.dtype[Any]", size_bytes: int) -> None:
        n_sets = max(_WAYS, size_bytes // (_WAYS * (dim * dtype.itemsize + _ENTRY_BYTES)))
        self._dim, self._dtype, self._n_sets = dim, dtype, np.uint64(n_sets)
        self._at_once = n_sets  # rows that are put together; few of them meet in one set
        self._keys, self._used = np.zeros((n_sets, _WAYS), np.uint64), np.zeros((n_sets, _WAYS), np.int64)  # 0: never used
        # All by place, [8 * sets]: rows as items, versions, when storage answered; and that again, or 0 where the row is old.
        self._rows = as_items(np.zeros((n_sets * _WAYS, dim), dtype))
        self._versions = np.zeros(n_sets * _WAYS, np.uint64)
        self._answered_s, self._good_s = np.zeros(n_sets * _WAYS), np.zeros(n_sets * _WAYS)
        self._changed = np.zeros(int(_CELLS) + 1, np.int64)  # by a key's cell: the number of the last change that was told of such keys
        self._clock = 0
        self.n_changes = 0
        """How many changes were told; a pull notes it when it begins."""

    def find(self, keys: Ids, not_before_s: float) -> tuple[Places, NDArray[np.bool_]]:
        """Return where each row may be, and whether it is good: there, not told old, and no older than that. [n] each."""
        at, same = self._look(keys)
        same &= self._good_s[at] >= max(not_before_s, _LEAST_S)
        self._clock += 1
        self._used.reshape(-1)[at[same]] = self._clock
        return at, same

    def peek(self, keys: Ids) -> tuple[Places, NDArray[np.bool_]]:
        """Return where each row may be, and whether it is there, good or old. [n] each."""
        at, same = self._look(keys)
        same &= self._used.reshape(-1)[at] > 0
        return at, same

    def rows(self, at: Places) -> NDArray[Any]:
        """Return the rows that are there: [n, dim]."""
        return self._rows[at].view(self._dtype).reshape(len(at), self._dim)

    def versions(self, at: Places) -> Ids:
        """Return their versions, 0 for one that does not exist: uint64 [n]."""
        return self._versions[at]

    def answered_s(self, at: Places) -> NDArray[np.float64]:
        """Return when storage answered: float64 [n], on the monotonic clock."""
        return self._answered_s[at]

    def put(self, keys: Ids, rows: NDArray[Any], versions: Ids, *, began_s: float, answered_s: float, seen: int) -> None:
        """Keep rows that a pull brought, and put newer ones that were kept already in their place in `rows` and `versions`.

        Args:
            keys: uint64 [n], each once.
            rows: [n, dim]; changed.
            versions: uint64 [n]; changed.
            began_s, answered_s: when the pull began and ended.
            seen: `n_changes` when it began; -1 where changes were not told then: the rows are old at once.
        """
        for start in range(0, len(keys), self._at_once):
            some = slice(start, start + self._at_once)
            self._put(keys[some], rows[some], versions[some], began_s, answered_s, seen)

    def tell(self, keys: Ids, versions: Ids) -> None:
        """Make rows old whose version is below the one told: uint64 [n] each, each key once."""
        self.n_changes += 1
        self._changed[keys & _CELLS] = self.n_changes
        at, same = self._look(keys)
        same &= self._versions[at] < versions
        self._good_s[at[same]] = _NEVER

    def tell_all(self) -> None:
        """Make all rows old, and those that are on their way."""
        self.n_changes += 1
        self._changed[:] = self.n_changes
        self._good_s[:] = _NEVER

    def _put(self, keys: Ids, rows: NDArray[Any], versions: Ids, began_s: float, answered_s: float, seen: int) -> None:
        at, same = self.peek(keys)
        good_s = np.where(self._changed[keys & _CELLS] > seen, _NEVER, answered_s)
        kept = np.flatnonzero(same)
        if len(kept):
            here = at[kept]
            alike = (self._versions[here] == 0) == (versions[kept] == 0)
            later = self._answered_s[here] < began_s
            self._good_s[here[~alike & ~later]] = _NEVER
            newer = kept[alike & (self._versions[here] > versions[kept])]
            rows[newer], versions[newer] = self.rows(at[newer]), self._versions[at[newer]]
            taken = ~same
            taken[kept] = alike | later
            keys, rows, versions, good_s = keys[taken], rows[taken], versions[taken], good_s[taken]
            at, same = at[taken], same[taken]
        while len(keys):
            new = np.flatnonzero(~same)
            at[new] += self._used[at[new] // _WAYS].argmin(axis=1) - at[new] % _WAYS  # never used, or used longest ago
            self._clock += 1
            self._keys.reshape(-1)[at], self._used.reshape(-1)[at] = keys, self._clock
            self._rows[at], self._versions[at] = as_items(np.ascontiguousarray(rows)), versions
            self._answered_s[at], self._good_s[at] = answered_s, good_s
            lost = np.flatnonzero(self._keys.reshape(-1)[at] != keys)  # they met another of these rows in one place
            if not len(lost):
                return
            keys, rows, versions, good_s = keys[lost], rows[lost], versions[lost], good_s[lost]
            at, same = self.peek(keys)

    def _look(self, keys: Ids) -> tuple[Places, NDArray[np.bool_]]:
        """Return a place for each key, one of its eight, and whether that has the key (or was never used, if the key is 0)."""
        sets = ((keys >> _HALF) * self._n_sets >> _HALF).view(np.int64)
        at = sets * _WAYS
        at += (self._keys[sets] == keys[:, None]).argmax(axis=1)
        same: NDArray[np.bool_] = self._keys.reshape(-1)[at] == keys
        return at, same
