"""Looks for ids in the hash table of `kvemb.arrays.row_index`: which place holds each. Pure functions over its arrays, NumPy only.

The tags of a bucket are one word, so that all of them are compared with an id's at once. Then one pair is looked at, also where buckets are
nearly full. Most ids are settled by their own bucket. The search for the others goes on bucket by bucket while they are many, and through
several buckets at once when few remain: for a batch of a thousand ids the number of steps counts, not the amount of data that they read.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import KeyOrder

Ids = NDArray[np.uint64]
Words = NDArray[np.uint64]
Places = NDArray[np.int64]

WIDTH = 8  # places of a bucket: their tags are one word
MAX_LOAD = 0.85  # of the places, those that may be taken
LAST_TAKEN = np.uint64((1 << 56) - 1)  # the word of tags of a full bucket is above
_FEW = 2048  # ids that are looked for in several buckets at once, and how many buckets that may be in all
_FEWEST_NEXT, _NEXT_BUCKETS = 4, np.arange(16)
_1, _7, _32, _255 = (np.uint64(n) for n in (1, 7, 32, 255))
_EVERY_01, _EVERY_7F = np.uint64(0x0101_0101_0101_0101), np.uint64(0x7F7F_7F7F_7F7F_7F7F)
_HASH_BITS = 32  # of a hash, those that say where a row's bucket is
_CELL_BUCKETS = 4  # on average, at least
_MOST_CELL_BITS = 14  # a cell is a slot, or several: a shard has all rows of a slot, or none
_NEARLY_ALL = 15 / 16
_EVEN_PARTS, _PART_ROWS, _EVEN_SHARE = 64, 1024, 1.15  # of even hashes: parts, of about so many rows, and the fullest beside the mean


@dataclass(frozen=True, eq=False)
class Homes:
    """Says in which bucket the probes for an id begin: buckets ascend with the hashes, so that a range of hashes is a range of the table.

    A shard has the rows of some slots alone, which are ranges of hashes; where neighbouring ids share a page, some slots have many more
    than others; and an eviction leaves few rows where it has been. So hashes are cut into cells, and a cell has buckets by the rows that
    it has and will have, none where it has none. Without `starts` the rows are even, and so are the buckets.

    Rows that a walk erases, or another shard hands over, come in the order of their hashes: then those to come lie behind.
    """

    order: KeyOrder  # of the ids
    n_buckets: int  # of the table
    starts: Words | None = None  # uint64 [cells], where each cell's buckets begin; in units of 2**-32 buckets, as `steps`
    steps: Words | None = None  # uint64 [cells], from one hash of the cell to the next; 0 where it has no buckets

    @staticmethod
    def made_for(order: KeyOrder, n_buckets: int, ids: Iterable[Ids], coming: Ids) -> "Homes":
        """Spread ids over a table: blocks of uint64 [n] each, and those that come now."""
        bits = min(_MOST_CELL_BITS, (n_buckets // _CELL_BUCKETS).bit_length() - 1)
        counts = np.zeros(1 << bits, np.int64)  # [cells]: rows of each
        for some in ids:
            counts += np.bincount(order.hashes(some) >> np.uint64(64 - bits), minlength=len(counts))
        new = np.bincount(order.hashes(coming) >> np.uint64(64 - bits), minlength=len(counts))
        in_order = counts.sum() > len(coming) < 2 * new[counts == 0].sum()
        counts += new
        used = counts > 0
        n_rows, n_used = int(counts.sum()), int(np.count_nonzero(used))
        if not n_used or (order.ids_per_group == 1 and n_used >= _NEARLY_ALL * len(counts) and _is_even(counts)):
            return Homes(order, n_buckets)
        # By the rows that a cell will have when the table is full: its own, and its share of those to come.
        rows, n_to_come = counts, max(0, int(MAX_LOAD * WIDTH * n_buckets) - n_rows)
        behind = rows[int(np.flatnonzero(new)[-1]) + 1 :] if in_order else rows[:0]
        if len(behind):
            rows_a_cell = n_rows // n_used + 1
            behind[: max(1, n_to_come // rows_a_cell)] += min(rows_a_cell, n_to_come)
        else:
            rows = np.where(used, counts + n_to_come // n_used, 0)
        width = (n_buckets << _HASH_BITS) // int(rows.sum())  # of a row
        before = np.cumsum(rows) - rows  # [cells]: those of the cells before
        starts = np.minimum(before.view(np.uint64) * np.uint64(width), np.uint64((n_buckets << _HASH_BITS) - 1))
        return Homes(order, n_buckets, starts, rows.view(np.uint64) * np.uint64(width) >> np.uint64(_HASH_BITS - bits))

    def of(self, hashes: Words) -> tuple[Places, Words]:
        """Return the bucket of each hash (int64 [n]), and its tag, 1 to 255 (uint64 [n]); the hashes are overwritten."""
        tags = np.bitwise_and(hashes, _255)
        np.maximum(tags, _1, out=tags)
        hashes >>= _32  # the upper half, from 0 to 2**32 - 1
        if self.starts is None or self.steps is None:
            hashes *= np.uint64(self.n_buckets)  # below 2**64: a table has fewer than 2**32 buckets
        else:
            bits = _HASH_BITS - (len(self.steps) - 1).bit_length()  # of a hash within its cell
            cells = hashes >> np.uint64(bits)
            hashes &= np.uint64((1 << bits) - 1)
            hashes *= self.steps.take(cells, mode="clip")
            hashes += self.starts.take(cells, mode="clip")
        hashes >>= _32
        return hashes.view(np.int64), tags

    def bucket(self, hash_: int) -> int:
        """Return the bucket of one hash, [0, 2**64)."""
        return int(self.of(np.array([hash_], np.uint64))[0][0])

    def first_hash(self, bucket: int) -> int:
        """Return the first hash, of those with 32 zeros at their end, whose bucket is this one or above; 2**64 where there is none."""
        return bisect_left(range(1 << _HASH_BITS), bucket, key=lambda upper: self.bucket(upper << _HASH_BITS)) << _HASH_BITS

    def n_strange(self, hashes: Words) -> int:
        """Count the hashes whose cells have no buckets: they crowd in the one where the next cell's begin."""
        if self.steps is None:
            return 0
        cells = hashes >> np.uint64(64 - (len(self.steps) - 1).bit_length())
        return len(cells) - int(np.count_nonzero(self.steps.take(cells)))


