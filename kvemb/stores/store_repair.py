"""How the shards bring back the rows of a node that has lost them, or may hold old ones.

All state of a repair stands on the damaged node, so that losing its data once more takes the repair with it:

    1. the first shard to notice writes `repairing <nonce>` in the place of the node's markers; every other shard reads the nonce
    2. every shard rewrites its rows there, then reports the nonce
    3. a shard that sees all reports puts new markers in the place of `repairing <nonce>`, if that still stands there

A node has one marker, or one per slot that it holds. A repair is of all that it holds when the first shard begins; of what comes to it
later only what comes lost. Until step 3 every batch that touches these places fails, except those below. They name the nonce and check it
last on the connection, as normal batches check the marker. A server process that starts again in the middle of it ends the repair: a nonce
is good for one process. How markers and small values are reached, each kind of storage knows.
"""

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.map_copies import MAP_NAME, put_newer
from kvemb.coordination.markers import Marker, diagnose
from kvemb.coordination.replicated_values import MAX_TRIES, Change
from kvemb.coordination.shard_owners import OwnerFence
from kvemb.errors import DeadlineExceededError, InvalidInputError, NodeLostError, NodeSuspectError, NodeUnavailableError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import RowKeys
from kvemb.stores.marked_nodes import LostNode, MarkedNodes, MarkedState, RepairLane, RowBatches
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult

_AWAY_S = 1.0  # for a node that gave the last look no answer; twice as long each time: a repair of another one looks again and again


