"""The row index: every existing id of one table on this shard, with the version its row must have. Pure, NumPy only.

An open-addressing hash table in one array of (id, version) pairs, so that a probe costs one cache line. All operations take batches of
distinct ids and work in rounds: round r looks at the r-th probe of the rows that are still unresolved, so there is no loop over rows.
Version 0 marks an empty place. An erased id keeps its place (later probes must not stop there) until the table is rebuilt; put again, it
gets that place back. Not thread-safe; `paramserver.tables` holds the lock.
"""

import numpy as np
from numpy.typing import NDArray

from kvemb.hashing import digest64, mix64

Ids = NDArray[np.uint64]
Versions = NDArray[np.uint64]

_ERASED = np.uint64(0xFFFF_FFFF_FFFF_FFFF)  # as a version: epoch and k both at their very end, which no shard reaches
_MIN_BITS = 10
_MAX_LOAD = 0.7
_BLOCK_ROWS = 1 << 20
# Shards are chosen by mix64(id) itself: without a key of its own, a shard's ids would all begin in the same part of its index.
_KEY = np.uint64(digest64("row index"))


class RowIndex:
    """Maps ids to versions.

    Example:
        >>> index = RowIndex()
        >>> index.put(np.array([7, 9], np.uint64), np.array([1, 2], np.uint64))
        >>> index.get(np.array([9, 8, 7], np.uint64)), len(index)
        (array([2, 0, 1], dtype=uint64), 2)
    """

    def __init__(self) -> None:
        self._clear(_MIN_BITS)

    def __len__(self) -> int:
        return self._n_rows

    @property
    def size_bytes(self) -> int:
        """Memory of the hash table."""
        return self._places.nbytes

    def get(self, ids: Ids) -> Versions:
        """Return each id's version, 0 where it does not exist: uint64 [n]."""
        versions: Versions = self._places[self._find(ids), 1]
        versions[versions == _ERASED] = 0
        return versions

    def put(self, ids: Ids, versions: Versions) -> None:
        """Set the versions of n distinct ids, known or new.

        Args:
            ids: uint64 [n], distinct.
            versions: uint64 [n], neither 0 nor 2**64 - 1.
        """
        assert not ((versions == 0) | (versions == _ERASED)).any()
        at = self._find(ids)
        held = self._places[at, 1]
        new = held == 0
        n_new = int(new.sum())
        if self._n_used + n_new > _MAX_LOAD * len(self._places):
            self._rebuild(n_new)
            return self.put(ids, versions)
        self._n_rows += n_new + int((held == _ERASED).sum())
        self._n_used += n_new
        self._places[at[~new], 1] = versions[~new]
        self._insert(ids[new], versions[new], at[new])

    def erase(self, ids: Ids) -> int:
        """Forget n distinct ids; return how many of them existed."""
        at = self._find(ids)
        held = self._places[at, 1]
        at = at[(held != 0) & (held != _ERASED)]
        self._places[at, 1] = _ERASED
        self._n_rows -= len(at)
        return len(at)

    def arrays(self) -> tuple[Ids, Versions]:
        """Return copies of all ids and their versions, in no particular order."""
        live = (self._places[:, 1] != 0) & (self._places[:, 1] != _ERASED)
        return self._places[live, 0], self._places[live, 1]

    def sorted_ids(self, after: int, first: bool, limit: int) -> Ids:
        """Return at most `limit` ids in ascending order, from `after` on: inclusive when `first`, otherwise the ones behind it.

        Example:
            >>> index = RowIndex()
            >>> index.put(np.array([5, 3, 9], np.uint64), np.ones(3, np.uint64))
            >>> index.sorted_ids(0, True, 2), index.sorted_ids(5, False, 2)
            (array([3, 5], dtype=uint64), array([9], dtype=uint64))
        """
        ids = self.arrays()[0]
        ids = ids[ids >= np.uint64(after)] if first else ids[ids > np.uint64(after)]
        if len(ids) > limit:
            ids = np.partition(ids, limit - 1)[:limit]
        return np.sort(ids)

    def _clear(self, bits: int) -> None:
        self._places = np.zeros((1 << bits, 2), np.uint64)
        self._shift = np.uint64(64 - bits)
        self._mask = (1 << bits) - 1
        self._n_rows = self._n_used = 0

    def _home(self, ids: Ids) -> NDArray[np.int64]:
        return (mix64(ids ^ _KEY) >> self._shift).view(np.int64)

    def _find(self, ids: Ids) -> NDArray[np.int64]:
        """The place that holds each id, or the empty place where its probes end: int64 [n]."""
        at = self._home(ids)
        places = np.take(self._places, at, axis=0)
        left = np.flatnonzero((places[:, 0] != ids) & (places[:, 1] != 0))
        while len(left):
            at[left] = (at[left] + 1) & self._mask
            places = np.take(self._places, at[left], axis=0)
            left = left[(places[:, 0] != ids[left]) & (places[:, 1] != 0)]
        return at

    def _insert(self, ids: Ids, versions: Versions, at: NDArray[np.int64]) -> None:
        """Give ids that are not in the table a place each, probing from `at`.

        Several ids may claim one empty place in a round: all write, the one that is found there afterwards has won.
        """
        while len(ids):
            free = self._places[at, 1] == 0
            self._places[at[free], 0] = ids[free]
            won = free & (self._places[at, 0] == ids)
            self._places[at[won], 1] = versions[won]
            lost = ~won
            ids, versions, at = ids[lost], versions[lost], (at[lost] + 1) & self._mask

    def _rebuild(self, n_more: int) -> None:
        """Make room for n_more rows; places of erased ids become free."""
        ids, versions = self.arrays()
        bits = _MIN_BITS
        while len(ids) + n_more > _MAX_LOAD * (1 << bits):
            bits += 1
        self._clear(max(bits, _MIN_BITS))
        self._n_rows = self._n_used = len(ids)
        for start in range(0, len(ids), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            self._insert(ids[block], versions[block], self._home(ids[block]))
