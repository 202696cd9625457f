"""Slots that move between nodes, or between shards, while training goes on: the requests to shard 0, and their progress.

A move is shard 0's to carry. This process only asks for it and looks on; when it ends, the move goes on. Nodes come, go and change places;
or shards do, and rows stay where they are.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvemb.client.all_shards import AllShards
from kvemb.client.shard_channel import ShardChannel
from kvemb.coordination.map_copies import decode_map
from kvemb.coordination.shard_notes import newest_report
from kvemb.errors import InvalidInputError, MoveRefusedError, ShardUnavailableError, n_of
from kvemb.net.deadline import Deadline
from kvemb.net.tls_files import TlsFiles
from kvemb.protocol.messages import DESCRIBE, MOVE_STATUS, DescribeReply, Empty, MoveStatusReply
from kvemb.protocol.verb import Q, Verb
from kvemb.scaling.move_messages import ABORT_MOVE, MOVE_SLOTS, REPLACE_NODE, SLOT_SIZES, AbortMoveRequest, MoveRequest, ReplaceNodeRequest
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.move_plan import ABORTING, NODES, SHARDS
from kvemb.schema.slot_dealing import SlotPlan, SlotSizes, deal, shares_of
from kvemb.schema.slots import runs_of

_ANSWER_S = 5.0  # of a shard that runs already
INDEX_BYTES = 16  # of a row, which the shard that takes it is told
_LOOK_S = 0.1


@dataclass(frozen=True, eq=False)
class MoveState:
    """How far the move under way is.

    Args:
        map: the cluster map in force; its `plan` is None while nothing moves.
        places: address of every node number, "" of those that are gone.
        rows, n_rows: gone through in this phase, and in all, as far as the shards have reported.
        troubles: why shards do not go on; while nothing moves, why the last move was taken back.
        silent: shards without a report of this phase.
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

    def __str__(self) -> str:
        """The move under way in words."""
        plan = self.map.plan
        if plan is None:
            last = "".join(f"\nthe last move was taken back: {why}" for why in self.troubles)
            return f"nothing moves; the cluster map is of version {self.map.version}{last}"
        owners = self.map.slot_nodes if plan.kind == NODES else self.map.slot_shards
        n_slots = int(np.count_nonzero(owners != plan.slot_owners))
        rows = f", {self.rows:,} of {self.n_rows:,} rows gone through" if self.n_rows else ""
        lines = [f"{n_of(n_slots, 'slot')} move between {plan.kind}: {plan.phase}{rows}"]
        lines += [f"taken back because: {plan.why}"] if plan.why else []
        if self.silent:
            lines.append(f"waits for shard {', '.join(map(str, self.silent))}: start it if it is down; the move goes on by itself")
        return "\n".join([*lines, *self.troubles])


Progress = Callable[[MoveState], None]


class SlotMoves:
    """The move under way, and the rows in slots. Thread-safe."""

    def __init__(self, servers: AllShards, timeout_s: float = 30.0) -> None:
        self._servers, self._timeout_s = servers, timeout_s

    def state(self) -> MoveState:
        """Return the nodes and how far a move is."""
        return state_of(self._ask(MOVE_STATUS, Empty()))

    def sizes(self) -> SlotSizes:
        """Return the rows and bytes in each slot, by all shards' indexes."""
        deadline = Deadline.after(self._timeout_s)
        self._servers.ask_map(deadline)
        replies = self._servers.call_each(SLOT_SIZES, Empty(), deadline).values()
        rows = np.stack([np.frombuffer(reply.rows, "<u8") for reply in replies]).sum(axis=0, dtype=np.uint64)
        record_bytes = np.stack([np.frombuffer(reply.record_bytes, "<u8") for reply in replies]).sum(axis=0, dtype=np.uint64)
        return SlotSizes(rows, record_bytes)

    def abort(self, why: str = "") -> MoveState:
        """Take the move under way back; raises MoveRefusedError where there is none, or it is past that."""
        return self._change(ABORT_MOVE, AbortMoveRequest(why))

    def wait(self, *, timeout_s: float | None = None, progress: Progress = lambda state: None) -> MoveState:
        """Look on until nothing moves any more; `MoveState.map` tells the result."""
        deadline = None if timeout_s is None else Deadline.after(timeout_s)
        why, heard_s, unflipped = "", time.monotonic(), 0
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
                if why or state.map.serial == unflipped:
                    reason = why or "; ".join(state.troubles) or "shard 0 was restarted since; the log of the process before says why"
                    raise MoveRefusedError(
                        f"the move was taken back, and everything is as before: {reason}. Mend that, empty a node that was to join, "
                        "and ask again."
                    )
                return state
            unflipped = 0 if state.map.plan.flipped else state.map.serial
            why = state.map.plan.why if state.phase == ABORTING else ""
            if deadline is not None and deadline.expired:
                raise ShardUnavailableError(f"the move is not done after {timeout_s:g} s (phase {state.phase}); it goes on")
            time.sleep(_LOOK_S)

    def _change(self, verb: Verb[Q, MoveStatusReply], request: Q) -> MoveState:
        """Ask shard 0 to begin something, or to take it back."""
        try:
            return state_of(self._ask(verb, request))
        except ShardUnavailableError as error:
            raise ShardUnavailableError(
                f"{error} Whether it has begun that is not known: once it answers, `kvemb moves` and `kvemb nodes` show it. What has begun "
                "goes on by itself; else ask again."
            ) from error

    def _ask(self, verb: Verb[Q, MoveStatusReply], request: Q) -> MoveStatusReply:
        return self._servers.call(0, verb, request, Deadline.after(self._timeout_s))


