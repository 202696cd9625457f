"""Which slots move when owners come, go, or change their weights: as few as possible, and each table's rows as evenly as all rows. Pure.

One dealer, and one kind of plan, for nodes and for shards.

Slots move in aligned groups of neighbours. The rows of a table of few buckets lie in every 64th slot or so: groups of that width have one
such slot each, for any table. Groups are taken from all over the range, so that no table loses more than its share. A shard with too
much only gives, one with too little only takes: no shard can do both in one move (docs/adr/0062).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.slots import N_SLOTS

_WIDEST_GROUP = 64
_GROUPS_PER_OWNER = 16
_EVEN_SHARE = 0.05  # of a slot's cost counts the slot itself, so that empty ones are dealt, too
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, eq=False)
class SlotSizes:
    """Sizes of the slots: number of rows, and bytes of their records, uint64 [16384] each."""

    rows: NDArray[np.uint64]
    record_bytes: NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class SlotPlan:
    """A move of slots as it would be. Nothing is changed until it is begun."""

    kind: str  # "nodes" or "shards", as of a `MovePlan`
    basis: ClusterMap  # the cluster map that it begins with
    # before, after: uint16 [16384], the number of each slot's owner before and after the move
    before: NDArray[np.uint16]
    after: NDArray[np.uint16]
    sizes: SlotSizes  # of the slots
    # join, leave: addresses
    join: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()

    @property
    def moving(self) -> NDArray[np.bool_]:
        """Which slots move: bool [16384]."""
        moving: NDArray[np.bool_] = self.before != self.after
        return moving

    @property
    def n_slots(self) -> int:
        """How many slots move."""
        return int(np.count_nonzero(self.moving))

    @property
    def n_rows(self) -> int:
        """How many rows are in them."""
        return int(self.sizes.rows[self.moving].sum())

    @property
    def n_bytes(self) -> int:
        """How many bytes of records are in them, without a server's overhead."""
        return int(self.sizes.record_bytes[self.moving].sum())

    @property
    def does_nothing(self) -> bool:
        """Whether no slot, owner or address would change."""
        return not (self.n_slots or self.join or self.leave)


def shares_of(
    kind: str, there: Mapping[int, str], joining: Mapping[int, str], leave: Sequence[str], weights: Mapping[str, float] | None
) -> dict[int, float]:
    """Return the share of each owner that is to have slots, by its number: 1 where no weight names it."""
    noun, owners, named = kind.removesuffix("s"), {**there, **joining}, ", ".join(there.values())
    for address in [*leave, *(weights or {})]:
        if address not in owners.values():
            raise InvalidInputError(f"{noun} {address}: is none of the cluster's, which are {named}")
    if len(set(owners.values())) < len(owners):
        raise InvalidInputError(f"{noun} {', '.join(joining.values())}: is one of the cluster's already, which are {named}")
    shares = {number: (weights or {}).get(address, 1.0) for number, address in owners.items() if address not in leave}
    if not any(share > 0 for share in shares.values()):
        raise InvalidInputError(f"no {noun} would be left that has slots; a cluster needs one")
    return shares


def deal(owners: NDArray[np.uint16], sizes: NDArray[np.uint64], weights: Mapping[int, float]) -> NDArray[np.uint16]:
    """Return the future owner of each slot, from the present ones and the bytes in each: uint16 [16384], `sizes` uint64 [16384]."""
    wanted = {owner: weight for owner, weight in weights.items() if weight > 0}
    if not wanted or len(wanted) > N_SLOTS:
        raise InvalidInputError(f"{len(wanted)} owners with a weight above 0; give between 1 and {N_SLOTS}")
    cost = _cost(sizes)
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


def _cost(sizes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return the weight of each slot: float64 [16384], with the sum 1."""
    cost: NDArray[np.float64] = sizes / max(1.0, float(sizes.sum())) * (1 - _EVEN_SHARE) + _EVEN_SHARE / N_SLOTS
    return cost


def _groups(owners: NDArray[np.uint16], n_owners: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Where groups begin and end: aligned, of one owner each, and enough of them for every owner."""
    width = _WIDEST_GROUP
    while width > 1 and N_SLOTS // width < n_owners * _GROUPS_PER_OWNER:
        width //= 2
    begins = np.flatnonzero((np.arange(N_SLOTS) % width == 0) | (np.diff(owners, prepend=owners[0]) != 0))
    return begins, np.append(begins[1:], N_SLOTS)