class StoreRepair:
    """A store for shards that repair a node: its facet `repair`.

    Methods with a nonce raise NodeLostError when it does not stand on the node any more. Then the node has lost its data again, or the
    repair has been finished. Call `begin` then, which says which of the two it was. All of them may be called again after any
    error. One class of many methods: each step of a repair needs its nodes and nonces.

    Args:
        nodes: those that are repaired.
        batches: of rows.
        fence: the owner that the store writes as.
        cluster_map: returns the one that is followed.
    """

    def __init__(self, nodes: MarkedNodes, batches: RowBatches, fence: OwnerFence, cluster_map: Callable[[], ClusterMap]) -> None:
        self._nodes, self._batches, self._fence, self._cluster_map = nodes, batches, fence, cluster_map
        self._lanes: dict[str, RepairLane] = {}  # per address the repair that this store takes part in
        self._away: dict[str, float] = {}  # per address that gave the last look no answer the seconds that it gets beside a lost one

    # --- the state of a node ----------------------------------------------------------------------------------------------------

    def lost_nodes(self, deadline: Deadline) -> list[LostNode]:
        """Look at every node's marker and server process. A node that does not answer is not listed: it is not known to be lost.

        Raises:
            WrongNodeError: a node carries the marker of another node or cluster; that is no case for repair.
        """
        lost, whole, addresses = list[LostNode](), list[MarkedState](), self._nodes.addresses(deadline)
        shares, away, self._away = deadline.shares(len(addresses) + 1), self._away, {}
        for address, share in zip(sorted(addresses, key=away.__contains__), shares, strict=False):  # those that are away last
            waits_s = away.get(address, math.inf) if lost else math.inf
            try:
                state = self._nodes.state(address, share.within(waits_s))
            except (NodeUnavailableError, DeadlineExceededError):
                self._away[address] = 2 * waits_s if waits_s < math.inf else _AWAY_S
                continue
            if (found := state.lost) is not None:
                lost.append(found)
            else:
                whole.append(state)
        self._nodes.keep(whole, next(shares))  # the last one: those that hang have not taken it
        return lost

    @property
    def away(self) -> Collection[str]:
        """The nodes that gave the last look at all of them no answer."""
        return self._away.keys()

    def looks_lost(self, deadline: Deadline) -> bool:
        """Whether a quick look gives reason to call `lost_nodes` at once; for stores where that call takes long."""
        return self._nodes.looks_lost(deadline)

    def begin(self, address: str, deadline: Deadline, *, even_if_whole: bool = False) -> str | None:
        """Begin the repair of a node, or join the one that has begun; from now on normal batches fail there.

        Args:
            address: one of `addresses`.
            deadline: of the call.
            even_if_whole: begin although the marker is in order: rows were found missing all the same (evicted).

        Returns:
            The nonce, 16 hex digits; None when the marker is in order and there is nothing to repair.
        """
        joins = True
        for _ in range(MAX_TRIES):
            state = self._state_now(address, deadline)
            joins &= state.nonce is not None
            if state.lost is None and not even_if_whole:
                return None
            lane = RepairLane(address, state.process, state.nonce or self._next_nonce(state), state.places)
            changes = self._to_repairing(state, lane, joins=joins, even_if_whole=even_if_whole)
            open_ = [at for at, one in enumerate(state.judged) if at in changes or one == ("repairing", lane.nonce)]
            lane = replace(lane, places=state.places[open_])  # a slot may come back to a repair that is over for all others
            last = max(changes, default=None)  # it decides whose nonce it is; then all the others follow. The first may be leaving
            decided = last is None or self._nodes.swap(state, {last: changes.pop(last)}, deadline)
            if decided and self._nodes.swap(state, changes, deadline):
                self._nodes.begun(lane, deadline)
                self._lanes[address] = lane
                return lane.nonce
        raise ProtocolError(f"node {address}: its markers changed {MAX_TRIES} times while a repair was to begin there")

    def begun_with(self, address: str) -> bytes:
        """What tells the repair that this process takes part in from one of the same nonce that slots have come to since."""
        return self._lanes[address].places.tobytes()

    def _next_nonce(self, state: MarkedState) -> str:
        """A nonce above those of all repairs of the node that are known: the time, and chance behind it."""
        last = max(self._nodes.expected(state, at).repair for at in range(len(state.places)))
        drawn = int(time.time() * 1000) << 16 | int.from_bytes(os.urandom(2))
        return f"{max(drawn, int(last or '0', 16) + 1):016x}"

    def _to_repairing(self, state: MarkedState, lane: RepairLane, *, joins: bool, even_if_whole: bool) -> dict[int, Marker]:
        """The markers that are to have the nonce and do not yet; those that this repair has finished stay as they are."""
        changes, has_lost = {}, state.has_lost
        for at, (value, judged) in enumerate(zip(state.values, state.judged, strict=True)):
            newcomer = joins and at not in state.elsewhere
            whole = judged is None and not even_if_whole and (newcomer or not has_lost)
            if whole or judged == ("repairing", lane.nonce):
                continue
            expected = self._nodes.expected(state, at)
            if value != lane.ended(expected).encode():
                changes[at] = lane.begun(expected)
        return changes

    def update_value(self, address: str, nonce: str, name: str, change: Change, deadline: Deadline) -> None:
        """Change a node's copy of a small value (see `StoreValues.update`), if it is one of those that hold a copy."""
        lane = self._require_repair(address, nonce, deadline)
        if self._nodes.holds(address, name):
            self._nodes.cell(address, name, lane.process, deadline).update(change)
            self._require_repair(address, nonce, deadline)

    def report(self, address: str, nonce: str, shard: int, deadline: Deadline) -> None:
        """Say that this shard's rows on the node are in order; puts the shard's owner record back too, if the store was fenced."""
        lane = self._require_repair(address, nonce, deadline)
        if self._fence.record:
            self._fence.put_back(self._nodes.cell(address, self._fence.name, lane.process, deadline))
        put_newer(self._nodes.cell(address, MAP_NAME, lane.process, deadline), self._cluster_map())
        name, value = self._nodes.report(lane, shard)
        self._nodes.cell(address, name, lane.process, deadline).put(value)
        self._require_repair(address, nonce, deadline)

    def finish(self, address: str, nonce: str, shards: Collection[int], deadline: Deadline) -> bool:
        """Renew the marker when all of these shards have reported; return True when the node is in use again, False to be asked again."""
        lane, state = self._lane(address, nonce), self._state_now(address, deadline)
        left = dict.fromkeys(at for at, one in enumerate(state.judged) if one == ("repairing", nonce))
        begun_with = np.flatnonzero(np.isin(state.places, lane.places)).tolist()
        if state.process != lane.process or not all(at in left or state.repaired(at) == nonce for at in begun_with):
            raise NodeLostError(f"node {address}: repair {nonce} is not going on there any more; begin again")
        reports = (self._nodes.cell(address, self._nodes.report(lane, shard)[0], lane.process, deadline).read() for shard in shards if left)
        if not all(self._nodes.covers(report, lane, state.places[list(left)]) for report in reports):
            return False
        if not self._nodes.swap(state, {at: lane.ended(self._nodes.expected(state, at)) for at in left}, deadline):
            return False  # another shard is finishing it, or it is over: the next call tells
        self._nodes.over(replace(lane, places=state.places[list(left)]), shards, deadline)
        del self._lanes[address]
        return True

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _state_now(self, address: str, deadline: Deadline) -> MarkedState:
        self._nodes.addresses(deadline)  # slots may have moved
        return self._nodes.state(address, deadline)

    def _lane(self, address: str, nonce: str) -> RepairLane:
        """Return the repair of that nonce, which this store takes part in."""
        lane = self._lanes.get(address)
        if lane is None or lane.nonce != nonce:
            raise NodeLostError(f"node {address}: repair {nonce} is not one that this process takes part in; beginning the repair joins it")
        return lane

    def _require_repair(self, address: str, nonce: str, deadline: Deadline) -> RepairLane:
        """The repair that goes on, by the process and one marker."""
        lane = self._lane(address, nonce)
        state = self._nodes.state(address, deadline, lane)
        if state.judged[0] != ("repairing", nonce):
            raise diagnose(address, replace(lane, process=state.process).begun(self._nodes.expected(state, 0)), state.values[0])
        return lane

    # --- rows -------------------------------------------------------------------------------------------------------------------

    def keys_of(self, address: str, keys: RowKeys) -> NDArray[np.bool_]:
        """Return which keys belong to a node: bool [n]."""
        mine: NDArray[np.bool_] = self._nodes.slots_of(address, self._lanes.get(address))[keys.slots()]
        return mine

    def read(self, address: str, nonce: str, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        """Read rows of a node in repair; all keys belong to it. See `StoreRows.read`."""
        return self._batches.read(parts, deadline, self._lane_of(address, nonce, parts))

    def write(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        """Write records to a node in repair; all keys belong to it. See `StoreRows.write`."""
        return self._batches.write(parts, deadline, self._lane_of(address, nonce, parts))

    def erase(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        """Delete rows of a node in repair; under a map of ours also those of slots that have left it. See `StoreRows.erase`."""
        lane = self._lane(address, nonce) if self._cluster_map().n_nodes else self._lane_of(address, nonce, parts)
        return self._batches.erase(parts, deadline, lane)

    def keys_on(self, address: str, slots: NDArray[np.bool_], deadline: Deadline) -> Iterator[RowKeys] | None:
        """List the row keys of some slots that a node holds, in blocks, one table each; None where that cannot be asked (memcached).

        A snapshot may bring back rows that were erased since; only this list finds them. A key may come more than once, and keys of other
        slots may come, too. Of a table in pages the ids are the numbers of its pages.

        Args:
            address: of the node.
            slots: bool [16384]: buckets of others are not asked for their rows.
            deadline: its length is that of each block.
        """
        return self._nodes.keys_on(address, slots, deadline)

    def make_way(self, keys: RowKeys, deadline: Deadline, *, repair: tuple[str, str] | None = None) -> int:
        """Let rows be written under keys of pages where another program has put a value that is no page; stores without pages do nothing.

        A value longer than a page is cut to a page; its rows stay. A value of another type can only be deleted whole, and rows of other
        shards with it, which would look as if they had never existed. So it is deleted in a repair only: every shard brings back its own.

        Args:
            keys: of rows, in a repair all of its node.
            deadline: of the call.
            repair: (address, nonce) of the repair.

        Returns:
            How many values were cut or deleted.
        """
        containers = keys.containers()
        if containers is None:
            return 0
        return self._nodes.make_way(containers, deadline, None if repair is None else self._require_repair(*repair, deadline))

    def _lane_of(self, address: str, nonce: str, parts: Sequence[ReadPart] | Sequence[WritePart]) -> RepairLane:
        """The lane of a batch; raises where a row is of another node."""
        if not all(self.keys_of(address, part.keys).all() for part in parts):
            if self._cluster_map().plan is not None:  # its phase has changed since the caller chose the rows
                raise NodeSuspectError(f"node {address}: slots have moved since the rows to repair were chosen; try again.")
            raise InvalidInputError(f"a batch that repairs node {address} holds rows of other nodes")
        return self._lane(address, nonce)
