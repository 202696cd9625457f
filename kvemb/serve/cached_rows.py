"""Rows of one table as a serving client keeps them, each with its version and the moment at which storage answered.

A row never gives way to an older one: of two with a version the higher stays. A row that exists and one that does not have no order, unless
the one was asked for after the other had come: else neither is believed, and the next look-up asks again. The feed makes rows old; a row
that is old is still there, for when storage does not answer. A row that is on its way while the feed tells its change may be older than
that: it comes in as an old one.

A key (a mixed id) has eight places, of which the row used longest ago is given up. So a small look-up takes few operations on arrays, and
touches little memory: the keys of a set, and each row's record (docs/adr/0104). NumPy only; not thread-safe.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items, as_rows

Ids = NDArray[np.uint64]
Places = NDArray[np.int64]
Records = NDArray[np.uint8]
_WAYS = 8
_HEAD = 24  # bytes before a row's weights: version '<u8', when storage answered '<f8', and that again, or 0 where the row is old, '<f8'
_ENTRY_BYTES = _HEAD + 16
_CELLS = np.uint64((1 << 16) - 1)
_HALF = np.uint64(32)
_NEVER, _LEAST_S = 0.0, 1e-9  # no moment of the monotonic clock, and before every one


class CachedRows:
    """Rows of one table."""

    def __init__(self, dim: int, dtype: "np.dtype[Any]", size_bytes: int) -> None:
        n_bytes = dim * dtype.itemsize
        n_sets = max(_WAYS, size_bytes // (_WAYS * (n_bytes + _ENTRY_BYTES)))
        self._dtype, self._row, self._n_sets = dtype, slice(_HEAD, _HEAD + n_bytes), np.uint64(n_sets)
        self._at_once = n_sets  # rows that are put together; few of them meet in one set
        self._sets = np.zeros((n_sets, 2 * _WAYS), np.uint64)  # of each set its keys, and when each was used last
        self._records = np.zeros((n_sets * _WAYS, _HEAD + n_bytes + -n_bytes % 8), np.uint8)  # by place, 8 * set + which of the set
        self._changed = np.zeros(int(_CELLS) + 1, np.int64)  # by a key's cell: the number of the last change that was told of such keys
        self._clock = 0
        self.n_changes = 0
        """How many changes were told; a pull notes it when it begins."""

    def find(self, keys: Ids, not_before_s: float) -> tuple[Records, NDArray[np.bool_]]:
        """Return a record for each row, and whether it is the row's and good: not told old, and no older than that. [n] each."""
        at, same, records = self._look(keys)
        same &= _field(records, 2, "<f8") >= max(not_before_s, _LEAST_S)
        self._clock += 1
        self._sets.reshape(-1)[_clock_places(at[same])] = self._clock
        return records, same

    def peek(self, keys: Ids) -> tuple[Records, NDArray[np.bool_]]:
        """Return a record for each row, and whether it is the row's, good or old. [n] each."""
        _, same, records = self._look(keys)
        return records, same

    def rows(self, records: Records) -> NDArray[Any]:
        """Return the rows in records: [n, dim]."""
        return np.ascontiguousarray(records[:, self._row]).view(self._dtype)

    def versions(self, records: Records) -> Ids:
        """Return their versions, 0 for one that does not exist: uint64 [n]."""
        return _field(records, 0, "<u8")

    def answered_s(self, records: Records) -> NDArray[np.float64]:
        """Return when storage answered: float64 [n], on the monotonic clock."""
        return _field(records, 1, "<f8")

    def put(self, keys: Ids, rows: NDArray[Any], versions: Ids, *, began_s: float, answered_s: float, seen: int) -> None:
        """Keep rows that a pull brought, [n, dim], by keys, uint64 [n]; newer ones that were kept replace them in the arrays given."""
        for start in range(0, len(keys), self._at_once):
            some = slice(start, start + self._at_once)
            self._put(keys[some], rows[some], versions[some], began_s, answered_s, seen)

    def tell(self, keys: Ids, versions: Ids) -> None:
        """Make rows old whose version is below the one told: uint64 [n] each, each key once."""
        self.n_changes += 1
        self._changed[keys & _CELLS] = self.n_changes
        at, same, records = self._look(keys)
        same &= self.versions(records) < versions
        _field(self._records, 2, "<f8")[at[same]] = _NEVER

    def tell_all(self) -> None:
        """Make all rows old, and those that are on their way."""
        self.n_changes += 1
        self._changed[:] = self.n_changes
        _field(self._records, 2, "<f8")[:] = _NEVER

    def _put(self, keys: Ids, rows: NDArray[Any], versions: Ids, began_s: float, answered_s: float, seen: int) -> None:
        at, same, records = self._look(keys)
        good_s = np.where(self._changed[keys & _CELLS] > seen, _NEVER, answered_s)
        kept = np.flatnonzero(same)
        taken = np.ones(len(keys), np.bool_)
        if len(kept):
            here = records[kept]
            old = self.versions(here)
            alike = (old == 0) == (versions[kept] == 0)
            later = self.answered_s(here) < began_s
            _field(self._records, 2, "<f8")[at[kept[~alike & ~later]]] = _NEVER
            newer = alike & (old > versions[kept])
            rows[kept[newer]], versions[kept[newer]] = self.rows(here[newer]), old[newer]
            taken[kept] = alike | later
        _field(records, 0, "<u8")[:], _field(records, 1, "<f8")[:], _field(records, 2, "<f8")[:] = versions, answered_s, good_s
        as_items(records[:, self._row])[:] = as_items(np.ascontiguousarray(rows))
        self._write(keys[taken], at[taken], same[taken], records[taken])

    def _write(self, keys: Ids, at: Places, same: NDArray[np.bool_], records: Records) -> None:
        """Write records, over those of the same key, or else over the one of the key's set that was used longest ago, or never."""
        sets = self._sets.reshape(-1)
        while len(keys):
            new = np.flatnonzero(~same)
            at[new] += self._sets[at[new] // _WAYS, _WAYS:].argmin(axis=1) - at[new] % _WAYS
            self._clock += 1
            places = _clock_places(at)
            sets[places - _WAYS], sets[places] = keys, self._clock
            as_items(self._records)[at] = as_items(records)
            lost = np.flatnonzero(sets[places - _WAYS] != keys)  # they met another of these rows in one place
            keys, records = keys[lost], records[lost]
            if len(lost):
                at, same, _ = self._look(keys)

    def _look(self, keys: Ids) -> tuple[Places, NDArray[np.bool_], Records]:
        """Return a place for each key, one of its set, whether the key's row is there, and what is there, a copy."""
        sets = ((keys >> _HALF) * self._n_sets >> _HALF).view(np.int64)
        alike = self._sets[sets, :_WAYS] == keys[:, None]  # bool [n, 8]
        which = alike.argmax(axis=1)
        at = sets * _WAYS + which
        records = as_rows(as_items(self._records)[at])
        same: NDArray[np.bool_] = alike.reshape(-1)[np.arange(0, _WAYS * len(keys), _WAYS) + which]
        same &= self.answered_s(records) > 0  # a place that was never used looks like that of the key 0
        return at, same, records


def _clock_places(at: Places) -> Places:
    """Where, among all numbers of the sets, it stands when places were used last; the key is _WAYS before."""
    return 2 * at - at % _WAYS + _WAYS


def _field(records: Records, number: int, dtype: str) -> NDArray[Any]:
    """A field of the head of records, [n]: a view."""
    return records[:, 8 * number : 8 * number + 8].view(dtype)[:, 0]
