"""Repair of a Redis Cluster's primary: a marker per slot, the same nonce in all slots that it holds, and the list of whole primaries.

A repair is of the slots that a primary held when it began. A slot that moves meanwhile takes its state with it: it is repaired where it
is then. So a shard reports the slots whose rows it has brought back, and only slots that every shard has reported are given new markers.

One loss is not seen: of a process that is demoted, promoted again and serves, all while a client has an idle connection to it. And one
comparison is needless: a primary that another tool than `scaling` added to the cluster and gave slots is compared once.
"""

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.markers import DamagedMarkerError, Marker, diagnose, why_lost
from kvemb.coordination.shard_owners import OwnerFence
from kvemb.errors import DeadlineExceededError, InvalidInputError, NodeLostError, NodeUnavailableError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.slots import N_SLOTS, text_slot
from kvemb.stores.redis_cluster.cluster_primaries import ShardsMap
from kvemb.stores.redis_cluster.cluster_rows import ClusterRounds
from kvemb.stores.redis_cluster.cluster_values import ClusterValues
from kvemb.stores.redis_cluster.slot_map import ClusterTopology, SlotMap, marker_keys
from kvemb.stores.redis_cluster.slot_markers import Begun, SlotMarkers
from kvemb.stores.redis_cluster.whole_primaries import WholePrimaries, process_of, run_id_in
from kvemb.stores.redis_server import compare_and_set, redis_admin
from kvemb.stores.redis_server.redis_login import RedisAccess
from kvemb.stores.redis_server.stored_rows import rows_on
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.store_repair import LostNode, StoreRepair

_MAX_TRIES = 100
log = logging.getLogger("kvemb")


@dataclass(frozen=True, eq=False)
class PrimaryState:
    """The state of a primary, by itself and by the markers of its slots.

    Args:
        address, process: of the primary.
        slots: int64 [n], those that it holds and that are not on their way.
        values: n markers, or None where there is none.
        empty: bool [n], slots without a marker, or with a repair of another process.
        nonces: n nonces of repairs that go on for this process, "" for none.
    """

    address: str
    process: str
    slots: NDArray[np.int64]
    values: list[bytes | None]
    empty: NDArray[np.bool_]
    nonces: list[str]

    @property
    def nonce(self) -> str:
        """Of the repair that goes on, "" for none: the first slot's decides when two shards began at once."""
        return next((nonce for nonce in self.nonces if nonce), "")


