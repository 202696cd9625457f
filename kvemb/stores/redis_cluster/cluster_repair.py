"""Repair of a Redis Cluster's primary: a marker per slot, the same nonce in all slots that it holds, and the list of whole primaries.

A repair is of the slots that a primary held when it began. A slot that moves meanwhile takes its state with it: it is repaired where it
is then. So a shard reports the slots whose rows it has brought back, and only slots that every shard has reported are given new markers.

What this cannot see: a process that is demoted, promoted again and serves, all while a client has a connection to it that lies idle. And
what it sees without need: a primary that was added to the cluster and given slots is compared once, although nothing was lost.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.coordination.markers import DamagedMarkerError, Marker, diagnose, why_lost
from kvemb.coordination.shard_owners import owner_name, require_not_fenced
from kvemb.errors import DeadlineExceededError, NodeLostError, NodeUnavailableError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import N_SLOTS, RowKeys, text_slot
from kvemb.schema.pages import PagedKeys
from kvemb.stores.redis_cluster.cluster_members import MEMBERS, decode_members, encode_members, process_of, run_id_in
from kvemb.stores.redis_cluster.slot_map import SlotMap, marker_keys
from kvemb.stores.redis_cluster.slot_markers import ClusterMarkers
from kvemb.stores.redis_server import compare_and_set, redis_admin
from kvemb.stores.redis_server.key_parsing import row_keys_in
from kvemb.stores.repairable import LostNode

_MAX_TRIES = 100
log = logging.getLogger("kvemb")


@dataclass(frozen=True, eq=False)
class PrimaryState:
    """What a primary and the markers of its slots say.

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


@dataclass(frozen=True, eq=False)
class Begun:
    """A repair that a store takes part in.

    Args:
        nonce: of the repair.
        process: of the primary, see `cluster_members`.
        slots: bool [16384], those that the primary held.
    """

    nonce: str
    process: str
    slots: NDArray[np.bool_]


