"""Storage nodes that come, go and change places while training goes on: what is asked of shard 0.

A move is shard 0's to carry. This process only asks for it and looks on; when it ends, the move goes on. What must not live here: how rows
are moved (`paramserver.moves`), and printing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.client.resizing.slot_moves import MoveState, SlotMoves, SlotSizes, state_of
from kvemb.errors import InvalidInputError
from kvemb.protocol.move_messages import MoveRequest, ReplaceNodeRequest
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.slot_dealing import deal
from kvemb.schema.slots import runs_of


@dataclass(frozen=True, eq=False)
class NodePlan:
    """What a move would do; `NodeMoves.begin` does it.

    Args:
        map: that it was worked out from.
        slot_nodes: uint16 [16384], where each slot is to be.
        join, leave: addresses.
        n_slots, n_rows, n_bytes: that move; bytes of records, without what a server adds.
    """

    map: ClusterMap
    slot_nodes: NDArray[np.uint16]
    join: tuple[str, ...]
    leave: tuple[str, ...]
    n_slots: int
    n_rows: int
    n_bytes: int


class NodeMoves(SlotMoves):
    """The storage nodes of a cluster under a map of ours (memcached, Redis, Valkey). Thread-safe.

    Args: those of `SlotMoves`.
    """

    def add(self, *addresses: str, weights: Mapping[str, float] | None = None) -> NodePlan:
        """Work out a move by which empty nodes join.

        Args:
            addresses: of the new nodes.
            weights: shares by address; 1 of those that it does not name.

        Raises:
            InvalidInputError: a node of that address is there already; or a weight names none.
        """
        return self._plan(join=addresses, weights=weights)

    def remove(self, *addresses: str, weights: Mapping[str, float] | None = None) -> NodePlan:
        """Work out a move by which nodes leave: they have no slots when it is done, and may be switched off."""
        return self._plan(leave=addresses, weights=weights)

    def rebalance(self, weights: Mapping[str, float] | None = None) -> NodePlan:
        """Work out a move that gives every node its share, by the bytes of the rows there are."""
        return self._plan(weights=weights)

    def exchange(self, old: str, new: str) -> NodePlan:
        """Work out a move that brings all that is on one node to a new one, and lets the old one leave."""
        state, sizes = self.state(), self.sizes()
        number, joining = _number_of(state, old), state.map.n_nodes
        owners = np.where(state.map.slot_nodes == number, joining, state.map.slot_nodes).astype(np.uint16)
        return _planned(state.map, owners, sizes, (new,), (old,))

    def begin(self, plan: NodePlan, *, max_mb_per_s: float = 0.0) -> MoveState:
        """Begin a move; it goes on without this process.

        Args:
            plan: as worked out.
            max_mb_per_s: bound of what all shards copy together, in 10^6 bytes of records a second; 0 for none.

        Raises:
            MoveRefusedError: another is under way.
            MapChangedError: the map has changed since it was worked out.
            StorageError: a new node cannot be used; nothing was changed.
        """
        request = MoveRequest(plan.map.version, runs_of(plan.slot_nodes), list(plan.join), list(plan.leave), math.ceil(max_mb_per_s * 1e6))
        return state_of(self._ask("MoveSlots", request))

    def replace_dead(self, old: str, new: str) -> MoveState:
        """Let a node that is gone for good be at another, empty address; the shards bring its rows back there."""
        return state_of(self._ask("ReplaceNode", ReplaceNodeRequest(self.state().map.version, old, new)))

    def _plan(self, *, join: Sequence[str] = (), leave: Sequence[str] = (), weights: Mapping[str, float] | None = None) -> NodePlan:
        state, sizes = self.state(), self.sizes()
        nodes = {**state.nodes, **{state.map.n_nodes + at: address for at, address in enumerate(join)}}
        for address in [*leave, *(weights or {})]:
            if address not in nodes.values():
                raise InvalidInputError(f"node {address}: is none of the cluster's, which are {', '.join(state.nodes.values())}")
        if len(set(nodes.values())) < len(nodes):
            raise InvalidInputError(f"node {', '.join(join)}: is one of the cluster's already, which are {', '.join(state.nodes.values())}")
        shares = {number: (weights or {}).get(address, 1.0) for number, address in nodes.items() if address not in leave}
        if not any(share > 0 for share in shares.values()):
            raise InvalidInputError("no node would be left that has slots; a cluster needs one")
        return _planned(state.map, deal(state.map.slot_nodes, sizes.record_bytes, shares), sizes, tuple(join), tuple(leave))


def _planned(
    cluster_map: ClusterMap, owners: NDArray[np.uint16], sizes: SlotSizes, join: tuple[str, ...], leave: tuple[str, ...]
) -> NodePlan:
    moving = owners != cluster_map.slot_nodes
    n_bytes, n_rows = int(sizes.record_bytes[moving].sum()), int(sizes.rows[moving].sum())
    return NodePlan(cluster_map, owners, join, leave, int(np.count_nonzero(moving)), n_rows, n_bytes)


def _number_of(state: MoveState, address: str) -> int:
    if address not in state.nodes.values():
        raise InvalidInputError(f"node {address}: is none of the cluster's, which are {', '.join(state.nodes.values())}")
    return state.places.index(address)
