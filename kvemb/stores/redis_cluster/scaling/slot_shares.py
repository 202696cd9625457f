"""Which slots go where when nodes join, leave or are given other shares: as few as possible, and of every table its part. Pure.

Every node gives the part of its load that is above its share, to nodes that are below theirs. Which of its slots go is decided slot by
slot: each candidate, the node itself among them, gathers a claim of its fraction of the slot's load; the largest claim takes the slot and
is charged for it. So loads come out right to about one slot, however unequal slots are. Slots are gone through by how many of a small
table's buckets can lie in them (buckets lie at strides of powers of two): so a table of 256 buckets is shared out as well as one of a
million, and so is one that is made afterwards.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError
from kvemb.schema.slots import N_SLOTS


def new_owners(owners: NDArray[np.int64], loads: NDArray[np.float64], shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return who is to hold each slot.

    Args:
        owners: int64 [16384], the number of the node that holds each slot.
        loads: float64 [16384] above 0, what each slot weighs, e.g. bytes.
        shares: float64 [n nodes], what part of all each node is to have, in any unit; 0: it is to have no slot.

    Returns:
        int64 [16384].

    Example:
        >>> owners = np.repeat([0, 1], N_SLOTS // 2)
        >>> after = new_owners(owners, np.ones(N_SLOTS), np.array([1.0, 1.0, 1.0]))
        >>> np.bincount(after).tolist(), int((after != owners).sum()), int((after[::64] == 2).sum())
        ([5461, 5461, 5462], 5462, 86)
    """
    if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.sum() > 0):
        raise InvalidInputError(f"shares of nodes are {shares.tolist()}; give numbers of at least 0, and one above")
    held = np.bincount(owners, weights=loads, minlength=len(shares))
    wanted = loads.sum() * shares / shares.sum()
    excess, lack = np.maximum(held - wanted, 0), np.maximum(wanted - held, 0)
    after = owners.copy()
    if excess.sum() <= 0:
        return after
    order = _by_stride()
    for giver in np.flatnonzero(excess).tolist():
        fractions = excess[giver] * lack / lack.sum() / held[giver]
        fractions[giver] = max(0.0, 1 - fractions.sum())
        if not shares[giver]:
            fractions[giver] = 0
        slots = order[owners[order] == giver]
        after[slots] = _deal(loads[slots], fractions)
    return after


def shares_with(held: NDArray[np.float64], joining: int | None = None, leaving: int | None = None) -> NDArray[np.float64]:
    """Return the shares of nodes when one joins, with the mean of the others, or leaves; the others keep their proportions.

    Args:
        held: float64 [n], what each holds now.
        joining: the number of the one that joins.
        leaving: the number of the one that leaves.

    Example:
        >>> shares_with(np.array([2.0, 4.0, 0.0]), joining=2).tolist(), shares_with(np.array([2.0, 4.0, 6.0]), leaving=2).tolist()
        ([2.0, 4.0, 3.0], [2.0, 4.0, 0.0])
    """
    shares = held.astype(np.float64).copy()
    if joining is not None:
        shares[joining] = np.delete(held, joining).mean()
    if leaving is not None:
        shares[leaving] = 0
        if not shares.sum():
            shares[np.arange(len(shares)) != leaving] = 1
    return shares


def weighted(addresses: list[str], weights: Mapping[str, float]) -> NDArray[np.float64]:
    """Return the shares of nodes by weights; who is given none has 1.

    Raises:
        InvalidInputError: a weight is given to nobody who is there.
    """
    if strangers := sorted(set(weights) - set(addresses)):
        raise InvalidInputError(f"weights name {', '.join(strangers)}; the cluster's primaries are {', '.join(addresses)}")
    return np.array([float(weights.get(address, 1.0)) for address in addresses])


def _deal(loads: NDArray[np.float64], fractions: NDArray[np.float64]) -> NDArray[np.int64]:
    """Deal slots out: who gets each. There are thousands of slots, not rows."""
    claims, takers = np.zeros(len(fractions)), np.empty(len(loads), dtype=np.int64)
    nobody = np.where(fractions > 0, 0.0, -np.inf)
    for index, load in enumerate(loads.tolist()):
        claims += fractions * load
        taker = int(np.argmax(claims + nobody))
        claims[taker] -= load
        takers[index] = taker
    return takers


def _by_stride() -> NDArray[np.int64]:
    """The slots by the largest power of two that divides them, largest first: int64 [16384]."""
    slots = np.arange(N_SLOTS)
    strides = np.where(slots == 0, N_SLOTS, slots & -slots)
    order: NDArray[np.int64] = np.lexsort((slots, -strides)).astype(np.int64)
    return order