class ClusterRepair(ClusterMarkers):
    """The repair half of the store of a cluster that moves its own slots."""

    def __init__(self, config: StorageConfig, role: str) -> None:
        super().__init__(config, role)
        self._begun: dict[str, Begun] = {}  # per address the repair that this store takes part in

    # --- the state of a primary -------------------------------------------------------------------------------------------------

    def lost_nodes(self, deadline: Deadline) -> list[LostNode]:
        slot_map = self._refreshed(deadline)
        lost, joined = [], set()
        for index, address in enumerate(slot_map.addresses):
            share = Deadline.after(deadline.remaining_s() / (len(slot_map.addresses) - index))
            try:
                state = self._state(address, slot_map, share)
            except (NodeUnavailableError, DeadlineExceededError):
                continue
            if state.empty.any():
                lost.append(LostNode(address, "empty"))
            elif state.nonce:
                lost.append(LostNode(address, "repairing", state.nonce))
            elif not self._is_whole(state.process, deadline):
                lost.append(LostNode(address, "suspect"))
            else:
                joined.add(state.process)
        if joined:
            self._admit(joined, deadline)  # the list itself may have been lost
        self._keep_owner(deadline)
        return lost

    def looks_lost(self, deadline: Deadline) -> bool:
        """Look at every primary's process and at one marker: who was started again, or flushed, has lost them all."""
        slot_map = self._slot_map(deadline)
        for index, address in enumerate(slot_map.addresses):
            share = Deadline.after(deadline.remaining_s() / (len(slot_map.addresses) - index))
            slots = np.flatnonzero(slot_map.nodes == index)
            try:
                process = process_of(redis_admin.info(address, self.config, share))
                (value,) = self._markers_at(address, slots[:1], share)
            except (NodeUnavailableError, DeadlineExceededError):
                continue
            if process not in self._whole or (not isinstance(value, bool) and self._judge(int(slots[0]), value, process, address)):
                return True
        return False

    def begin_repair(self, address: str, deadline: Deadline, *, even_if_whole: bool = False) -> str | None:
        slot_map = self._refreshed(deadline)
        if address not in slot_map.addresses:
            raise NodeLostError(f"node {address}: holds no slots of the cluster any more; ask for the lost nodes again")
        for _ in range(_MAX_TRIES):
            state = self._state(address, slot_map, deadline)
            if not (state.empty.any() or state.nonce or even_if_whole or not self._is_whole(state.process, deadline)):
                return None
            nonce = state.nonce or os.urandom(8).hex()
            changes = self._to_repairing(state, nonce)
            # The first slot decides whose nonce it is; then all the others follow.
            if all(self._swap(state, changes[:1], deadline)) and all(self._swap(state, changes[1:], deadline)):
                self._begun[address] = Begun(nonce, state.process, _mask(state.slots))
                return nonce
        raise ProtocolError(f"node {address}: its markers changed {_MAX_TRIES} times while a repair was to begin there")

    def keys_of(self, address: str, keys: RowKeys) -> NDArray[np.bool_]:
        mask = self._begun[address].slots if address in self._begun else self._slots_of(address)
        mine: NDArray[np.bool_] = mask[keys.slots()]
        return mine

    def keys_on(self, address: str, deadline: Deadline) -> Iterator[RowKeys]:
        for block in redis_admin.scan(address, self.config, deadline):
            yield from row_keys_in(block)

    def make_way(self, keys: RowKeys, deadline: Deadline, *, repair: tuple[str, str] | None = None) -> int:
        if not isinstance(keys, PagedKeys):
            return 0
        pages, n_changed = keys.distinct_pages(), 0
        slots, slot_map = pages.slots(), self._refreshed(deadline)
        process = None if repair is None else self._require_repair(*repair, deadline).process
        for node in np.unique(slot_map.nodes[slots]).tolist():
            address = slot_map.addresses[node]
            names = [bytes(key) for key in pages.encode()[slot_map.nodes[slots] == node]]
            here = process or process_of(redis_admin.info(address, self.config, deadline))
            size = keys.layout.page_bytes
            n_changed += compare_and_set.make_way(
                address, self.config, names, size, run_id_in(here), deadline, clear=repair is not None and address == repair[0]
            )
        return n_changed

    def put_meta_in_repair(self, address: str, nonce: str, name: str, value: bytes, deadline: Deadline) -> None:
        if self._slots_of(address)[text_slot(name.encode())]:
            self.put_meta(name, value, deadline)

    def report_repaired(self, address: str, nonce: str, shard: int, deadline: Deadline) -> None:
        begun = self._require_repair(address, nonce, deadline)
        if self._owner is not None and self._owner[2]:
            self._put_back_owner(deadline)
        self.put_meta(_report_name(shard, nonce), np.packbits(begun.slots).tobytes(), deadline)
        self._require_repair(address, nonce, deadline)

    def finish_repair(self, address: str, nonce: str, n_shards: int, deadline: Deadline) -> bool:
        begun = self._begun_as(address, nonce)
        state = self._state(address, self._refreshed(deadline), deadline)
        wholes = [replace(self._expected(int(slot)), repair=nonce).encode() for slot in state.slots]
        left = [index for index, going in enumerate(state.nonces) if going == nonce]
        in_order = [value == whole for value, whole in zip(state.values, wholes, strict=True)]
        going_on = all(in_order[i] or state.nonces[i] == nonce for i in np.flatnonzero(begun.slots[state.slots]))
        if state.process != begun.process or not going_on:
            raise NodeLostError(f"node {address}: repair {nonce} is not going on there any more; begin again")
        if left:
            reported = self._reported(nonce, n_shards, deadline)
            if reported is None or not reported[state.slots[left]].all():
                return False
            self._admit({state.process}, deadline)  # before anybody can see its markers in order and miss it on the list
            changes = [(marker_keys()[int(state.slots[i])], state.values[i], wholes[i]) for i in left]
            if not all(self._swap(state, changes, deadline)):
                return False  # another shard is finishing it, or it is over: the next call tells
        self._admit({state.process}, deadline)
        self._forget_markers(address)
        for shard in range(n_shards):
            self._drop_meta(_report_name(shard, nonce), deadline)
        del self._begun[address]
        return True

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _state(self, address: str, slot_map: SlotMap, deadline: Deadline) -> PrimaryState:
        process = process_of(redis_admin.info(address, self.config, deadline))
        held = np.flatnonzero(slot_map.nodes == slot_map.addresses.index(address))
        found = self._markers_at(address, held, deadline)
        settled = [index for index, value in enumerate(found) if value is not False]
        slots, values = held[settled], [value if isinstance(value, bytes) else None for value in (found[i] for i in settled)]
        empty, nonces = np.zeros(len(slots), dtype=bool), []
        for index, (slot, value) in enumerate(zip(slots, values, strict=True)):
            why = self._judge(int(slot), value, process, address)
            empty[index] = why is not None and why[1] is None
            nonces.append(why[1] or "" if why is not None else "")
        if not len(slots):
            raise NodeUnavailableError(f"node {address}: holds no slot for the moment; all are on their way to other nodes")
        return PrimaryState(address, process, slots, values, empty, nonces)

    def _is_whole(self, process: str, deadline: Deadline) -> bool:
        """Whether a primary, whose markers were read just now, is on the list of whole ones: that is read after its markers, since a repair
        that ends puts it on the list before it renews them."""
        if process not in self._whole:
            self._whole |= self._members(deadline)
        return process in self._whole

    def _judge(self, slot: int, value: bytes | None, process: str, address: str) -> tuple[str, str | None] | None:
        expected = self._expected(slot)
        if value == expected.encode():
            return None
        name = f"{address} (slot {slot})"
        try:
            repairing = value is not None and Marker.decode(value, name).repairing
        except DamagedMarkerError:
            return "suspect", None
        return why_lost(name, expected, value, process if repairing else "")

    def _to_repairing(self, state: PrimaryState, nonce: str) -> list[compare_and_set.Change]:
        """The changes that put the nonce into all slots which do not have it yet; those that this repair has finished are left."""
        changes: list[compare_and_set.Change] = []
        for slot, value, going in zip(state.slots, state.values, state.nonces, strict=True):
            normal = self._expected(int(slot))
            if going == nonce or value == replace(normal, repair=nonce).encode():
                continue
            begun = Begun(nonce, state.process, _mask([]))
            changes.append((marker_keys()[int(slot)], value, self._in_repair(int(slot), begun).encode()))
        return changes

    def _begun_as(self, address: str, nonce: str) -> Begun:
        begun = self._begun.get(address)
        if begun is None or begun.nonce != nonce:
            raise NodeLostError(f"node {address}: repair {nonce} is not one that this process takes part in; begin_repair joins it")
        return begun

    def _require_repair(self, address: str, nonce: str, deadline: Deadline) -> Begun:
        """The repair that goes on, by the process and the marker of a slot.

        Raises:
            NodeLostError, NodeSuspectError: it does not, or this store has not joined it by `begin_repair`.
        """
        begun = self._begun_as(address, nonce)
        process = process_of(redis_admin.info(address, self.config, deadline))
        for slot in np.flatnonzero(begun.slots):
            (value,) = self._markers_at(address, np.array([slot]), deadline)
            if value is False:
                continue  # this slot is on its way: ask another
            wanted = self._in_repair(int(slot), replace(begun, process=process))
            if value != wanted.encode():
                raise diagnose(f"{address} (slot {slot})", wanted, value if isinstance(value, bytes) else None)
            return begun
        raise NodeLostError(f"node {address}: holds none of the slots any more that repair {nonce} began with; begin again")

    def _in_repair(self, slot: int, begun: Begun) -> Marker:
        return replace(self._expected(slot), run_id=begun.process, repair=begun.nonce, repairing=True)

    def _swap(self, state: PrimaryState, changes: Sequence[compare_and_set.Change], deadline: Deadline) -> list[bool]:
        return compare_and_set.swap(state.address, self.config, changes, run_id_in(state.process), deadline)

    def _reported(self, nonce: str, n_shards: int, deadline: Deadline) -> NDArray[np.bool_] | None:
        """The slots that every shard has reported: bool [16384]; None when a shard has not reported at all."""
        slots = np.ones(N_SLOTS, dtype=bool)
        for shard in range(n_shards):
            (report,) = self.get_meta(_report_name(shard, nonce), deadline)
            if report is None:
                return None
            if len(report) != N_SLOTS // 8:  # another program's: the shard will report again
                log.error("the value under the key %s is damaged, or another program's: %r", _report_name(shard, nonce), report[:40])
                return None
            slots &= np.unpackbits(np.frombuffer(report, dtype=np.uint8)).astype(bool)
        return slots

    def _admit(self, processes: set[str], deadline: Deadline) -> None:
        """Put processes on the list of whole primaries."""
        for _ in range(_MAX_TRIES):
            (data,) = self.get_meta(MEMBERS, deadline)
            members = decode_members(data)
            self._whole |= processes
            if processes <= members or self._swap_meta(MEMBERS, data, encode_members(members | processes), deadline):
                return
        raise ProtocolError(f"{MEMBERS} changed {_MAX_TRIES} times while it was to be written")

    def _keep_owner(self, deadline: Deadline) -> None:
        """Put our owner record back where another program has damaged it."""
        if self._owner is None or not self._owner[2]:
            return
        shard, _, record = self._owner
        copies = self.get_meta(owner_name(shard), deadline)
        if copies != [record]:
            self._require_ours(copies[0])
            self.mend_copies(owner_name(shard), copies, [True], record, deadline)

    def _put_back_owner(self, deadline: Deadline) -> None:
        assert self._owner is not None
        shard, epoch, record = self._owner
        for _ in range(_MAX_TRIES):
            copies = self.get_meta(owner_name(shard), deadline)
            require_not_fenced(copies, shard, epoch)
            if copies == [record] or self._swap_meta(owner_name(shard), copies[0], record, deadline):
                return
        raise ProtocolError(f"{owner_name(shard)} changed {_MAX_TRIES} times while it was to be put back")


def _mask(slots: Sequence[int] | NDArray[np.int64]) -> NDArray[np.bool_]:
    mask = np.zeros(N_SLOTS, dtype=bool)
    mask[slots] = True
    return mask


def _report_name(shard: int, nonce: str) -> str:
    return f"kvemb:repaired:{shard}:{nonce}"
