"""A move of slots between nodes, or between shards, as whoever asked for it sees it: how far it is, taking it back, waiting for its end.

Shard 0 carries it. What must not live here: what is asked for (`kvemb.client.resizing.node_moves`,
`kvemb.client.resizing.shard_scaling`), and printing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.client.all_shards import AllShards
from kvemb.coordination.map_copies import decode_map
from kvemb.coordination.move_report import newest_report
from kvemb.errors import MoveRefusedError, ShardUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import Message
from kvemb.protocol.messages import Empty
from kvemb.protocol.move_messages import AbortMoveRequest, MoveStatusReply, SlotSizesReply
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.move_plan import ABORTING

_LOOK_S = 0.1


@dataclass(frozen=True, eq=False)
class MoveState:
    """How far the move under way is.

    Args:
        map: the cluster map in force; its `plan` is None while nothing moves.
        places: address of every node number, "" of those that are gone.
        rows, n_rows: gone through in this phase, and in all, as far as the shards have said.
        troubles: why shards do not come further; while nothing moves, why the last move was taken back.
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


Progress = Callable[[MoveState], None]


class SlotMoves:
    """The move under way, and what lies in slots. Thread-safe.

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
        return state_of(self._ask("MoveStatus", Empty()))

    def sizes(self) -> SlotSizes:
        """Return what lies in each slot, by all shards' indexes."""
        deadline = Deadline.after(self._timeout_s)
        self._servers.ask_map(deadline)
        replies = self._servers.call_each("SlotSizes", Empty(), SlotSizesReply, deadline).values()
        rows = np.stack([np.frombuffer(reply.rows, "<u8") for reply in replies]).sum(axis=0, dtype=np.uint64)
        record_bytes = np.stack([np.frombuffer(reply.record_bytes, "<u8") for reply in replies]).sum(axis=0, dtype=np.uint64)
        return SlotSizes(rows, record_bytes)

    def abort(self, why: str = "") -> MoveState:
        """Take the move under way back; raises MoveRefusedError where there is none, or it is past that."""
        return state_of(self._ask("AbortMove", AbortMoveRequest(why)))

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
                    reason = why or "; ".join(state.troubles) or "shard 0 was started anew since; the log of the one before says why"
                    raise MoveRefusedError(f"the move was taken back, and everything is as before: {reason}")
                return state
            unflipped = 0 if state.map.plan.flipped else state.map.serial
            why = state.map.plan.why if state.phase == ABORTING else ""
            if deadline is not None and deadline.expired:
                raise ShardUnavailableError(f"the move is not done after {timeout_s:g} s (phase {state.phase}); it goes on")
            time.sleep(_LOOK_S)

    def _ask(self, method: str, request: Message) -> MoveStatusReply:
        return self._servers.call(0, method, request, MoveStatusReply, Deadline.after(self._timeout_s))


def state_of(reply: MoveStatusReply) -> MoveState:
    """What shard 0 has answered."""
    cluster_map = decode_map(reply.cluster_map)
    reports = [newest_report([report or None]) for report in reply.reports]
    plan = cluster_map.plan
    troubles = tuple(f"shard {shard}: {one.trouble}" if plan else one.trouble for shard, one in enumerate(reports) if one and one.trouble)
    silent = tuple(shard for shard in cluster_map.shard_numbers if reports[shard] is None) if plan is not None else ()
    said = [one for one in reports if one is not None]
    rows, n_rows = sum(one.rows for one in said), sum(one.n_rows for one in said)
    return MoveState(cluster_map, tuple(reply.places), rows, n_rows, troubles, silent)
