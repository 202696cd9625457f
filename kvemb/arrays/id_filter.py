"""Filters: which keys a group cannot have, at some bits a key. Pure.

A group has words of 64 bits. A key chooses one of them, and in it four bits. All four are set when the group has the key. At 8 bits a key
they are set for one other key in 30 as well, at 16 for one in about 150. A run of the row log has a group for every 64 rows, known from its
fences: so all groups are equally full, and a batch in order meets them in order. An `IdFilter` is one group that ids are added to.
"""

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import GOLDEN

Ids = NDArray[np.uint64]
Rows = NDArray[np.int64]

_SHIFTS = tuple(np.uint64(shift) for shift in (0, 6, 12, 18))  # of four bits' places in a hash, whose upper half chooses the word
_ADDED_AT_ONCE = 1 << 16
_FIRST = np.zeros(1, np.int64)
_PLACE, _HALF, _ONE = np.uint64(63), np.uint64(32), np.uint64(1)


def group_words(group_rows: int) -> int:
    """Return the words that a group of so many rows has."""
    return max(1, group_rows // 8)


def filter_of(keys: Ids, group_rows: int) -> Ids:
    """Return the filters of groups that lie side by side, '<u8' [groups * words of each], from the keys of one group after the other."""
    n_words = group_words(group_rows)
    hashes, groups = _hashes(keys), np.arange(len(keys)) // group_rows
    base = _chosen(hashes, groups * n_words, n_words) * 64  # int64 [n]: the first bit of each key's word
    bits = np.zeros(-(-len(keys) // group_rows) * n_words * 64, np.uint8)
    for shift in _SHIFTS:
        bits[base + (hashes >> shift & _PLACE).astype(np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<u8")


def filter_words(keys: Ids, groups: Rows, n_words: int) -> Rows:
    """Return the place of each key's word, where `groups` (int64 [n]) are the places of the first of `n_words` words of its group."""
    return _chosen(_hashes(keys), groups, n_words)


def passes(words: Ids, keys: Ids) -> NDArray[np.bool_]:
    """Return which of n keys their groups may have, bool [n], by each key's word, uint64 [n]."""
    bits = _bits(_hashes(keys))
    may: NDArray[np.bool_] = words & bits == bits
    return may


class IdFilter:
    """Ids that may exist, as a set that has the key of every id which was added, and few others. Not thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        self._words = np.zeros(max(1, size_bytes // 8), np.uint64)
        self.n_added = 0
        """About how many ids were added: one that passed already is not counted."""

    @property
    def size_bytes(self) -> int:
        """Memory of the words."""
        return self._words.nbytes

    def may_have(self, keys: Ids) -> NDArray[np.bool_]:
        """Return of n keys, mixed ids, whether each may have been added: bool [n]; True of those that were."""
        return self._passes(*self._places(keys))

    def add(self, keys: Ids) -> None:
        """Add n keys, known or not: uint64 [n], each once."""
        for start in range(0, len(keys), _ADDED_AT_ONCE):
            at, bits = self._places(keys[start : start + _ADDED_AT_ONCE])
            new = np.flatnonzero(~self._passes(at, bits))
            np.bitwise_or.at(self._words, at[new], bits[new])
            self.n_added += len(new)

    def _places(self, keys: Ids) -> tuple[Rows, Ids]:
        hashes = _hashes(keys)
        return _chosen(hashes, _FIRST, len(self._words)), _bits(hashes)

    def _passes(self, at: Rows, bits: Ids) -> NDArray[np.bool_]:
        may: NDArray[np.bool_] = self._words.take(at, mode="clip") & bits == bits
        return may


def _bits(hashes: Ids) -> Ids:
    bits = np.zeros(len(hashes), np.uint64)
    for shift in _SHIFTS:
        bits |= _ONE << (hashes >> shift & _PLACE)
    return bits


def _hashes(keys: Ids) -> Ids:
    hashes: Ids = (keys ^ keys >> _HALF) * GOLDEN  # its lower half depends on the key's lower half alone, hence the first step
    return hashes ^ hashes >> _HALF


def _chosen(hashes: Ids, groups: Rows, n_words: int) -> Rows:
    chosen: Rows = groups + ((hashes >> _HALF) * np.uint64(n_words) >> _HALF).astype(np.int64)
    return chosen
