"""How long ago rows were pushed, told by their versions: no byte per row. Pure; the time is passed in.

A row's version says which batch wrote it last. Some points (time, batch) say when that was, about: one a minute, and of long ago fewer, so
that a row seems at most 1 per cent, or a minute, younger than it is. Never older: a time between two points counts as the later one.

Versions of another shard, and those of a load, do not count this shard's batches. So slots that were taken over, and all slots at a load,
have a version of their own: rows that are older than it count as pushed then.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvemb.schema.record import MAX_K
from kvemb.schema.slots import N_SLOTS
from kvemb.schema.table_def import TableDef

Ids = NDArray[np.uint64]
_EVERY_S = 60
_SPARSE = 100  # points are apart by at most so small a part of their age
Points = tuple[tuple[int, int], ...]


class RowAges:
    """The ages of one shard's rows. Changed by the apply thread, read by any."""

    def __init__(self, points: Iterable[tuple[int, int]] = (), since: Iterable[tuple[int, int]] = (), *, k: int = MAX_K) -> None:
        self.points: Points = tuple((time_s, of) for time_s, of in points if of <= k)
        runs = list(since) or [(0, 0)]
        ends = [slot for slot, _ in runs[1:]] + [N_SLOTS]
        self._since = np.repeat(np.array([v for _, v in runs], np.uint64), [end - slot for (slot, _), end in zip(runs, ends, strict=True)])

    @property
    def since(self) -> Points:
        """Runs of slots, as the constructor takes them; () where no slot has come, and nothing was loaded."""
        return _runs(self._since)

    def mark(self, now_s: float, k: int) -> None:
        """Note that batches up to k are applied now. A clock that went back moves the points after it with it: rows seem younger."""
        now = int(now_s)
        points = [(min(time_s, now), of) for time_s, of in self.points]
        if points and (k <= points[-1][1] or now - points[-1][0] < _EVERY_S):
            self.points = tuple(points)
            return
        points.append((now, k))
        kept = points[:1]
        for point, (next_s, _) in pairwise(points[1:]):
            if next_s - kept[-1][0] > (now - next_s) / _SPARSE:  # without it, rows would seem younger by so much
                kept.append(point)
        self.points = (*kept, *points[1:][-1:])

    def k_at(self, time_s: float) -> int:
        """Return a batch that was applied by then, the last one known; -1 for none."""
        points = self.points
        at = bisect_right(points, time_s, key=lambda point: point[0])
        return points[at - 1][1] if at else -1

    def time_of(self, k: int) -> int:
        """Return a time, seconds since 1970, by which a batch was applied, the first one known; 0 for one that is too new to tell."""
        points = self.points
        at = bisect_left(points, k, key=lambda point: point[1])
        return points[at][0] if at < len(points) else 0

    def last_push(self, definition: TableDef, ids: Ids, versions: Ids) -> NDArray[np.int64]:
        """Return the number of this shard's batch in which each row counts as pushed last: int64 [n].

        Args:
            ids, versions: uint64 [n], of rows that exist.
        """
        since = self._since
        if since.any():
            versions = np.maximum(versions, since[definition.placement.slots(ids)])
        return (versions & np.uint64(MAX_K)).astype(np.int64)

    def restarted(self, definition: TableDef, ids: Ids, version: int) -> "RowAges":
        """Return the ages where the slots of these rows have come just now: rows there count as written by this version at least."""
        since = self._since.copy()
        since[definition.placement.slots(ids)] = version
        return RowAges(self.points, _runs(since))

    def become(self, other: "RowAges") -> None:
        """Take over the ages of another one."""
        self.points, self._since = other.points, other._since


def _runs(since: Ids) -> Points:
    begins = np.flatnonzero(np.concatenate([[True], since[1:] != since[:-1]]))
    return tuple(zip(begins.tolist(), since[begins].tolist(), strict=True)) if since.any() else ()