class NodeMoves(SlotMoves):
    """The storage nodes of a cluster under a map of ours (memcached, Redis, Valkey). Thread-safe.

    Args: those of `SlotMoves`.
    """

    def add(self, *addresses: str, weights: Mapping[str, float] | None = None) -> SlotPlan:
        """Work out a move by which empty nodes join.

        Args:
            addresses: of the new nodes.
            weights: shares by address; 1 of those that it does not name.

        Raises:
            InvalidInputError: a node of that address is there already; or a weight names none.
        """
        return self._plan(join=addresses, weights=weights)

    def remove(self, *addresses: str, weights: Mapping[str, float] | None = None) -> SlotPlan:
        """Work out a move by which nodes leave: they have no slots when it is done, and may be switched off."""
        return self._plan(leave=addresses, weights=weights)

    def rebalance(self, weights: Mapping[str, float] | None = None) -> SlotPlan:
        """Work out a move that gives every node its share, by the bytes of the rows there are."""
        return self._plan(weights=weights)

    def exchange(self, old: str, new: str) -> SlotPlan:
        """Work out a move that brings all that is on one node to a new one, and lets the old one leave."""
        state, sizes = self.state(), self.sizes()
        if old not in state.nodes.values():
            raise InvalidInputError(f"node {old}: is none of the cluster's, which are {', '.join(state.nodes.values())}")
        now = state.map.slot_nodes
        owners = np.where(now == state.places.index(old), state.map.n_nodes, now).astype(np.uint16)
        return SlotPlan(NODES, state.map, now, owners, sizes, (new,), (old,))

    def begin(self, plan: SlotPlan, *, max_mb_per_s: float = 0.0) -> MoveState:
        """Begin a move; it goes on without this process.

        Args:
            plan: as worked out.
            max_mb_per_s: bound of the rate at which all shards copy together, in 10^6 bytes of records a second; 0 for none.

        Raises:
            MoveRefusedError: another is under way.
            MapChangedError: the map has changed since it was worked out.
            StorageError: a new node cannot be used; nothing was changed.
        """
        runs, max_bytes = runs_of(plan.after), math.ceil(max_mb_per_s * 1e6)
        return self._change(MOVE_SLOTS, MoveRequest(plan.basis.version, runs, list(plan.join), list(plan.leave), max_bytes))

    def replace_dead(self, old: str, new: str) -> MoveState:
        """Let a node that is gone for good be at another, empty address; the shards bring its rows back there."""
        return self._change(REPLACE_NODE, ReplaceNodeRequest(self.state().map.version, old, new))

    def _plan(self, *, join: Sequence[str] = (), leave: Sequence[str] = (), weights: Mapping[str, float] | None = None) -> SlotPlan:
        state, sizes = self.state(), self.sizes()
        now, joining = state.map, {state.map.n_nodes + at: address for at, address in enumerate(join)}
        owners = deal(now.slot_nodes, sizes.record_bytes, shares_of(NODES, state.nodes, joining, leave, weights))
        return SlotPlan(NODES, now, now.slot_nodes, owners, sizes, tuple(join), tuple(leave))


