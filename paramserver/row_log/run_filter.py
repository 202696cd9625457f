"""The filter of a run: which keys a group of 64 rows cannot have, at 8 bits a row. Pure.

A group has eight words of 64 bits. A key chooses one of them, and in it four bits. All four are set when the group has the key, and of
the other keys in one case of 30. The group of a key is known from the run's fences. So all groups are equally full, and a batch in order
meets them in order.
"""

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import GOLDEN

Ids = NDArray[np.uint64]
Rows = NDArray[np.int64]

_SHIFTS = tuple(np.uint64(shift) for shift in (0, 6, 12, 18))  # of four bits' places in a hash, whose upper half chooses the word
_PLACE, _HALF, _ONE = np.uint64(63), np.uint64(32), np.uint64(1)


def group_words(group_rows: int) -> int:
    """Return the words that a group of so many rows has.

    Example:
        >>> group_words(64), group_words(2)
        (8, 1)
    """
    return max(1, group_rows // 8)


def filter_of(keys: Ids, group_rows: int) -> Ids:
    """Return the filters of groups that lie side by side.

    Args:
        keys: uint64 [n]: of all groups, one group after the other.
        group_rows: in each but the last.

    Returns:
        '<u8' [groups * words of each].

    Example:
        >>> keys = np.arange(100, dtype=np.uint64)
        >>> words = filter_of(keys, 64)
        >>> len(words), bool(passes(words[filter_words(keys, np.arange(100) // 64 * 8, 8)], keys).all())
        (16, True)
    """
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
    hashes = _hashes(keys)
    bits = np.zeros(len(keys), np.uint64)
    for shift in _SHIFTS:
        bits |= _ONE << (hashes >> shift & _PLACE)
    may: NDArray[np.bool_] = words & bits == bits
    return may


def _hashes(keys: Ids) -> Ids:
    hashes: Ids = (keys ^ keys >> _HALF) * GOLDEN  # its lower half depends on the key's lower half alone, hence the first step
    return hashes ^ hashes >> _HALF


def _chosen(hashes: Ids, groups: Rows, n_words: int) -> Rows:
    chosen: Rows = groups + ((hashes >> _HALF) * np.uint64(n_words) >> _HALF).astype(np.int64)
    return chosen
