"""A policy's verdict on a portion of a table's rows. Pure: arrays in, arrays out; a function reads weights, of the rows that need them.

`keep` is told by two numbers of a walk: how many rows are too many, and the batch up to which so many were pushed last. That batch is found
by counting rows by the batch of their last push, while the walk before goes on (`PushCounts`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvemb.evict import Eviction

Mask = NDArray[np.bool_]
Batches = NDArray[np.int64]
Norms = Callable[[NDArray[np.intp]], NDArray[np.float64]]
"""Rows of the portion, by number (intp [m]) -> the L2 norm of the weights of each, float64 [m]; infinity where it is not known."""
_N_BINS = 1 << 16


def terms(policy: Eviction) -> tuple[Eviction, ...]:
    """Return the policies of which each may send a row away; a row that several send counts for the first."""
    return policy.of if policy.kind == "any_of" else (policy,)


class PushCounts:
    """How many rows of a table were pushed last by which batch, as one walk has seen them."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._width = first, max(1, -(-(last + 1 - first) // _N_BINS))
        self._counts = np.zeros((last - first) // self._width + 1, np.int64)
        self.lowest = last

    def add(self, pushed: Batches) -> None:
        """Count rows: int64 [n], the batch of each one's last push."""
        if len(pushed):
            self.lowest = min(self.lowest, int(pushed.min()))
            bins = np.clip((pushed - self._first) // self._width, 0, len(self._counts) - 1)
            self._counts += np.bincount(bins, minlength=len(self._counts))

    def oldest(self, n_rows: int) -> int:
        """Return a batch up to which at least so many rows were pushed last, about the first one; -1 for no rows."""
        if n_rows <= 0:
            return -1
        at = int(np.searchsorted(np.cumsum(self._counts), n_rows))
        return self._first + (min(at, len(self._counts) - 1) + 1) * self._width - 1


@dataclass(frozen=True)
class EvictionLimits:
    """The policies of a table as batches, for one portion of a walk.

    Args:
        k: the last batch applied.
        k_at: a batch applied so many days ago, the last one known; -1 for none.
        excess: how many more rows there are than `keep` says, by its number of rows.
        oldest: the batch up to which so many were pushed last, likewise; -1 where that is not known yet.
    """

    k: int
    k_at: Callable[[float], int]
    excess: dict[int, int] = field(default_factory=dict)
    oldest: dict[int, int] = field(default_factory=dict)

    def up_to(self, leaf: Eviction) -> int:
        """Return the batch such that rows pushed last by it, or before, may go by this policy, as far as their age says."""
        if leaf.kind == "keep":
            return self.oldest.get(int(leaf.limit), -1)
        if leaf.kind == "older_than":
            return self.k_at(leaf.limit) if leaf.unit == "days" else self.k - int(leaf.limit)
        return self.k


def judge(policy: Eviction, pushed: Batches, norms: Norms, limits: EvictionLimits) -> tuple[Mask, NDArray[np.intp]]:
    """Return which of n rows go, bool [n], and by which of `terms`, intp [n] (without meaning for those that stay).

    Args:
        pushed: int64 [n], the batch of each row's last push.
    """
    goes, why = np.zeros(len(pushed), bool), np.zeros(len(pushed), np.intp)
    for number, term in enumerate(terms(policy)):
        sent = _sent(term, pushed, norms, limits, ~goes, n_gone=int(goes.sum()))
        goes |= sent
        why[sent] = number
    return goes, why


def _sent(policy: Eviction, pushed: Batches, norms: Norms, limits: EvictionLimits, asked: Mask, *, n_gone: int) -> Mask:
    """Which of the rows asked about a policy sends, where so many others go already."""
    if policy.kind == "any_of":
        sent = np.zeros(len(pushed), bool)
        for one in policy.of:
            sent |= _sent(one, pushed, norms, limits, asked & ~sent, n_gone=n_gone + int(sent.sum()))
        return sent
    if policy.kind == "all_of":  # `keep` last: only rows that the others send count for it; norms, which may have to be read, before it
        for one in sorted(policy.of, key=_cost):
            asked = _sent(one, pushed, norms, limits, asked, n_gone=n_gone)
        return asked
    sent = asked & (pushed <= limits.up_to(policy))
    if policy.kind == "l2_below":
        sent[sent] = norms(np.flatnonzero(sent)) < policy.limit
    if policy.kind == "keep":
        rows, excess = np.flatnonzero(sent), max(0, limits.excess[int(policy.limit)] - n_gone)
        if len(rows) > excess:
            rows = rows[np.argsort(pushed[rows], kind="stable")[excess:]]
            sent[rows] = False
    return sent


def _cost(policy: Eviction) -> int:
    kinds = {leaf.kind for leaf in policy.parts}
    return 2 * ("keep" in kinds) + ("l2_below" in kinds)