class ShardScaling(SlotMoves):
    """The shards of a cluster, and which of them writes which slots. Thread-safe.

    A shard that is to join runs already: `kvemb shard --shard N --listen ADDR` with the lowest number that the map does not have.

    Args: those of `SlotMoves`.
    """

    def addresses(self) -> dict[int, str]:
        """Address by number of the shards that there are."""
        self._servers.ask_map(Deadline.after(self._timeout_s))
        return {shard: channel.address for shard, channel in self._servers.channels.items()}

    def add(self, *addresses: str, weights: Mapping[str, float] | None = None) -> SlotPlan:
        """Work out a move by which shards join.

        Args:
            addresses: where they are, in the order of their numbers.
            weights: shares by address; 1 of those that it does not name.

        Raises:
            InvalidInputError: a shard of that address is there already, or does not have the next number; or a weight names none.
            ShardUnavailableError: it does not answer.
        """
        return self._plan(join=addresses, weights=weights)

    def remove(self, *addresses: str, weights: Mapping[str, float] | None = None) -> SlotPlan:
        """Work out a move by which shards leave: they have no rows when it is done, and may be stopped. Shard 0 stays."""
        return self._plan(leave=addresses, weights=weights)

    def rebalance(self, weights: Mapping[str, float] | None = None) -> SlotPlan:
        """Work out a move that gives every shard its share, by the bytes of the rows there are."""
        return self._plan(weights=weights)

    def begin(self, plan: SlotPlan) -> MoveState:
        """Begin a move; it goes on without this process.

        Raises:
            MoveRefusedError: another is under way.
            MapChangedError: the map has changed since it was worked out.
        """
        leaving = [number for number, address in self.addresses().items() if address in plan.leave]
        request = MoveRequest(plan.basis.version, b"", [], [], 0, runs_of(plan.after), list(plan.join), leaving)
        return self._change(MOVE_SLOTS, request)

    def _plan(self, *, join: Sequence[str] = (), leave: Sequence[str] = (), weights: Mapping[str, float] | None = None) -> SlotPlan:
        there, now, sizes = self.addresses(), self.state().map, self.sizes()
        joining = dict(zip(now.free_shards(len(join)), join, strict=True))
        shares = shares_of(SHARDS, there, joining, leave, weights)
        if there[0] in leave:
            raise InvalidInputError(
                f"shard {there[0]}: is shard 0, which carries moves and stays; nothing was changed. Remove another one."
            )
        ours = self._servers.call(0, DESCRIBE, Empty(), Deadline.after(self._timeout_s))
        for number, address in joining.items():
            self._require_next(address, number, ours)
        owners = deal(now.slot_shards, sizes.record_bytes, shares)
        return SlotPlan(SHARDS, now, now.slot_shards, owners, sizes, tuple(join), tuple(leave))

    def _require_next(self, address: str, number: int, ours: DescribeReply) -> None:
        """Refuse a server that is no shard of this cluster with the number that it is to have."""
        deadline, tls = Deadline.after(min(self._timeout_s, _ANSWER_S)), self._servers.tls
        channel = ShardChannel(number, address, None, None if tls is None else TlsFiles(tls, "parameter_servers.tls"))
        try:
            theirs = channel.call(DESCRIBE, Empty(), deadline)
        except ShardUnavailableError as error:
            raise ShardUnavailableError(
                f"{error} Nothing was changed. Start the shard there, and ask again: kvemb shard --config kvemb.yaml --shard {number} "
                f"--listen {address}"
            ) from error
        finally:
            channel.close()
        got, expected = ((one.shard, one.cluster, one.cluster_id.hex(), one.mode) for one in (theirs, ours))
        if got != (number, *expected[1:]):
            raise InvalidInputError(
                f"shard {address}: answers as (shard, cluster, cluster id, mode) {got}, expected {(number, *expected[1:])}. Start it with "
                f"--shard {number} and the kvemb.yaml of this cluster; nothing was changed."
            )


def state_of(reply: MoveStatusReply) -> MoveState:
    """The state that an answer of shard 0 tells."""
    cluster_map = decode_map(reply.cluster_map)
    reports = [newest_report([report or None]) for report in reply.reports]
    plan = cluster_map.plan
    troubles = tuple(f"shard {shard}: {one.trouble}" if plan else one.trouble for shard, one in enumerate(reports) if one and one.trouble)
    silent = tuple(shard for shard in cluster_map.shard_numbers if reports[shard] is None) if plan is not None else ()
    said = [one for one in reports if one is not None]
    rows, n_rows = sum(one.rows for one in said), sum(one.n_rows for one in said)
    return MoveState(cluster_map, tuple(reply.places), rows, n_rows, troubles, silent)
