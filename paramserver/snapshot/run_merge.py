"""Many sorted runs become one: of each id the newest state. Pure, block by block: memory holds one block of each run."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .sorted_run import ERASED, ROWS, Bytes, Ids, SortedRun

Versions = Callable[[Bytes], Ids]
"""Records uint8 [n, record bytes] -> their versions."""


def merged(runs: Sequence[SortedRun], versions: Versions, *, forget_up_to: int) -> Iterator[tuple[int, Ids, Bytes]]:
    """Yield (kind, ids, rest) as `SortedRunEncoder.add` takes them.

    Args:
        runs: of one table, oldest first: the newest run that has an id decides. (Versions cannot decide across runs: a row that another
            shard handed over may be older than the note that this shard had it no more.)
        versions: of that table's records.
        forget_up_to: notes of erased rows up to this version are omitted; 0 where an older run, which is not among these, may have them.
    """
    cursors = [_Cursor(run, kind, age) for age, run in enumerate(runs) for kind in (ROWS, ERASED)]
    while cursors := [cursor for cursor in cursors if cursor.load()]:
        bound = min(cursor.ids[-1] for cursor in cursors)  # up to this id, every run's rows are at hand
        taken: list[list[tuple[Ids, Bytes]]] = [[], []]
        ages: list[list[NDArray[np.intp]]] = [[], []]
        for cursor in cursors:
            ids, rest = cursor.take(bound)
            taken[cursor.kind].append((ids, rest))
            ages[cursor.kind].append(np.full(len(ids), cursor.age))
        rows, erased = (_concatenated(parts, runs[0].record_bytes if kind == ROWS else 8) for kind, parts in enumerate(taken))
        yield from _newest(rows, erased, np.concatenate([*ages[ROWS], *ages[ERASED]]), versions, forget_up_to)


def merge_from(sizes: Sequence[int], limit: int) -> int | None:
    """Return the first run, oldest first, that is to be merged with all behind it; None when nothing is to be done.

    Nothing is merged while there are at most `limit` runs. Then the newest are merged, and with them every one before them that is at most
    twice as large as those together: a large old run is rewritten only when as much has come since.

    Example:
        >>> merge_from([100, 5, 5], 4), merge_from([1000, 9, 5, 2, 2], 4), merge_from([10, 9, 5, 2, 2], 4)
        (None, 1, 0)
    """
    if len(sizes) <= limit:
        return None
    first, total = len(sizes) - 1, sizes[-1]
    while first > 0 and (sizes[first - 1] <= 2 * total or first >= limit):
        first -= 1
        total += sizes[first]
    return first


class _Cursor:
    """The reading position in the blocks of one kind of one run."""

    def __init__(self, run: SortedRun, kind: int, age: int) -> None:
        self.kind, self.age = kind, age
        self._blocks = run.blocks(kind)
        self.ids: Ids = np.empty(0, np.uint64)
        self._rest: Bytes = np.empty((0, 0), np.uint8)

    def load(self) -> bool:
        """Have at least one row at hand; return False at the end."""
        while len(self.ids) == 0:
            block = next(self._blocks, None)
            if block is None:
                return False
            self.ids, self._rest = block
        return True

    def take(self, bound: np.uint64) -> tuple[Ids, Bytes]:
        """Take the rows up to an id, it included."""
        n = int(np.searchsorted(self.ids, bound, side="right"))
        taken = self.ids[:n], self._rest[:n]
        self.ids, self._rest = self.ids[n:], self._rest[n:]
        return taken


def _concatenated(parts: list[tuple[Ids, Bytes]], width: int) -> tuple[Ids, Bytes]:
    empty = np.empty(0, np.uint64), np.empty((0, width), np.uint8)
    ids, rest = zip(empty, *parts, strict=True)
    return np.concatenate(ids), np.concatenate(rest)


def _newest(
    rows: tuple[Ids, Bytes], erased: tuple[Ids, Bytes], ages: NDArray[np.intp], versions: Versions, forget_up_to: int
) -> Iterator[tuple[int, Ids, Bytes]]:
    """Of each id among rows and erased ones (`ages`: their runs), the state of the newest run, and there of the highest version."""
    # [m] each: the rows first, the erased ids behind them; an id once for every run and kind that has it.
    ids = np.concatenate([rows[0], erased[0]])
    all_versions = np.concatenate([versions(rows[1]), erased_versions(erased[1])])
    order = np.lexsort((all_versions, ages, ids))  # intp [m]: by id, within an id by age, within an age by version
    # intp [n]: the place of each unique id's newest state; live: places among the rows, gone: places among the erased.
    last: NDArray[np.intp] = order[np.append(ids[order][1:] != ids[order][:-1], True)] if len(order) else order
    live, gone = last[last < len(rows[0])], last[last >= len(rows[0])] - len(rows[0])
    if len(live):
        yield ROWS, rows[0][live], rows[1][live]
    gone = gone[erased_versions(erased[1])[gone] > np.uint64(forget_up_to)]
    if len(gone):
        yield ERASED, erased[0][gone], erased[1][gone]


def erased_versions(rest: Bytes) -> Ids:
    """Return the versions of erased ids: uint8 [n, 8] -> uint64 [n]."""
    return np.ascontiguousarray(rest).view("<u8")[:, 0].astype(np.uint64, copy=False)
