"""Which slots move when owners come, go, or change their weights: as little as possible, and each table's rows as evenly as all rows. Pure.

Slots move in aligned groups of neighbours. The rows of a table of few buckets lie in every 64th slot or so: groups of that width have one
such slot each, whatever the table. Groups are taken from all over the range, so that no table loses more than its share. Who has too much
only gives, who lacks some only takes: no shard can do both in one move (docs/adr/0062).
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError
from kvemb.schema.slots import N_SLOTS

_WIDEST_GROUP = 64
_GROUPS_PER_OWNER = 16
_EVEN_SHARE = 0.05  # of a slot's cost counts the slot itself, so that empty ones are dealt, too
_GOLDEN = 0.6180339887498949


def deal(owners: NDArray[np.uint16], sizes: NDArray[np.uint64], weights: Mapping[int, float]) -> NDArray[np.uint16]:
    """Return who is to own each slot: uint16 [16384].

    Args:
        owners: uint16 [16384], who does now.
        sizes: uint64 [16384], bytes in each slot.
        weights: of every owner that is to have slots, its share; others end with none.

    Raises:
        InvalidInputError: no weight is above 0, or there are more owners than slots.

    Example:
        >>> before = np.repeat(np.array([0, 1], np.uint16), N_SLOTS // 2)
        >>> np.bincount(deal(before, np.ones(N_SLOTS, np.uint64), {0: 1.0, 1: 1.0, 2: 2.0})).tolist()
        [4096, 4096, 8192]
    """
    wanted = {owner: weight for owner, weight in weights.items() if weight > 0}
    if not wanted or len(wanted) > N_SLOTS:
        raise InvalidInputError(f"{len(wanted)} owners with a weight above 0; give between 1 and {N_SLOTS}")
    cost = sizes / max(1.0, float(sizes.sum())) * (1 - _EVEN_SHARE) + _EVEN_SHARE / N_SLOTS
    total = sum(wanted.values())
    target = {owner: float(cost.sum()) * weight / total for owner, weight in wanted.items()}
    begins, ends = _groups(owners, len(wanted))
    group_cost = np.add.reduceat(cost, begins)
    group_owner = owners[begins].astype(np.int64)
    load = {owner: float(group_cost[group_owner == owner].sum()) for owner in {*np.unique(group_owner).tolist(), *target}}
    out, taking = owners.copy(), [owner for owner in target if target[owner] > load[owner]]
    for group in np.argsort(np.arange(len(begins)) * _GOLDEN % 1.0, kind="stable").tolist():
        owner, size = int(group_owner[group]), float(group_cost[group])
        if owner in taking or not taking:
            continue
        surplus = load[owner] - target.get(owner, 0.0)
        taker = max(taking, key=lambda one: target[one] - load[one])
        lack = target[taker] - load[taker]
        if owner in target and min(surplus, lack) < size / 2:
            continue
        out[begins[group] : ends[group]] = taker
        load[owner] -= size
        load[taker] += size
    return out


def _groups(owners: NDArray[np.uint16], n_owners: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where groups begin and end: aligned, of one owner each, and enough of them for every owner."""
    width = _WIDEST_GROUP
    while width > 1 and N_SLOTS // width < n_owners * _GROUPS_PER_OWNER:
        width //= 2
    begins = np.flatnonzero((np.arange(N_SLOTS) % width == 0) | (np.diff(owners, prepend=owners[0]) != 0))
    return begins, np.append(begins[1:], N_SLOTS)
