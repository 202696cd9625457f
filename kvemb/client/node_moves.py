"""Storage nodes that come, go and change places while training goes on: what is asked of shard 0, and how far it is.

A move is shard 0's to carry. This process only asks for it and looks on; when it ends, the move goes on. What must not live here: how rows
are moved (`paramserver.moves`), and printing.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.client.all_shards import AllShards
from kvemb.coordination.map_copies import decode_map
from kvemb.coordination.move_report import newest_report
from kvemb.errors import InvalidInputError, MoveRefusedError, ShardUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import Message
from kvemb.protocol.messages import AbortMoveRequest, Empty, MoveRequest, MoveStatusReply, ReplaceNodeRequest, SlotSizesReply
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.move_plan import ABORTING
from kvemb.schema.slot_dealing import deal
from kvemb.schema.slots import runs_of

_LOOK_S = 0.1


@dataclass(frozen=True, eq=False)
class MoveState:
    """How far the move under way is.

    Args:
        map: the cluster map in force; its `plan` is None while nothing moves.
        places: address of every node number, "" of those that are gone.
        rows, n_rows: gone through in this phase, and in all, as far as the shards have said.
        troubles: why shards do not come further.
        silent: shards that have said nothing of this phase.
    """

    map: ClusterMap
    places: tuple[str, ...]
    rows: int = 0
    n_rows: int = 0
    troubles: tuple[str, ...] = ()
    silent: tuple[int, ...] = ()

    @property
    def phase(self) -> str:
        """Of the plan; "" while there is none."""
        return "" if self.map.plan is None else self.map.plan.phase

    @property
    def nodes(self) -> dict[int, str]:
        """Address by number of the nodes that there are."""
        return {number: address for number, address in enumerate(self.places) if address}


@dataclass(frozen=True, eq=False)
class SlotSizes:
    """What lies in each slot: uint64 [16384] rows, and bytes of their records."""

    rows: NDArray[np.uint64]
    record_bytes: NDArray[np.uint64]


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


Progress = Callable[[MoveState], None]


class NodeMoves:
    """The storage nodes of a cluster under a map of ours (memcached, Redis, Valkey). Thread-safe.

    Args:
        servers: the shards.
        timeout_s: of one question.
    """

    def __init__(self, servers: AllShards, timeout_s: float = 30.0) -> None:
        self._servers, self._timeout_s = servers, timeout_s

    def state(self) -> MoveState:
        """Return the nodes and how far a move is.

        Raises:
            ShardUnavailableError: shard 0 does not answer.
        """
        return _state(self._ask("MoveStatus", Empty()))

    def sizes(self) -> SlotSizes:
        """Return what lies in each slot, by all shards' indexes."""
        deadline = Deadline.after(self._timeout_s)
        self._servers.ask_map(deadline)
        replies = self._servers.call_each("SlotSizes", Empty(), SlotSizesReply, deadline).values()
        rows = np.stack([np.frombuffer(reply.rows, "<u8") for reply in replies]).sum(axis=0, dtype=np.uint64)
        record_bytes = np.stack([np.frombuffer(reply.record_bytes, "<u8") for reply in replies]).sum(axis=0, dtype=np.uint64)
        return SlotSizes(rows, record_bytes)

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
        request = MoveRequest(plan.map.version, runs_of(plan.slot_nodes), list(plan.join), list(plan.leave), int(max_mb_per_s * 1e6))
        return _state(self._ask("MoveSlots", request))

    def replace_dead(self, old: str, new: str) -> MoveState:
        """Let a node that is gone for good be at another, empty address; the shards bring its rows back there."""
        return _state(self._ask("ReplaceNode", ReplaceNodeRequest(self.state().map.version, old, new)))

    def abort(self, why: str = "") -> MoveState:
        """Take the move under way back; raises MoveRefusedError where there is none, or it is past that."""
        return _state(self._ask("AbortMove", AbortMoveRequest(why)))

    def wait(self, *, timeout_s: float | None = None, progress: Progress = lambda state: None) -> MoveState:
        """Look on until nothing moves any more; what became of it says `MoveState.map`.

        Args:
            timeout_s: how long at most; None: as long as it takes.
            progress: told at each look.

        Raises:
            ShardUnavailableError: shard 0 does not answer for long; the move goes on when it is back.
            MoveRefusedError: the move was taken back; says why.
        """
        deadline = None if timeout_s is None else Deadline.after(timeout_s)
        why, heard_s = "", time.monotonic()
        while True:
            try:
                state = self.state()
                heard_s = time.monotonic()
            except ShardUnavailableError:
                if time.monotonic() - heard_s > self._timeout_s or (deadline is not None and deadline.expired):
                    raise
                time.sleep(_LOOK_S)
                continue
            progress(state)
            if state.map.plan is None:
                if why:
                    raise MoveRefusedError(f"the move was taken back, and everything is as before: {why}")
                return state
            why = state.map.plan.why if state.phase == ABORTING else ""
            if deadline is not None and deadline.expired:
                raise ShardUnavailableError(f"the move is not done after {timeout_s:g} s (phase {state.phase}); it goes on")
            time.sleep(_LOOK_S)

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

    def _ask(self, method: str, request: Message) -> MoveStatusReply:
        return self._servers.call(0, method, request, MoveStatusReply, Deadline.after(self._timeout_s))


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


def _state(reply: MoveStatusReply) -> MoveState:
    cluster_map = decode_map(reply.cluster_map)
    reports = [newest_report([report or None]) for report in reply.reports]
    troubles = tuple(f"shard {shard}: {one.trouble}" for shard, one in enumerate(reports) if one is not None and one.trouble)
    silent = tuple(shard for shard, one in enumerate(reports) if one is None) if cluster_map.plan is not None else ()
    said = [one for one in reports if one is not None]
    rows, n_rows = sum(one.rows for one in said), sum(one.n_rows for one in said)
    return MoveState(cluster_map, tuple(reply.places), rows, n_rows, troubles, silent)
