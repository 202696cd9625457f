"""Repair of a Redis Cluster's primary: a marker per slot, the same nonce in all slots that it holds, and the list of whole primaries.

A repair is of the slots that a primary held when it began. A slot that moves meanwhile takes its state with it: it is repaired where it
is then, and one in order stays so: `redis-cli` may bring slots for as long as it likes. So a shard reports the slots whose rows it has
brought back, and only slots that every shard has reported are given new markers.

A slot that stands open is of the primary that gives it, also where its marker and rows are with the one that takes it: a command that
moves slots may have been broken off for good, and until another one goes on with it, a loss at either of the two must be mended.

One loss is not seen: of a process that is demoted, promoted again and serves, all while a client has an idle connection to it. And one
comparison is needless: a primary that has just joined the cluster, once it has slots.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.markers import DamagedMarkerError, Marker, Why, alike, why_lost
from kvemb.coordination.replicated_values import ValueCell
from kvemb.coordination.shard_owners import OwnerFence
from kvemb.errors import DeadlineExceededError, NodeLostError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import Containers, RowKeys
from kvemb.schema.slots import N_SLOTS, text_slot
from kvemb.stores.marked_nodes import MarkedNodes, MarkedState, RepairLane
from kvemb.stores.redis_cluster.cluster_primaries import ShardsMap
from kvemb.stores.redis_cluster.cluster_values import ClusterValues
from kvemb.stores.redis_cluster.slot_map import ClusterTopology, marker_keys
from kvemb.stores.redis_cluster.slot_markers import SlotMarkers
from kvemb.stores.redis_cluster.whole_primaries import WholePrimaries, process_of, run_id_in
from kvemb.stores.redis_server import compare_and_set, redis_admin
from kvemb.stores.redis_server.redis_login import RedisAccess
from kvemb.stores.redis_server.stored_rows import rows_on

log = logging.getLogger("kvemb")


class SlotsOfPrimaries(MarkedNodes):
    """The primaries of a cluster that moves its own slots, a marker per slot; methods without a docstring are those of `MarkedNodes`."""

    def __init__(
        self,
        access: RedisAccess,
        topology: ClusterTopology,
        values: ClusterValues,
        whole: WholePrimaries,
        markers: SlotMarkers,
        shards_map: ShardsMap,
        fence: OwnerFence,
    ) -> None:
        self._access, self._topology, self._values, self._fence = access, topology, values, fence
        self._whole, self._markers, self._map = whole, markers, shards_map

    def looks_lost(self, deadline: Deadline) -> bool:
        """Look at every primary's process and at one marker: a process that was started again, or flushed, has lost them all."""
        slot_map = self._topology.slot_map(deadline)
        for address, share in deadline.shared(slot_map.addresses):
            slots = np.flatnonzero(slot_map.slots_of(address))
            try:
                process = self._process(address, share)
                (value,) = self._markers.at(address, slots[:1], share)
            except (NodeUnavailableError, DeadlineExceededError):
                continue
            if process not in self._whole.known or (not isinstance(value, bool) and self._judge(int(slots[0]), value, process, address)):
                return True
        return False

    def make_way(self, containers: Containers, deadline: Deadline, lane: RepairLane | None) -> int:
        slots, slot_map, n_changed = containers.keys.slots(), self._topology.refreshed(deadline), 0
        for node in np.unique(slot_map.nodes[slots]).tolist():
            address = slot_map.addresses[node]
            names = [bytes(key) for key in containers.keys.encode()[slot_map.nodes[slots] == node]]
            clear = lane is not None and address == lane.address
            run_id = run_id_in(lane.process if lane is not None and clear else self._process(address, deadline))
            n_changed += compare_and_set.make_way(address, self._access, names, containers, run_id, deadline, clear=clear)
        return n_changed

    def keys_on(self, address: str, slots: NDArray[np.bool_], deadline: Deadline) -> Iterator[RowKeys]:
        return rows_on(address, self._access, slots, deadline)

    def holds(self, address: str, name: str) -> bool:
        return bool(self._topology.slots_of(address)[text_slot(name.encode())])

    def addresses(self, deadline: Deadline) -> Sequence[str]:
        return self._topology.refreshed(deadline).addresses

    def state(self, address: str, deadline: Deadline, lane: RepairLane | None = None) -> MarkedState:
        process = self._process(address, deadline)
        if lane is None:
            slots = np.flatnonzero(self._topology.slots_of(address))
            found = self._markers.at(address, slots, deadline)
        else:
            slots, found = self._one_settled(lane, deadline)
        settled = [at for at, value in enumerate(found) if value is not False]
        if not settled:
            raise NodeUnavailableError(f"node {address}: holds no slot for the moment; all are on their way to other nodes, or with them")
        slots, values = slots[settled], [value if isinstance(value, bytes) else None for value in (found[at] for at in settled)]
        judged: list[tuple[Why, str | None] | None] = [None] * len(slots)
        for group in alike(slots.tolist(), values):
            some, found_there = slots[group].tolist(), [value for value in (values[at] for at in group) if value is not None]
            last = self._markers.last_repaired(some)
            verdict = self._judge(some[last], values[group[last]], process, address)
            for at in group if verdict else ():
                judged[at] = verdict
            if verdict is None:  # perhaps renewed by another shard
                self._markers.renew(some, found_there)
        if lane is None and None in judged and process not in self._whole.known:
            if self._whole.has(process, deadline):  # since a moment ago, perhaps, and its markers were changed before that
                return self.state(address, deadline)
            judged = [one or ("suspect", None) for one in judged]
        elsewhere = np.flatnonzero(np.isin(slots, list(self._topology.on_the_way)))
        return MarkedState(address, process, slots, values, judged, frozenset(elsewhere.tolist()))

    def _one_settled(self, lane: RepairLane, deadline: Deadline) -> tuple[NDArray[np.int64], list[bytes | bool | None]]:
        """A slot of a repair that is not on its way, and the value in the place of its marker."""
        for at in reversed(range(len(lane.places))):  # `redis-cli` moves them from the first to the last
            found = self._markers.at(lane.address, lane.places[at : at + 1], deadline)
            if found != [False]:
                return lane.places[at : at + 1], found
        raise NodeLostError(f"node {lane.address}: holds none of the slots any more that repair {lane.nonce} began with; begin again")

    def _judge(self, slot: int, value: bytes | None, process: str, address: str) -> tuple[Why, str | None] | None:
        expected = self._markers.expected(slot)
        name = f"{address} (slot {slot})"
        try:
            repairing = value is not None and Marker.decode(value, name).repairing
        except DamagedMarkerError:
            return "suspect", None
        return why_lost(name, expected, value, process if repairing else "")

    def _process(self, address: str, deadline: Deadline) -> str:
        return process_of(redis_admin.info(address, self._access, deadline))

    def expected(self, state: MarkedState, at: int) -> Marker:
        return self._markers.expected(int(state.places[at]))

    def swap(self, state: MarkedState, changes: Mapping[int, Marker], deadline: Deadline) -> bool:
        keys = marker_keys()
        swaps = [(keys[int(state.places[at])], state.values[at], marker.encode()) for at, marker in changes.items()]
        done = compare_and_set.swap(state.address, self._access, swaps, run_id_in(state.process), deadline)
        return False not in done and (True in done or not done)  # a slot that has left took its state with it

    def slots_of(self, address: str, lane: RepairLane | None = None) -> NDArray[np.bool_]:
        return self._topology.slots_of(address) if lane is None else _mask(lane.places)

    def cell(self, address: str, name: str, process: str, deadline: Deadline) -> ValueCell:
        return self._values.cell(name, deadline)  # the cluster has one copy, wherever its slot is

    def report(self, lane: RepairLane, shard: int) -> tuple[str, bytes]:
        return f"kvemb:repaired:{shard}:{lane.nonce}", np.packbits(_mask(lane.places)).tobytes()

    def covers(self, report: bytes | None, lane: RepairLane, places: NDArray[np.int64]) -> bool:
        if report is None:
            return False
        if len(report) != N_SLOTS // 8:  # another program's: the shard will report again
            log.error("a report of repair %s is damaged, or another program's: %r", lane.nonce, report[:40])
            return False
        return bool(np.unpackbits(np.frombuffer(report, dtype=np.uint8))[places].all())

    def keep(self, whole: Sequence[MarkedState], deadline: Deadline) -> None:
        if whole:
            self._whole.admit({state.process for state in whole}, deadline)  # the list itself may have been lost
        if self._fence.record:
            self._fence.keep(self._values.cell(self._fence.name, deadline))
            self._map.keep(deadline)

    def begun(self, lane: RepairLane, deadline: Deadline) -> None:
        if not self._whole.has(lane.process, deadline):  # it may have brought old rows back, also of slots that are on their way to it
            for slot in self._markers.coming_to(lane.address, deadline):
                self._values.drop(marker_keys()[slot].decode(), deadline)  # they are repaired with the node that gives them
        self._whole.admit({lane.process}, deadline)

    def over(self, lane: RepairLane, shards: Collection[int], deadline: Deadline) -> None:
        self._markers.changed.add(lane.address)
        self._markers.repairs |= dict.fromkeys(lane.places.tolist(), lane.nonce)
        for shard in shards:
            self._values.drop(self.report(lane, shard)[0], deadline)


def _mask(slots: NDArray[np.int64]) -> NDArray[np.bool_]:
    mask = np.zeros(N_SLOTS, dtype=bool)
    mask[slots] = True
    return mask
