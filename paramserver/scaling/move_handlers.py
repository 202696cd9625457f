"""The shard's end of moves: messages in, messages out. The work is in `paramserver.scaling`."""

import threading
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.shard_notes import MoveReport
from kvemb.errors import InvalidInputError, MoveRefusedError
from kvemb.net.deadline import Deadline
from kvemb.protocol import messages
from kvemb.protocol.messages import Empty, HelloReply, LeftSessionRequest, LeftSessionsRequest, MoveStatusReply, WatermarksReply
from kvemb.protocol.verb import Handled
from kvemb.scaling import move_messages
from kvemb.scaling.move_messages import (
    AbortMoveRequest,
    MoveRequest,
    ReplaceNodeRequest,
    SlotEntriesReply,
    SlotEntriesRequest,
    SlotSizesReply,
    WatermarksRequest,
)
from kvemb.schema.move_plan import NODES, SHARDS
from kvemb.schema.slots import N_SLOTS, from_runs

from ..ingest.sessions import pack_sessions
from ..recovery.shard_parts import ShardParts
from .move_carrier import MoveCarrier
from .move_planner import WantedMove
from .slot_giver import SlotOffers


class MoveHandlers:
    """The verbs by which operators move slots, and shards hand them over. Thread-safe."""

    def __init__(self, parts: ShardParts, carrier: MoveCarrier | None, offers: SlotOffers, look: threading.Event) -> None:
        self._parts, self._store, self._carrier, self._offers, self._look = parts, parts.store, carrier, offers, look

    def begin(self, request: MoveRequest, deadline: Deadline) -> MoveStatusReply:
        carrier, now = self._on_shard_0(), self._store.nodes.cluster_map
        nodes = _owners("slot_nodes", request.slot_nodes, now.n_nodes + len(request.join))
        shards = _owners("slot_shards", request.slot_shards, now.n_shards + len(request.join_shards))
        if nodes is not None and shards is None:
            leave = tuple(self._number_of(address) for address in request.leave)
            wanted = WantedMove(request.version, NODES, nodes, tuple(request.join), leave, max(0, request.max_bytes_per_s))
        elif shards is not None and nodes is None:
            wanted = WantedMove(request.version, SHARDS, shards, tuple(request.join_shards), tuple(request.leave_shards), 0)
        else:
            raise InvalidInputError("slots move between nodes or between shards, one at a time: give slot_nodes or slot_shards")
        carrier.begin(wanted, deadline)
        return self.status(Empty(), deadline)

    def replace_node(self, request: ReplaceNodeRequest, deadline: Deadline) -> MoveStatusReply:
        """Let a dead node be at another address."""
        self._on_shard_0().replace_address(self._number_of(request.old), request.new, request.version, deadline)
        return self.status(Empty(), deadline)

    def abort(self, request: AbortMoveRequest, deadline: Deadline) -> MoveStatusReply:
        self._on_shard_0().abort(request.why or "an operator asked for it")
        return self.status(Empty(), deadline)

    def status(self, request: Empty, deadline: Deadline) -> MoveStatusReply:
        cluster_map = self._store.nodes.cluster_map
        heard = self._on_shard_0().heard(cluster_map)
        told = [b"" if one is None else one.encode() for one in heard]
        if cluster_map.plan is None and (why := self._on_shard_0().taken_back):
            told[0] = MoveReport(0, cluster_map.version, True, trouble=why).encode()
        return MoveStatusReply(cluster_map.encode(), told, list(self._store.nodes.places))

    def news(self, request: Empty, deadline: Deadline) -> Empty:
        """Look at once: another shard has changed the map, or its report."""
        self._look.set()
        return Empty()

    def slot_sizes(self, request: Empty, deadline: Deadline) -> SlotSizesReply:
        """Say how many rows lie in each slot, and how large they are."""
        rows, size = np.zeros(N_SLOTS, np.uint64), np.zeros(N_SLOTS, np.uint64)
        for state in self._parts.tables.all():
            counts = np.zeros(N_SLOTS, np.uint64)
            for ids, _ in state.portions():
                counts += np.bincount(state.definition.placement.slots(ids), minlength=N_SLOTS).astype(np.uint64)
            rows += counts
            size += counts * np.uint64(state.definition.record.size_bytes)
        return SlotSizesReply(rows.astype("<u8").tobytes(), size.astype("<u8").tobytes())

    def slot_entries(self, request: SlotEntriesRequest, deadline: Deadline) -> SlotEntriesReply:
        """Give another shard the index entries of rows that are handed over to it."""
        return self._offers.page(request)

    def watermarks(self, request: WatermarksRequest, deadline: Deadline) -> WatermarksReply:
        """Tell shard 0 the last part of each trainer that this shard, which leaves, has taken."""
        if not self._offers.is_final(request.version):
            return WatermarksReply(False, b"")
        sessions, _, _ = self._parts.ingest.attendance.to_save()
        return WatermarksReply(True, pack_sessions(sessions))

    def left_sessions(self, request: LeftSessionsRequest, deadline: Deadline) -> WatermarksReply:
        """Tell the next owner of a shard's number the last part of each trainer that the one which has left had taken."""
        return WatermarksReply(True, self._on_shard_0().left.all_of(request.shard))

    def left_session(self, request: LeftSessionRequest, deadline: Deadline) -> HelloReply:
        """Tell a trainer its last part that a shard which has left had taken."""
        last = self._on_shard_0().left.find(request.shard, request.trainer, request.incarnation)
        return HelloReply(request.incarnation, last, self._parts.config.servers.mode)

    verbs: ClassVar[Handled] = {
        move_messages.MOVE_SLOTS: begin,
        move_messages.REPLACE_NODE: replace_node,
        move_messages.ABORT_MOVE: abort,
        messages.MOVE_STATUS: status,
        move_messages.MOVE_NEWS: news,
        move_messages.SLOT_SIZES: slot_sizes,
        move_messages.SLOT_ENTRIES: slot_entries,
        move_messages.WATERMARKS: watermarks,
        messages.LEFT_SESSIONS: left_sessions,
        messages.LEFT_SESSION: left_session,
    }

    def _on_shard_0(self) -> MoveCarrier:
        if self._carrier is None:
            raise MoveRefusedError(f"shard {self._parts.shard} carries no moves; ask shard 0. Nothing was changed.")
        return self._carrier

    def _number_of(self, address: str) -> int:
        places = self._store.nodes.places
        if not address or address not in places:
            raise InvalidInputError(f"node {address}: is none of the cluster's, which are {', '.join(filter(None, places))}")
        return places.index(address)


def _owners(what: str, runs: bytes, n_owners: int) -> NDArray[np.uint16] | None:
    """The owner of each slot; None where the request names none."""
    if not runs:
        return None
    try:
        return from_runs(runs, max(1, n_owners))
    except ValueError as error:
        raise InvalidInputError(f"{what}: {error}") from error
