"""An index of ids: each with a number of 64 bits (a row's version, a place in an array). Pure, NumPy only.

Shards know by it which rows exist, and the cache of records (`kvemb.arrays.record_cache`) finds its rows by it.

A hash table of buckets of 8 places, filled from the first place on; a row that does not fit lies in the next bucket that has room. Beside
the (id, version) pairs every place has a tag of 8 bits of the id's hash, 0 where it is empty. Ids are found by their tags
(`kvemb.arrays.hash_probe`). All operations take batches of unique ids, a block at a time: the results of one step are still in the
processor's cache for the next. There is no loop over rows.

Rows lie in the order of their keys (`kvemb.arrays.hashing.KeyOrder`), or nearly. So they are listed in that order, a portion at a time, at
the price of that portion alone, whatever comes, goes or moves between two portions.

Memory is 17 bytes a place. Between MAX_LOAD / _GROWTH and MAX_LOAD of the places are taken. So a row costs 20 to 23.7 bytes from about a
thousand rows on, at any number of them. Growth happens in place: the rows are pushed together at the beginning, and then spread out again,
the last ones first. Where the system can extend an allocation (Linux remaps its pages) the peak is the new size and a few MB. Elsewhere it
is the old and the new size, while the pairs are copied over. A row that came early is moved about 1 / (_GROWTH - 1) times in all. Putting
rows one small batch after the other into a table that grows takes about three times as long as putting them all at once.

An erased id keeps its place until the next growth (a bucket that was full must stay so), and gets it back when put again. Erasing alone
gives no memory back. Not thread-safe; its users hold the lock.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hash_probe import LAST_TAKEN, MAX_LOAD, WIDTH, Homes, Ids, Places, probe, zero_bytes
from kvemb.arrays.hashing import KeyOrder

Versions = NDArray[np.uint64]

_ERASED = np.uint64(0xFFFF_FFFF_FFFF_FFFF)  # as a version: epoch and k both at their very end, which no shard reaches
END = 1 << 64
"""Behind the last key."""
_MIN_BUCKETS = 128
_GROWTH = 1.18
_BLOCK_ROWS = 1 << 16
_WINDOW_ROWS = 1 << 16
_FAR, _FAR_SHARE = 64, 32  # buckets; rows are laid out anew once one in so many has come since
_MOST_STRANGE, _STRANGE_SHARE = 1024, 1 / 1024  # rows that may crowd in few buckets, and of all rows


@dataclass(frozen=True, eq=False)
class IndexLookup:
    """Where an index has some ids: made by `RowIndex.find`, so that the next operation on them need not look for them again.

    It stays valid when the index changes: if ids have come or moved since, they are looked up again.
    """

    ids: Ids  # uint64 [n], unique; they must not change
    places: Places  # int64 [n], -1 for an id that has none
    buckets: Places  # int64 [n], where the search for each ended
    layout: int  # number of the index's layout then

    def take(self, which: NDArray[np.intp]) -> "IndexLookup":
        """Return the ids that `which` numbers."""
        if len(which) == len(self.ids):
            return self
        return IndexLookup(self.ids.take(which), self.places.take(which), self.buckets.take(which), self.layout)


class RowIndex:
    """Maps the ids of one table to versions (or other numbers of 64 bits), for batches of ids at a time.

    One class: all its methods read or change the same arrays, which must fit each other between any two calls.
    """

    def __init__(self, growth: float = _GROWTH, order: KeyOrder = KeyOrder()) -> None:  # noqa: B008 (frozen)
        self._growth = growth
        self._homes = Homes(order, _MIN_BUCKETS)
        self._tags = np.zeros(_MIN_BUCKETS, np.uint64)  # of the 8 places of each bucket, the first in the lowest byte
        self._pairs = np.zeros(2 * WIDTH * _MIN_BUCKETS, np.uint64)  # id and version of each place, one after the other
        self._n_rows = self._n_used = self._n_strange = 0
        self._n_laid, self._is_far = 0, False  # places taken when the rows were laid out; whether one has come far from its bucket since
        self._room = int(MAX_LOAD * WIDTH * _MIN_BUCKETS)  # places that may be taken
        self._layout = 0  # rises when an id gets a place, or another place

    def __len__(self) -> int:
        return self._n_rows

    @property
    def size_bytes(self) -> int:
        """Memory of the hash table."""
        return self._pairs.nbytes + self._tags.nbytes

    def get(self, ids: Ids) -> Versions:
        """Return each id's version, 0 where it does not exist: uint64 [n]."""
        if not self._n_rows:
            return np.zeros(len(ids), np.uint64)
        if len(ids) <= _BLOCK_ROWS:
            return self._versions(self.find(ids).places)
        return np.concatenate([self.get(ids[block]) for block in _blocks(len(ids))])

    def put(self, ids: Ids, versions: Versions) -> None:
        """Set the versions of n unique ids, known or new: uint64 [n] each; no version is 0 or 2**64 - 1."""
        assert not ((versions == 0) | (versions == _ERASED)).any()
        if len(ids) > _BLOCK_ROWS and (self._n_used + len(ids) > self._room or self._homes.starts is not None):
            # For all blocks at once: in the order of keys the first ones would crowd in a few buckets of a table that is too small.
            self.make_room(ids[self.get(ids) == 0])
        n_placed = 0 if self._n_used or len(ids) > self._room else self._place_in_order(ids, versions)
        for block in _blocks(len(ids) - n_placed):
            self._put(self.find(ids[n_placed:][block]), versions[n_placed:][block])

    def make_room(self, ids: Ids) -> None:
        """Grow now, so that n more rows can be put without that: uint64 [n]."""
        if self._n_used + len(ids) > self._room or self._crowds(ids):
            self._rebuild(len(ids), ids)

    def find(self, ids: Ids) -> IndexLookup:
        """Look n unique ids up, for `at` and `set_at`; the array is kept, 16 bytes a row beside it."""
        if len(ids) <= _BLOCK_ROWS:
            return IndexLookup(ids, *probe(self._homes, self._tags, self._pairs, ids), self._layout)
        blocks = [self.find(ids[block]) for block in _blocks(len(ids))]
        places, buckets = (np.concatenate([getattr(one, name) for one in blocks]) for name in ("places", "buckets"))
        return IndexLookup(ids, places, buckets, self._layout)

    def at(self, found: IndexLookup) -> Versions:
        """Return the versions that ids have now, 0 where one does not exist: uint64 [n]."""
        return self._versions(self._still(found).places)

    def set_at(self, found: IndexLookup, versions: Versions | int) -> None:
        """Set the versions of n ids that were looked up, known or new: one for all, or uint64 [n], none of them 0 or 2**64 - 1."""
        each = np.full(len(found.ids), versions, np.uint64)
        assert not ((each == 0) | (each == _ERASED)).any()
        self._put(self._still(found), each)

    def erase(self, ids: Ids) -> int:
        """Forget n unique ids; return how many of them existed."""
        n_rows = self._n_rows
        for block in _blocks(len(ids)):
            places = self.find(ids[block]).places
            at = 2 * places[places >= 0] + 1  # where the versions of the known ids stand among the pairs
            self._n_rows -= int(np.count_nonzero(self._pairs[at] != _ERASED))
            self._pairs[at] = _ERASED
        return n_rows - self._n_rows

    def forget_up_to(self, version: int) -> None:
        """Forget the ids whose version is this one or below, and give their memory back."""
        pairs = self._pairs.reshape(-1, 2)
        for start in range(0, len(pairs), _BLOCK_ROWS):
            some = pairs[start : start + _BLOCK_ROWS, 1]
            old = some <= np.uint64(version)  # places that hold no id among them, which may have kept anything
            old &= self._tags.view(np.uint8)[start : start + _BLOCK_ROWS] != 0
            some[old] = _ERASED
            self._n_rows -= int(np.count_nonzero(old))
        del pairs, some
        self._rebuild(0, np.empty(0, np.uint64))

    def arrays(self) -> tuple[Ids, Versions]:
        """Return copies of all ids and their versions, in no particular order."""
        return self._rows(slice(0, len(self._tags)))

    def portion(self, low: int, high: int = END, n_rows: int = _BLOCK_ROWS, *, above: int = 0) -> tuple[Ids, Versions, int]:
        """Return the first rows of a range of keys, in the order of their keys, and the key where the next portion begins.

        Whoever takes one portion after the other gets every row that is there all the time exactly once, and any other once or not at all.
        """
        grain, n_buckets = max(self._homes.order.grain, 1 << 32), len(self._tags)
        first = self._homes.bucket(low // grain * grain)
        next_ = self._homes.first_hash(first + max(1, n_rows * n_buckets // max(1, self._n_used)))
        next_ = min(high, END, max(next_, low + 1) + -max(next_, low + 1) % grain)
        ids, versions = self._rows_from(first, self._homes.bucket(next_ - 1), above)
        keys = self._homes.order.keys(ids)
        inside = keys >= np.uint64(low)
        inside &= keys <= np.uint64(next_ - 1)
        rows = np.flatnonzero(inside)
        rows = rows[np.argsort(keys[rows], kind="stable")]  # nearly in order: three times as fast
        return ids[rows], versions[rows], next_

    def some(self, limit: int, start: float) -> Ids:
        """Return at most `limit` ids, those of buckets at equal distances, in no particular order: other ones with each start, [0, 1)."""
        stride = max(1, self._n_used // limit)
        buckets = np.arange(int(start * stride), len(self._tags), stride)
        tags, pairs = self._tags[buckets].view(np.uint8), self._pairs.reshape(-1, WIDTH, 2)[buckets].reshape(-1, 2)
        ids: Ids = pairs[(tags != 0) & (pairs[:, 1] != _ERASED), 0]
        return ids[:limit]

    # --- looking ----------------------------------------------------------------------------------------------------------------

    def _still(self, found: IndexLookup) -> IndexLookup:
        """Return `found`, looked up again if the index's layout has changed. Erasing does not change it: erased ids keep their places."""
        return found if found.layout == self._layout else self.find(found.ids)

    def _versions(self, places: Places) -> Versions:
        versions = self._pairs.take(2 * places + 1, mode="clip")  # [n]: of an id without a place some other's
        none = versions == _ERASED  # bool [n]: those that do not exist
        none |= places < 0
        versions[none] = 0
        return versions

    def _rows(self, buckets: slice, above: int = 0) -> tuple[Ids, Versions]:
        """Return copies of the ids and versions in some buckets, of the versions above one."""
        pairs = self._pairs.reshape(-1, 2)[buckets.start * WIDTH : buckets.stop * WIDTH]
        live = self._tags[buckets].view(np.uint8) != 0  # bool [places of these buckets]: holds an id that is not erased
        live &= pairs[:, 1] != _ERASED
        if above:
            live &= pairs[:, 1] > np.uint64(above)
        return pairs[live, 0], pairs[live, 1]

    def _rows_from(self, first: int, last: int, above: int) -> tuple[Ids, Versions]:
        """Return the ids whose probes begin in these buckets, others among them: they lie as far as the first bucket with room behind."""
        stop, n = last, len(self._tags)
        while self._tags[stop % n] > LAST_TAKEN and stop < last + n:
            stop += 1
        parts = [self._rows(slice(first, min(stop + 1, n)), above), self._rows(slice(0, max(0, min(stop + 1 - n, first))), above)]
        ids, versions = zip(*parts, strict=True)
        return np.concatenate(ids), np.concatenate(versions)

    # --- changing ---------------------------------------------------------------------------------------------------------------

    def _put(self, found: IndexLookup, versions: Versions) -> None:
        """Set the versions of n ids that were looked up just now; the table grows where the new ones do not fit."""
        new = np.flatnonzero(found.places < 0)
        may_crowd = self._is_far or self._homes.starts is not None
        if self._n_used + len(new) > self._room or (may_crowd and self._crowds(found.ids[new])):
            # Erased ids lose their places in a rebuild: those among the ids to be put need room like new ones.
            n_more = len(new) if self._n_used == self._n_rows else int(np.count_nonzero(self._versions(found.places) == 0))
            self._rebuild(n_more, found.ids)
            found = self.find(found.ids)
            new = np.flatnonzero(found.places < 0)
        known = found.places >= 0 if len(new) else slice(None)
        at = 2 * found.places[known] + 1
        if self._n_used > self._n_rows:
            self._n_rows += int(np.count_nonzero(self._pairs[at] == _ERASED))
        self._pairs[at] = versions[known]
        if len(new):
            self._n_rows += len(new)
            self._insert(found.ids[new], versions[new], found.buckets[new])

    def _place_in_order(self, ids: Ids, versions: Versions) -> int:
        """Place rows in an empty table, as many of the first ones as come in the order of their hashes; return how many those are.

        Nothing needs to be looked for then: a row's place is the first one from its bucket on that no row before it has.
        """
        free, home, n_placed = 0, 0, 0  # the first place after all taken ones; the bucket of the last row
        pairs, every_tag = self._pairs.reshape(-1, 2), self._tags.view(np.uint8)
        for block in _blocks(len(ids)):
            buckets, tags = self._homes.of(self._homes.order.hashes(ids[block]))  # [n] each
            rank = np.arange(len(buckets))
            at = np.maximum.accumulate(np.maximum(buckets * WIDTH - rank, free)) + rank  # [n]: the places
            if buckets[0] < home or (buckets[1:] < buckets[:-1]).any() or at[-1] >= len(every_tag):
                break
            pairs[at, 0], pairs[at, 1], every_tag[at] = ids[block], versions[block], tags
            free, home, n_placed = int(at[-1]) + 1, int(buckets[-1]), n_placed + len(at)
        self._n_rows = self._n_used = n_placed
        self._layout += 1
        return n_placed

    def _insert(self, ids: Ids, versions: Versions, buckets: Places) -> None:
        """Give ids that are not in the table a place each: the first empty one of their bucket, or of the next that has one.

        Several ids may claim one empty place in a round: all write, the one that is found there afterwards has won.
        """
        hashes, every_tag = self._homes.order.hashes(ids), self._tags.view(np.uint8)
        self._n_strange += self._homes.n_strange(hashes)
        own, tags = self._homes.of(hashes)
        tags = tags.astype(np.uint8)
        self._is_far = self._is_far or bool((buckets - own > _FAR).any())
        self._n_used += len(ids)
        self._layout += 1
        while len(ids):
            # n_taken [m]: the taken places of each id's bucket, which are its first ones
            n_taken = WIDTH - np.bitwise_count(zero_bytes(self._tags[buckets])).astype(np.int64)
            full = n_taken == WIDTH
            if full.any():
                buckets = (buckets + full) % len(self._tags)
                continue
            at = buckets * WIDTH + n_taken  # [m]: the place that each id claims
            self._pairs[2 * at] = ids
            won = self._pairs[2 * at] == ids
            self._pairs[2 * at[won] + 1] = versions[won]
            every_tag[at[won]] = tags[won]
            lost = np.flatnonzero(~won)
            ids, versions, tags, buckets = ids[lost], versions[lost], tags[lost], buckets[lost]

    def _crowds(self, new: Ids) -> bool:
        """Return whether rows lie far from their buckets, or too many, with these, are such as the table has no buckets for."""
        if self._is_far and self._n_used - self._n_laid > self._n_used // _FAR_SHARE:
            return True
        if self._homes.starts is None:
            return False
        n_strange = self._n_strange + self._homes.n_strange(self._homes.order.hashes(new))
        return n_strange > max(_MOST_STRANGE, _STRANGE_SHARE * self._n_rows)

    def _rebuild(self, n_more: int, coming: Ids) -> None:
        """Make room for n_more rows, of the `coming` ids, uint64 [m], known or not; or give up room that erased ids took."""
        self._layout += 1
        n_old, n_new = len(self._tags), max(_MIN_BUCKETS, int((self._n_rows + n_more) * (self._growth / MAX_LOAD / WIDTH)) + 1)
        self._resize(max(n_old, n_new))
        self._push_together(n_old)
        pairs, blocks = self._pairs.reshape(-1, 2), range(0, self._n_rows, _WINDOW_ROWS)
        listed = [pairs[at : min(at + _WINDOW_ROWS, self._n_rows), 0] for at in blocks]
        self._homes = Homes.made_for(self._homes.order, n_new, listed, coming)
        self._n_used = self._n_strange = 0
        late, end = [self._rows(slice(0, 0))], n_new
        for start in reversed(blocks):  # rows before `start` are still pushed together, places from `end` on are filled
            ids, versions = pairs[start : min(start + _WINDOW_ROWS, self._n_rows)].T.copy()
            end, some = self._fill(ids, versions, slice(-(-start // WIDTH), end))
            late.append(some)
        del pairs, listed  # views: see `_resize`
        self._resize(n_new)
        late_ids = np.concatenate([ids for ids, _ in late])
        self._insert(late_ids, np.concatenate([versions for _, versions in late]), self.find(late_ids).buckets)
        self._n_laid, self._is_far = self._n_used, False

    def _push_together(self, n_buckets: int) -> None:
        """Move all rows to the first places, in the order in which they lie, and clear all tags."""
        pairs, n = self._pairs.reshape(-1, 2), 0
        for start in range(0, n_buckets, _WINDOW_ROWS // WIDTH):
            ids, versions = self._rows(slice(start, min(start + _WINDOW_ROWS // WIDTH, n_buckets)))
            pairs[n : n + len(ids), 0], pairs[n : n + len(ids), 1] = ids, versions
            n += len(ids)
        self._tags[:] = 0

    def _fill(self, ids: Ids, versions: Versions, window: slice) -> tuple[int, tuple[Ids, Versions]]:
        """Put rows into empty buckets by their hashes; return the first bucket taken, and the few rows that find no room there."""
        buckets, tags = self._homes.of(self._homes.order.hashes(ids))  # [n] each
        rows = np.argsort(buckets, kind="stable")  # they are nearly in order, which makes this kind fast
        buckets = buckets[rows]
        first, last = np.searchsorted(buckets, (window.start, window.stop))
        # at [k]: of the rows whose bucket is in the window, in order, the first place from their bucket on that no row before them has
        rank = np.arange(last - first)
        at = np.maximum.accumulate(buckets[first:last] * WIDTH - rank) + rank
        n_fit = int(np.searchsorted(at, window.stop * WIDTH))
        these, at = rows[first : first + n_fit], at[:n_fit]
        self._pairs[2 * at], self._pairs[2 * at + 1] = ids[these], versions[these]
        self._tags.view(np.uint8)[at] = tags[these]
        self._n_used += n_fit
        others = np.concatenate([rows[:first], rows[first + n_fit :]])
        return int(buckets[first]) if n_fit else window.stop, (ids[others], versions[others])

    def _resize(self, n_buckets: int) -> None:
        # refcheck counts references that are none to the memory; views of these two arrays never outlive a method.
        self._pairs.resize(2 * WIDTH * n_buckets, refcheck=False)  # first: when there is no memory for it, nothing has changed
        self._tags.resize(n_buckets, refcheck=False)
        self._room = int(MAX_LOAD * WIDTH * n_buckets)


def _blocks(n: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK_ROWS, n)) for start in range(0, n, _BLOCK_ROWS))
