"""An index of ids: each with a number of 64 bits (a row's version, a place in an array). Pure, NumPy only.

Shards know by it which rows exist, and the cache of records (`kvemb.arrays.record_cache`) finds its rows by it.

A hash table of buckets of 8 places, filled from the first place on; a row that does not fit lies in the next bucket that has room. Beside
the (id, version) pairs every place has a tag of 8 bits of the id's hash, 0 where it is empty. Ids are found by their tags
(`kvemb.arrays.hash_probe`). All operations take batches of unique ids, a block at a time: the results of one step are still in the
processor's cache for the next. There is no loop over rows.

Memory is 17 bytes a place. Between _MAX_LOAD / _GROWTH and _MAX_LOAD of the places are taken. So a row costs 20 to 23.7 bytes from about a
thousand rows on, at any number of them. Growth happens in place, a window of the table at a time. A larger table keeps the order of the
hashes, so every row moves up, and the last go first. Where the system can extend an allocation (Linux remaps its pages) the peak is the new
size and a few MB. Elsewhere it is the old and the new size, while the pairs are copied over. A row that came early is moved about 1 /
(_GROWTH - 1) times in all. Putting rows one small batch after the other into a table that grows takes about three times as long as putting
them all at once.

An erased id keeps its place until the next growth (a bucket that was full must stay so), and gets it back when put again. Erasing alone
gives no memory back. Not thread-safe; its users hold the lock.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hash_probe import WIDTH, Ids, Places, home, probe, zero_bytes

Versions = NDArray[np.uint64]

_ERASED = np.uint64(0xFFFF_FFFF_FFFF_FFFF)  # as a version: epoch and k both at their very end, which no shard reaches
HASHES = 1 << 32
"""The whole of an index, for `RowIndex.between`."""
_MIN_BUCKETS = 128
_MAX_LOAD = 0.85
_GROWTH = 1.18
_BLOCK_ROWS = 1 << 16
_WINDOW_BUCKETS = 1 << 13


@dataclass(frozen=True, eq=False)
class IndexLookup:
    """Where an index has some ids: made by `RowIndex.find`, so that the next operation on them need not look for them again.

    It stays valid when the index changes: if ids have come or moved since, they are looked up again.

    Args:
        ids: uint64 [n], unique; they must not change.
        places: int64 [n], -1 for an id that has none.
        buckets: int64 [n], where the search for each ended.
        layout: number of the index's layout then.
    """

    ids: Ids
    places: Places
    buckets: Places
    layout: int

    def take(self, which: NDArray[np.intp]) -> "IndexLookup":
        """Return the ids that `which` numbers."""
        if len(which) == len(self.ids):
            return self
        return IndexLookup(self.ids.take(which), self.places.take(which), self.buckets.take(which), self.layout)


class RowIndex:
    """Maps the ids of one table to versions (or other numbers of 64 bits), for batches of ids at a time.

    One class: all its methods read or change the same arrays, which must fit each other between any two calls.

    Args:
        growth: how much larger a full table gets; the more, the more memory a row takes, and the less often it is moved.

    Example:
        >>> index = RowIndex()
        >>> index.put(np.array([7, 9], np.uint64), np.array([1, 2], np.uint64))
        >>> index.get(np.array([9, 8, 7], np.uint64)), len(index)
        (array([2, 0, 1], dtype=uint64), 2)
        >>> found = index.find(np.array([8, 9], np.uint64))
        >>> index.set_at(found, 3)
        >>> index.at(found)
        array([3, 3], dtype=uint64)
    """

    def __init__(self, growth: float = _GROWTH) -> None:
        self._growth = growth
        self._tags = np.zeros(_MIN_BUCKETS, np.uint64)  # of the 8 places of each bucket, the first in the lowest byte
        self._pairs = np.zeros(2 * WIDTH * _MIN_BUCKETS, np.uint64)  # id and version of each place, one behind the other
        self._n_rows = self._n_used = 0
        self._layout = 0  # rises when an id gets a place, or another place

    def __len__(self) -> int:
        return self._n_rows

    @property
    def size_bytes(self) -> int:
        """Memory of the hash table."""
        return self._pairs.nbytes + self._tags.nbytes

    def get(self, ids: Ids) -> Versions:
        """Return each id's version, 0 where it does not exist: uint64 [n]."""
        if len(ids) <= _BLOCK_ROWS:
            return self._versions(self._find(ids)[0])
        return np.concatenate([self._versions(self._find(ids[block])[0]) for block in _blocks(len(ids))])

    def put(self, ids: Ids, versions: Versions) -> None:
        """Set the versions of n unique ids, known or new.

        Args:
            ids: uint64 [n], unique.
            versions: uint64 [n], neither 0 nor 2**64 - 1.
        """
        assert not ((versions == 0) | (versions == _ERASED)).any()
        for block in _blocks(len(ids)):
            self._put(self.find(ids[block]), versions[block], ids[block.start :])

    def make_room(self, n_more: int) -> None:
        """Grow now, so that n more rows can be put without that."""
        if self._n_used + n_more > _MAX_LOAD * WIDTH * len(self._tags):
            self._rebuild(n_more)

    def find(self, ids: Ids) -> IndexLookup:
        """Look n unique ids up, for `at` and `set_at`; the array is kept, 16 bytes a row beside it."""
        if len(ids) <= _BLOCK_ROWS:
            return IndexLookup(ids, *self._find(ids), self._layout)
        places, buckets = zip(*(self._find(ids[block]) for block in _blocks(len(ids))), strict=True)
        return IndexLookup(ids, np.concatenate(places), np.concatenate(buckets), self._layout)

    def at(self, found: IndexLookup) -> Versions:
        """Return the versions that ids have now, 0 where one does not exist: uint64 [n]."""
        return self._versions(self._still(found).places)

    def set_at(self, found: IndexLookup, version: int) -> None:
        """Set the version of n ids, known or new, to this one, neither 0 nor 2**64 - 1."""
        assert 0 < version < int(_ERASED)
        self._put(self._still(found), np.full(len(found.ids), version, np.uint64), found.ids)

    def put_at(self, found: IndexLookup, versions: Versions) -> None:
        """Set the versions of n ids, known or new, each neither 0 nor 2**64 - 1: `put` of ids that were looked up."""
        assert not ((versions == 0) | (versions == _ERASED)).any()
        self._put(self._still(found), versions, found.ids)

    def erase(self, ids: Ids) -> int:
        """Forget n unique ids; return how many of them existed."""
        n_rows = self._n_rows
        for block in _blocks(len(ids)):
            places = self._find(ids[block])[0]
            at = 2 * places[places >= 0] + 1  # where the versions of the known ids stand among the pairs
            self._n_rows -= int(np.count_nonzero(self._pairs[at] != _ERASED))
            self._pairs[at] = _ERASED
        return n_rows - self._n_rows

    def arrays(self) -> tuple[Ids, Versions]:
        """Return copies of all ids and their versions, in no particular order."""
        return self._rows(slice(0, len(self._tags)))

    def since(self, version: int) -> tuple[Ids, Versions]:
        """Return copies of the ids whose version is this one or above, and of their versions, in no particular order.

        Example:
            >>> index = RowIndex()
            >>> index.put(np.array([7, 8, 9], np.uint64), np.array([3, 1, 2], np.uint64))
            >>> sorted(index.since(2)[0].tolist())
            [7, 9]
        """
        pairs = self._pairs.reshape(-1, 2)  # [places, 2]: id and version
        at = np.flatnonzero(pairs[:, 1] >= np.uint64(version))  # an empty place may have kept anything, see `_rebuild`
        at = at[(self._tags.view(np.uint8)[at] != 0) & (pairs[at, 1] != _ERASED)]
        return pairs[at, 0], pairs[at, 1]

    def between(self, low: int, high: int) -> Ids:
        """Return the ids whose places are in one part of the table, in no particular order: 0 to HASHES is all of it.

        Parts side by side have every id once. They still do when the table has grown in between, but for the few ids that found no room
        in their own bucket.

        Example:
            >>> index = RowIndex()
            >>> index.put(np.arange(100, dtype=np.uint64), np.ones(100, np.uint64))
            >>> len(index.between(0, HASHES // 3)) + len(index.between(HASHES // 3, HASHES))
            100
        """
        n = len(self._tags)
        return self._rows(slice(*(min(at, HASHES) * n // HASHES for at in (low, high))))[0]

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

    # --- looking ----------------------------------------------------------------------------------------------------------------

    def _still(self, found: IndexLookup) -> IndexLookup:
        """Return `found`, looked up again if the index's layout has changed. Erasing does not change it: erased ids keep their places."""
        return found if found.layout == self._layout else self.find(found.ids)

    def _find(self, ids: Ids) -> tuple[Places, Places]:
        return probe(self._tags, self._pairs, ids)

    def _versions(self, places: Places) -> Versions:
        versions = self._pairs.take(2 * places + 1, mode="clip")  # [n]: of an id without a place some other's
        none = versions == _ERASED  # bool [n]: those that do not exist
        none |= places < 0
        versions[none] = 0
        return versions

    def _rows(self, buckets: slice) -> tuple[Ids, Versions]:
        """Return copies of the ids and versions in some buckets."""
        pairs = self._pairs.reshape(-1, 2)[buckets.start * WIDTH : buckets.stop * WIDTH]
        live = self._tags[buckets].view(np.uint8) != 0  # bool [places of these buckets]: holds an id that is not erased
        live &= pairs[:, 1] != _ERASED
        return pairs[live, 0], pairs[live, 1]

    # --- changing ---------------------------------------------------------------------------------------------------------------

    def _put(self, found: IndexLookup, versions: Versions, all_ids: Ids) -> None:
        """Set versions; `all_ids` are these and others that will be put next, for which a rebuild makes room as well."""
        new = np.flatnonzero(found.places < 0)
        if self._n_used + len(new) > _MAX_LOAD * WIDTH * len(self._tags):
            # Erased ids lose their places in a rebuild: those among the ids to be put need room like new ones.
            sure = self._n_used == self._n_rows and len(all_ids) == len(found.ids)  # nothing is erased, and all were looked up
            self._rebuild(len(new) if sure else int(np.count_nonzero(self.get(all_ids) == 0)))
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

    def _insert(self, ids: Ids, versions: Versions, buckets: Places) -> None:
        """Give ids that are not in the table a place each: the first empty one of their bucket, or of the next that has one.

        Several ids may claim one empty place in a round: all write, the one that is found there afterwards has won.
        """
        tags, every_tag = home(ids, 1)[1].astype(np.uint8), self._tags.view(np.uint8)
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

    def _rebuild(self, n_more: int) -> None:
        """Make room for n_more rows, or give up room that erased ids took; their places become free."""
        self._layout += 1
        n_old, n_new = len(self._tags), max(_MIN_BUCKETS, int((self._n_rows + n_more) * (self._growth / _MAX_LOAD / WIDTH)) + 1)
        self._resize(max(n_old, n_new))
        starts = range(0, n_old, _WINDOW_BUCKETS)
        self._n_used, late = 0, [self._rows(slice(0, 0))]
        for start in reversed(starts) if n_new > n_old else starts:
            window = slice(start, min(start + _WINDOW_BUCKETS, n_old))
            ids, versions = self._rows(window)
            self._tags[window] = 0
            late.append(self._fill(ids, versions, slice(window.start * n_new // n_old, window.stop * n_new // n_old), n_new))
        self._resize(n_new)
        late_ids = np.concatenate([ids for ids, _ in late])
        self._insert(late_ids, np.concatenate([versions for _, versions in late]), self._find(late_ids)[1])

    def _fill(self, ids: Ids, versions: Versions, window: slice, n_buckets: int) -> tuple[Ids, Versions]:
        """Put rows into empty buckets, in the order of their hashes; return the few that belong elsewhere or find no room there."""
        buckets, tags = home(ids, n_buckets)  # [n] each
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
        return ids[others], versions[others]

    def _resize(self, n_buckets: int) -> None:
        # refcheck counts references that are none to the memory; views of these two arrays never outlive a method.
        self._pairs.resize(2 * WIDTH * n_buckets, refcheck=False)  # first: when there is no memory for it, nothing has changed
        self._tags.resize(n_buckets, refcheck=False)


def _blocks(n: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK_ROWS, n)) for start in range(0, n, _BLOCK_ROWS))