class ClusterRepair(StoreRepair):
    """The facet `repair` of a cluster that moves its own slots; methods without a docstring are those of `StoreRepair`.

    Args:
        access: how servers are reached.
        topology: which node holds which slot.
        values: small values.
        whole: the list of whole primaries.
        markers: of the slots.
        shards_map: the cluster map, of which the cluster has a copy.
        fence: the owner that the store writes as.
        rounds: batches of rows.
    """

    def __init__(
        self,
        access: RedisAccess,
        topology: ClusterTopology,
        values: ClusterValues,
        whole: WholePrimaries,
        markers: SlotMarkers,
        shards_map: ShardsMap,
        fence: OwnerFence,
        rounds: ClusterRounds,
    ) -> None:
        self._access, self._topology, self._values = access, topology, values
        self._whole, self._markers, self._map, self._fence, self._rounds = whole, markers, shards_map, fence, rounds
        self._begun: dict[str, Begun] = {}  # per address the repair that this store takes part in

    # --- the state of a primary -------------------------------------------------------------------------------------------------

    def lost_nodes(self, deadline: Deadline) -> list[LostNode]:
        slot_map = self._topology.refreshed(deadline)
        lost, admitted = [], set()
        for address, share in deadline.shared(slot_map.addresses):
            try:
                state = self._state(address, slot_map, share)
            except (NodeUnavailableError, DeadlineExceededError):
                continue
            if state.empty.any():
                lost.append(LostNode(address, "empty"))
            elif state.nonce:
                lost.append(LostNode(address, "repairing", state.nonce))
            elif not self._whole.has(state.process, deadline):
                lost.append(LostNode(address, "suspect"))
            else:
                admitted.add(state.process)
        if admitted:
            self._whole.admit(admitted, deadline)  # the list itself may have been lost
        self._keep_copies(deadline)
        return lost

    def looks_lost(self, deadline: Deadline) -> bool:
        """Look at every primary's process and at one marker: a process that was started again, or flushed, has lost them all."""
        slot_map = self._topology.slot_map(deadline)
        for address, share in deadline.shared(slot_map.addresses):
            slots = np.flatnonzero(slot_map.slots_of(address))
            try:
                process = process_of(redis_admin.info(address, self._access, share))
                (value,) = self._markers.at(address, slots[:1], share)
            except (NodeUnavailableError, DeadlineExceededError):
                continue
            if process not in self._whole.known or (not isinstance(value, bool) and self._judge(int(slots[0]), value, process, address)):
                return True
        return False

    def begin(self, address: str, deadline: Deadline, *, even_if_whole: bool = False) -> str | None:
        slot_map = self._topology.refreshed(deadline)
        if address not in slot_map.addresses:
            raise NodeLostError(f"node {address}: holds no slots of the cluster any more; ask for the lost nodes again")
        for _ in range(_MAX_TRIES):
            state = self._state(address, slot_map, deadline)
            if not (state.empty.any() or state.nonce or even_if_whole or not self._whole.has(state.process, deadline)):
                return None
            nonce = state.nonce or os.urandom(8).hex()
            changes = self._to_repairing(state, nonce)
            # The first slot decides whose nonce it is; then all the others follow.
            if all(self._swap(state, changes[:1], deadline)) and all(self._swap(state, changes[1:], deadline)):
                self._begun[address] = Begun(nonce, state.process, _mask(state.slots))
                return nonce
        raise ProtocolError(f"node {address}: its markers changed {_MAX_TRIES} times while a repair was to begin there")

    def keys_of(self, address: str, keys: RowKeys) -> NDArray[np.bool_]:
        mask = self._begun[address].slots if address in self._begun else self._topology.slots_of(address)
        mine: NDArray[np.bool_] = mask[keys.slots()]
        return mine

    def make_way(self, keys: RowKeys, deadline: Deadline, *, repair: tuple[str, str] | None = None) -> int:
        found, n_changed = keys.containers(), 0
        if found is None:
            return 0
        slots, slot_map = found.keys.slots(), self._topology.refreshed(deadline)
        process = None if repair is None else self._require_repair(*repair, deadline).process
        for node in np.unique(slot_map.nodes[slots]).tolist():
            address = slot_map.addresses[node]
            names = [bytes(key) for key in found.keys.encode()[slot_map.nodes[slots] == node]]
            here = process or process_of(redis_admin.info(address, self._access, deadline))
            n_changed += compare_and_set.make_way(
                address, self._access, names, found, run_id_in(here), deadline, clear=repair is not None and address == repair[0]
            )
        return n_changed

    def keys_on(self, address: str, deadline: Deadline) -> Iterator[RowKeys]:
        return rows_on(address, self._access, deadline)

    def read(self, address: str, nonce: str, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return self._rounds.read(parts, deadline, self._lane(address, nonce, parts))

    def write(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self._rounds.write(parts, deadline, self._lane(address, nonce, parts))

    def erase(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        return self._rounds.erase(parts, deadline, self._lane(address, nonce, parts))

    def put_value(self, address: str, nonce: str, name: str, value: bytes, deadline: Deadline) -> None:
        if self._topology.slots_of(address)[text_slot(name.encode())]:
            self._values.put(name, value, deadline)

    def report(self, address: str, nonce: str, shard: int, deadline: Deadline) -> None:
        begun = self._require_repair(address, nonce, deadline)
        if self._fence.record:
            self._put_back_owner(deadline)
        self._map.keep(deadline)
        self._values.put(_report_name(shard, nonce), np.packbits(begun.slots).tobytes(), deadline)
        self._require_repair(address, nonce, deadline)

    def finish(self, address: str, nonce: str, shards: Collection[int], deadline: Deadline) -> bool:
        begun = self._begun_as(address, nonce)
        state = self._state(address, self._topology.refreshed(deadline), deadline)
        wholes = [replace(self._markers.expected(int(slot)), repair=nonce).encode() for slot in state.slots]
        left = [index for index, going in enumerate(state.nonces) if going == nonce]
        in_order = [value == whole for value, whole in zip(state.values, wholes, strict=True)]
        going_on = all(in_order[i] or state.nonces[i] == nonce for i in np.flatnonzero(begun.slots[state.slots]))
        if state.process != begun.process or not going_on:
            raise NodeLostError(f"node {address}: repair {nonce} is not going on there any more; begin again")
        if left:
            reported = self._reported(nonce, shards, deadline)
            if reported is None or not reported[state.slots[left]].all():
                return False
            self._whole.admit({state.process}, deadline)  # before any store can see its markers in order and miss it on the list
            changes = [(marker_keys()[int(state.slots[i])], state.values[i], wholes[i]) for i in left]
            if not all(self._swap(state, changes, deadline)):
                return False  # another shard is finishing it, or it is over: the next call tells
        self._whole.admit({state.process}, deadline)
        self._markers.changed.add(address)
        for shard in shards:
            self._values.drop(_report_name(shard, nonce), deadline)
        del self._begun[address]
        return True

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _state(self, address: str, slot_map: SlotMap, deadline: Deadline) -> PrimaryState:
        process = process_of(redis_admin.info(address, self._access, deadline))
        its_slots = np.flatnonzero(slot_map.slots_of(address))
        found = self._markers.at(address, its_slots, deadline)
        settled = [index for index, value in enumerate(found) if value is not False]
        slots, values = its_slots[settled], [value if isinstance(value, bytes) else None for value in (found[i] for i in settled)]
        empty, nonces = np.zeros(len(slots), dtype=bool), []
        for index, (slot, value) in enumerate(zip(slots, values, strict=True)):
            why = self._judge(int(slot), value, process, address)
            empty[index] = why is not None and why[1] is None
            nonces.append(why[1] or "" if why is not None else "")
        if not len(slots):
            raise NodeUnavailableError(f"node {address}: holds no slot for the moment; all are on their way to other nodes, or with them")
        return PrimaryState(address, process, slots, values, empty, nonces)

    def _judge(self, slot: int, value: bytes | None, process: str, address: str) -> tuple[str, str | None] | None:
        if value == self._markers.encoded(slot):
            return None
        expected = self._markers.expected(slot)
        name = f"{address} (slot {slot})"
        try:
            repairing = value is not None and Marker.decode(value, name).repairing
        except DamagedMarkerError:
            return "suspect", None
        return why_lost(name, expected, value, process if repairing else "")

    def _to_repairing(self, state: PrimaryState, nonce: str) -> list[compare_and_set.Change]:
        """The changes that put the nonce into all slots which do not have it yet; those that this repair has finished stay as they are."""
        changes: list[compare_and_set.Change] = []
        for slot, value, going in zip(state.slots, state.values, state.nonces, strict=True):
            normal = self._markers.expected(int(slot))
            if going == nonce or value == replace(normal, repair=nonce).encode():
                continue
            begun = Begun(nonce, state.process, _mask([]))
            changes.append((marker_keys()[int(slot)], value, self._markers.in_repair(int(slot), begun).encode()))
        return changes

    def _lane(self, address: str, nonce: str, parts: Sequence[ReadPart] | Sequence[WritePart]) -> Begun:
        """The state that a batch in repair expects."""
        if not all(self.keys_of(address, part.keys).all() for part in parts):
            raise InvalidInputError(f"a batch that repairs node {address} holds rows of other nodes")
        return self._begun_as(address, nonce)

    def _begun_as(self, address: str, nonce: str) -> Begun:
        """Return the repair of that nonce, which this store takes part in."""
        begun = self._begun.get(address)
        if begun is None or begun.nonce != nonce:
            raise NodeLostError(f"node {address}: repair {nonce} is not one that this process takes part in; beginning the repair joins it")
        return begun

    def _require_repair(self, address: str, nonce: str, deadline: Deadline) -> Begun:
        """The repair that goes on, by the process and the marker of a slot.

        Raises:
            NodeLostError, NodeSuspectError: it does not, or this store has not joined it by `begin`.
        """
        begun = self._begun_as(address, nonce)
        process = process_of(redis_admin.info(address, self._access, deadline))
        for slot in np.flatnonzero(begun.slots):
            (value,) = self._markers.at(address, np.array([slot]), deadline)
            if value is False:
                continue  # this slot is on its way: ask another
            wanted = self._markers.in_repair(int(slot), replace(begun, process=process))
            if value != wanted.encode():
                raise diagnose(f"{address} (slot {slot})", wanted, value if isinstance(value, bytes) else None)
            return begun
        raise NodeLostError(f"node {address}: holds none of the slots any more that repair {nonce} began with; begin again")

    def _swap(self, state: PrimaryState, changes: Sequence[compare_and_set.Change], deadline: Deadline) -> list[bool]:
        return compare_and_set.swap(state.address, self._access, changes, run_id_in(state.process), deadline)

    def _reported(self, nonce: str, shards: Collection[int], deadline: Deadline) -> NDArray[np.bool_] | None:
        """The slots that every shard has reported: bool [16384]; None when a shard has not reported at all."""
        slots = np.ones(N_SLOTS, dtype=bool)
        for shard in shards:
            report = self._values.get(_report_name(shard, nonce), deadline)
            if report is None:
                return None
            if len(report) != N_SLOTS // 8:  # another program's: the shard will report again
                log.error("the value under the key %s is damaged, or another program's: %r", _report_name(shard, nonce), report[:40])
                return None
            slots &= np.unpackbits(np.frombuffer(report, dtype=np.uint8)).astype(bool)
        return slots

    def _keep_copies(self, deadline: Deadline) -> None:
        """Put our owner record back where another program has damaged it, and the cluster map where it is behind or lost, too."""
        if not self._fence.record:
            return
        copy = self._values.get(self._fence.name, deadline)
        if copy != self._fence.record:
            self._fence.require_ours(copy, self._topology.holder_of(self._fence.name))
            self._values.mend(self._fence.name, [copy], [True], self._fence.record, deadline)
        self._map.keep(deadline)

    def _put_back_owner(self, deadline: Deadline) -> None:
        for _ in range(_MAX_TRIES):
            copy = self._values.get(self._fence.name, deadline)
            self._fence.require_not_behind([copy])
            if copy == self._fence.record or self._values.swap(self._fence.name, copy, self._fence.record, deadline):
                return
        raise ProtocolError(f"{self._fence.name} changed {_MAX_TRIES} times while it was to be put back")


def _mask(slots: Sequence[int] | NDArray[np.int64]) -> NDArray[np.bool_]:
    mask = np.zeros(N_SLOTS, dtype=bool)
    mask[slots] = True
    return mask


def _report_name(shard: int, nonce: str) -> str:
    return f"kvemb:repaired:{shard}:{nonce}"
