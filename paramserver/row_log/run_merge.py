"""Many sorted runs become one: of each key the newest state. Pure, block by block: memory holds one block of each run."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items, as_rows

from .sorted_run import ERASED, ROWS, Ids, Part


class Blocks(Protocol):
    """A run, or what is read as one."""

    def blocks(self, kind: int, low: int = 0, *, records: bool = True, above: int = 0) -> Iterator[Part]:
        """See `SortedRun.blocks`."""


def merged(
    runs: Sequence[Blocks], *, forget_up_to: int, low: int = 0, high: int = 1 << 64, records: bool = True, above: int = 0
) -> Iterator[Part]:
    """Yield the newest state of each key of a range, as `RunWriter.add` takes it."""
    cursors = [
        _Cursor(run.blocks(kind, low, records=records, above=above), kind, age, (low, high))
        for age, run in enumerate(runs)
        for kind in (ROWS, ERASED)
    ]
    while cursors := [cursor for cursor in cursors if cursor.load()]:
        bound = min(cursor.keys[-1] for cursor in cursors)  # up to this key, every run's rows are at hand
        here = [cursor for cursor in cursors if cursor.keys[0] <= bound]
        taken = [cursor.take(bound) for cursor in here]
        for kind, keys, versions, rest in taken if len(taken) == 1 else _newest(taken, [cursor.age for cursor in here]):
            some = versions > np.uint64(forget_up_to) if kind == ERASED else None
            if some is None or some.all():
                yield kind, keys, versions, rest
            elif some.any():
                yield kind, keys[some], versions[some], rest[some]


def merge_from(sizes: Sequence[int], limit: int) -> int | None:
    """Return the first run, oldest first, that is to be merged with all after it; None when nothing is to be done.

    Nothing is merged while there are at most `limit` runs. Then the newest are merged, and with them every one before them that is at most
    twice as large as those together: a large old run is rewritten only when as much has come since.
    """
    if len(sizes) <= limit:
        return None
    first, total = len(sizes) - 1, sizes[-1]
    while first > 0 and (sizes[first - 1] <= 2 * total or first >= limit):
        first -= 1
        total += sizes[first]
    return first


class _Cursor:
    """The reading position in the blocks of one kind of one run, in a range of keys."""

    def __init__(self, blocks: Iterator[Part], kind: int, age: int, range_: tuple[int, int]) -> None:
        self.kind, self.age = kind, age
        self._blocks, self._range = blocks, range_
        self.keys: Ids = np.empty(0, np.uint64)
        self._versions, self._rest = self.keys, np.empty((0, 0), np.uint8)

    def load(self) -> bool:
        """Have at least one row at hand; return False at the end."""
        while len(self.keys) == 0:
            block = next(self._blocks, None)
            if block is None:
                return False
            _, keys, versions, rest = block
            first, end = (int(np.searchsorted(keys, np.uint64(key))) if key < 1 << 64 else len(keys) for key in self._range)
            self.keys, self._versions, self._rest = keys[first:end], versions[first:end], rest[first:end]
            if end < len(keys):
                self._blocks = iter(())
        return True

    def take(self, bound: np.uint64) -> Part:
        """Take the rows up to a key, it included."""
        n = int(np.searchsorted(self.keys, bound, side="right"))
        taken = self.kind, self.keys[:n], self._versions[:n], self._rest[:n]
        self.keys, self._versions, self._rest = self.keys[n:], self._versions[n:], self._rest[n:]
        return taken


def _newest(parts: Sequence[Part], ages: Sequence[int]) -> Iterator[Part]:
    """Of each key among some parts, by the age of their runs, the state of the newest run, and there of the highest version."""
    # [m] each: the parts one after the other, rows of a run before its erased ids; a key once for every part that has it.
    keys, versions = (np.concatenate([part[column] for part in parts]) for column in (1, 2))
    kinds, runs = (np.repeat(one, [len(part[1]) for part in parts]) for one in ([part[0] for part in parts], ages))
    order: NDArray[np.intp] = np.argsort(keys, kind="stable")  # by key, and within a key by age: parts are in order, which makes this fast
    same = keys[order[1:]] == keys[order[:-1]]  # bool [m - 1]: whether the next one has the same key
    # A run may have both a row and its erasing: where the row is newer they change places.
    swap = np.flatnonzero(same)
    swap = swap[(runs[order[swap]] == runs[order[swap + 1]]) & (versions[order[swap]] > versions[order[swap + 1]])]
    order[swap], order[swap + 1] = order[swap + 1], order[swap]
    last = order[np.append(~same, True)]  # intp [n]: the place of each unique key's newest state
    for kind in (ROWS, ERASED):
        at = last[kinds[last] == kind]
        if len(at):
            rest = [part[3] for part in parts if part[0] == kind]
            if rest[0].shape[1]:
                some = as_rows(as_items(np.concatenate(rest))[(np.cumsum(kinds == kind) - 1)[at]])
            else:
                some = np.empty((len(at), 0), np.uint8)
            yield kind, keys[at], versions[at], some