def _is_even(counts: NDArray[np.int64]) -> bool:
    """Whether no part of the hashes has many more rows than another, as parts have between two sweeps of an eviction: int64 [2**n]."""
    n_parts = min(_EVEN_PARTS, len(counts), 1 << (int(counts.sum()) // _PART_ROWS).bit_length())
    parts = counts.reshape(n_parts, -1).sum(axis=1)
    return bool(parts.max() <= _EVEN_SHARE * parts.mean())


def probe(homes: Homes, tag_words: Words, pairs: Words, ids: Ids) -> tuple[Places, Places]:
    """Look for n unique ids, uint64 [n]: return the place of each, -1 for none, and the bucket where its probes end, int64 [n] each.

    Of each bucket `tag_words` has the tags of its 8 places, the first in the lowest byte, 0: empty; `pairs` their ids and versions.
    """
    buckets, tags = homes.of(homes.order.hashes(ids))
    tags *= _EVERY_01  # uint64 [n]: the tag in each of the 8 bytes
    words = tag_words.take(buckets, mode="clip")
    alike = zero_bytes(words ^ tags)  # uint64 [n]: a bit for each place of the bucket whose tag is the id's
    places, found = _look(pairs, ids, buckets, alike)
    # on, bool [n]: the search goes on: the bucket is full, or has further places of that tag, and the id is not found yet
    on = words > LAST_TAKEN
    on |= alike != 0
    on &= np.invert(found, out=found)
    np.putmask(places, found, -1)
    left = on.nonzero()[0]  # int64 [m]: the numbers of those ids
    while len(left) > _FEW:
        alike[left] &= alike[left] - _1  # the first of them was another id
        on = left[alike[left] == 0]  # no place of their bucket remains: the next bucket, if this one is full
        left, on = left[alike[left] != 0], on[tag_words[buckets[on]] > LAST_TAKEN]
        buckets[on] = (buckets[on] + 1) % len(tag_words)
        alike[on] = zero_bytes(tag_words[buckets[on]] ^ tags[on])
        left = np.concatenate([left, on])
        at, found = _look(pairs, ids[left], buckets[left], alike[left])
        places[left[found]] = at[found]
        left = left[~found]
    while len(left):
        left = _look_on(tag_words, pairs, ids, left, places, buckets, tags)
    return places, buckets


def _look(pairs: Words, ids: Ids, buckets: Places, alike: NDArray[np.uint64]) -> tuple[Places, NDArray[np.bool_]]:
    """Compare ids with the first place of their buckets whose tag is theirs."""
    lowest = np.negative(alike)
    lowest &= alike  # the lowest mark alone
    lowest -= _1  # as many bits as lie below it: 8 a place, and 7
    some = alike != 0
    places = buckets * WIDTH
    places += np.bitwise_count(lowest) >> 3
    places *= some  # ids without a mark all look at place 0, which costs nothing
    some &= pairs.take(2 * places, mode="clip") == ids
    return places, some


def _look_on(tag_words: Words, pairs: Words, ids: Ids, left: Places, places: Places, buckets: Places, tags: NDArray[np.uint64]) -> Places:
    """Look for the ids numbered `left` from their buckets on; return the numbers of those neither found nor proven absent, int64 [m]."""
    width, n_buckets = max(_FEWEST_NEXT, min(_FEW // len(left), len(_NEXT_BUCKETS))), len(tag_words)
    # near, words [m, width]: the buckets of each id from its own on, and their tags
    near = buckets[left][:, None] + _NEXT_BUCKETS[:width]  # from n_buckets on: the first ones
    words = tag_words.take(near, mode="wrap")
    marks = zero_bytes(words ^ tags[left][:, None]).reshape(-1)  # [m * width], a byte for each place
    marks >>= _7  # as booleans, among which NumPy finds those that are set several times faster than among bytes
    hits = marks.view(np.bool_).nonzero()[0]  # numbers of places, row after row
    # at, whose [h]: of each place with the tag of an id its number in the table, and the number of that id
    at = near.reshape(-1).take(hits >> 3) % n_buckets * WIDTH + (hits & 7)
    whose = left[hits // (WIDTH * width)]
    same = pairs.take(2 * at, mode="clip") == ids[whose]
    places[whose[same]] = at[same]
    lost = (places[left] < 0).nonzero()[0]
    if not len(lost):
        return lost
    left, room = left[lost], words[lost] <= LAST_TAKEN  # the search ends at the first bucket that has room
    ends, first = room.any(axis=1), room.argmax(axis=1)
    buckets[left] = np.where(ends, near[lost, first], near[lost, -1] + 1) % n_buckets
    return left[~ends]


def zero_bytes(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mark the highest bit of every byte that is 0, no other bit."""
    marks = words & _EVERY_7F
    marks += _EVERY_7F
    marks |= words
    marks |= _EVERY_7F
    np.invert(marks, out=marks)
    return marks
