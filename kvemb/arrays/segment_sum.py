"""Group rows by id and sum the rows of each group: duplicates inside a push, pushes inside a batch.

Pure NumPy, no loop over rows or ids.

Strategy: one stable sort brings equal ids together in their order of appearance. It takes 16 bits at a time, because for those NumPy has a
radix sort. For 106,496 ids in no order that is 2.2 (Zipf(1.05) ids) to 6 times (ids below 2**20) as fast as one argsort of the 64 bits.
NumPy's own sort is taken where it is as good: few ids, or ascending pushes one after another, which it merges. Sums run over a fixed tree
of fan 8: every run of up to 8 rows is added one by one, then the runs' sums likewise. That is 8 log8(largest group) vector operations
for any number of ids. The result depends on the input's order alone, so replay gives the same bits. An id that occurs thousands of
times loses less than in one running float32 sum. CPU time against one argsort and np.add.reduceat, which walks columns (one run, 106,496
rows). Zipf(1.05) ids take 0.66 times at dim 16, 0.42 at dim 64; uniform ids 0.25 and 0.11. Two ascending pushes merged take 0.19 and 0.08.
np.add.at is slower throughout. Stateless, hence thread- and fork-safe.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.process.cached_property import cached_property

_FAN = 8
_RADIX_FROM = 8192  # ids; below, four passes cost as much as one sort
_LEAST_RUN = 64  # ids that ascend, on average, for a merge of such runs to be faster than radix sort


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows grouped by id; make one with `group_by_id`."""

    ids: NDArray[np.uint64]  # uint64 [n], unique, ascending
    # intp [m]: the rows sorted by id, equal ids in order of appearance; None when the ids were unique and ascending already
    order: NDArray[np.intp] | None
    starts: NDArray[np.intp]  # intp [n]: where each id's rows begin in that order

    @cached_property
    def inverse(self) -> NDArray[np.intp]:
        """For each row the position of its id in `ids`: intp [m]."""
        if self.order is None:
            return self.starts
        steps = np.zeros(len(self.order), np.intp)  # [m]: in sorted order, 1 where the next id begins; summed: which id it is
        steps[self.starts[1:]] = 1
        inverse = np.empty_like(steps)
        inverse[self.order] = np.cumsum(steps, out=steps)
        return inverse

    def sum(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Sum the rows of each id: float32 [m, d] -> float32 [n, d]; `rows` itself when there was nothing to do.

        Up to 8 rows of an id are added one after another in order of appearance, more of them in a fixed tree.
        """
        if self.order is None:
            return rows
        lengths = np.diff(self.starts, append=len(self.order))
        return _fold(rows, self.order, self.starts, lengths)

    def minimum(self, values: NDArray[Any]) -> NDArray[Any]:
        """The smallest value of each id: [m] -> [n]; `values` itself when there was nothing to do."""
        if self.order is None:
            return values
        return np.minimum.reduceat(values[self.order], self.starts) if len(values) else values


def group_by_id(ids: NDArray[np.uint64]) -> Groups:
    """Group rows by id, uint64 [m]."""
    if bool((ids[1:] > ids[:-1]).all()):
        return Groups(ids, None, np.arange(len(ids), dtype=np.intp))
    order = _ascending(ids)
    ascending = ids[order]
    first = np.empty(len(ids), np.bool_)  # [m]: in sorted order, whether an id begins there
    first[0] = True
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    return Groups(ascending[starts], order, starts)


def _ascending(ids: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Return the order that sorts ids, equal ones in order of appearance: uint64 [m], at least 1 -> intp [m]."""
    if len(ids) < _RADIX_FROM or np.count_nonzero(ids[1:] < ids[:-1]) * _LEAST_RUN < len(ids):
        return np.argsort(ids, kind="stable")
    order: NDArray[np.intp] | None = None
    for shift in (0, 16, 32, 48):
        digit = (ids >> np.uint64(shift)).astype(np.uint16)  # [m]: 16 bits of each id, the lowest ones first
        if order is None:
            order = np.argsort(digit, kind="stable")
        elif (digit != digit[0]).any():
            order = order[np.argsort(digit[order], kind="stable")]
    assert order is not None
    return order


def _fold(rows: NDArray[np.float32], order: NDArray[np.intp], starts: NDArray[np.intp], lengths: NDArray[np.intp]) -> NDArray[np.float32]:
    """Sum rows[order[starts[i] : starts[i] + lengths[i]]] for every i, through runs of at most _FAN rows."""
    n_runs = -(-lengths // _FAN)  # [n]: runs of each id, the last of which may be shorter
    if len(lengths) == 0 or int(n_runs.max()) == 1:
        return _sum_runs(rows, order, starts, lengths)
    # run_starts [n]: of each id its first run; within, run_lengths [runs]: of each run its number within its id, and its rows
    run_starts = np.cumsum(n_runs) - n_runs
    within = np.arange(int(n_runs.sum())) - np.repeat(run_starts, n_runs)
    run_lengths = np.minimum(np.repeat(lengths, n_runs) - within * _FAN, _FAN)
    sums = _sum_runs(rows, order, np.repeat(starts, n_runs) + within * _FAN, run_lengths)  # float32 [runs, d], those of an id side by side
    return _fold(sums, np.arange(len(sums)), run_starts, n_runs)


def _sum_runs(
    rows: NDArray[np.float32], order: NDArray[np.intp], starts: NDArray[np.intp], lengths: NDArray[np.intp]
) -> NDArray[np.float32]:
    """The same for runs of 1 to _FAN rows, one after another: round r adds the r-th row of all runs that have one."""
    # take: brackets gather rows of [m, d] at a quarter of its speed; mode="clip": the default one gathers through a buffer.
    out = rows.take(order[starts], axis=0, mode="clip")
    longer = np.flatnonzero(lengths > 1)  # the runs that have a row to be added in this round
    for at in range(1, _FAN):
        if len(longer) == 0:
            break
        sums = out.take(longer, axis=0, mode="clip")
        sums += rows.take(order[starts[longer] + at], axis=0, mode="clip")
        out[longer] = sums
        longer = longer[lengths[longer] > at + 1]
    return out
