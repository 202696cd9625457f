"""Redis Cluster (and Valkey's): rows by RESP on links of our own to every primary; the cluster's own slot map, MOVED and ASK followed.

Keys belong to slots and slots move between nodes, so there is one marker per slot, and a batch reads one per node, in a slot that it
uses. A row that was redirected is asked for again, within the same deadline, together with all other redirected rows of its batch.
"""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.markers import Identity, Marker, accept, diagnose, why_lost
from kvemb.errors import DeadlineExceededError, InvalidInputError, NodeUnavailableError, WrongNodeError
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import N_SLOTS
from kvemb.stores.coalesce import read_coalesced, write_coalesced
from kvemb.stores.read_retry import PASSING, retry_read
from kvemb.stores.redis_cluster.cluster_batch import ClusterBatch, EraseBatch, NodeShare, ReadBatch, Redirects, WriteBatch
from kvemb.stores.redis_cluster.cluster_members import MEMBERS, encode_members, process_of, run_id_in
from kvemb.stores.redis_cluster.cluster_repair import Begun, ClusterRepair
from kvemb.stores.redis_cluster.slot_map import SlotMap
from kvemb.stores.redis_cluster.slot_markers import Check, joined
from kvemb.stores.redis_server import redis_admin
from kvemb.stores.redis_server.redis_commands import MAX_VALUE_BYTES
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.store import Capabilities, NodeStats
from kvemb.wire.replies import Step

_SLOTS_PER_STEP = 512
_PAUSE_S = 0.02  # between rounds while the cluster says "not now"


class RedisClusterStore(ClusterRepair):
    """A cluster that moves its own slots. `config.nodes` are starting points; the primaries are learnt from them."""

    # --- opening ----------------------------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(cas=False, max_record_bytes=MAX_VALUE_BYTES, pages=True)

    def open(self, deadline: Deadline, known: Identity | None = None) -> list[Marker]:
        return retry_read(lambda: self._open(deadline, known), deadline, PASSING) if self._waits else self._open(deadline, known)

    def _open(self, deadline: Deadline, known: Identity | None) -> list[Marker]:
        self._pool.require_open()
        self._inspect(deadline)
        slot_map = self._slot_map(deadline)
        values = self._all_markers(deadline)
        self._origin = known or self._identity(values)
        self._repairs = {}
        lost = []
        for slot, value in enumerate(values):
            expected = self._expected(slot)
            if value == expected.encode():
                continue
            if known is not None and why_lost(self._slot_name(slot), expected, value, ""):
                lost.append(slot)
                continue
            marker = accept(self._slot_name(slot), expected, value, "")
            self._repairs[slot] = marker.repair
        self._vouched = self._owners(slot_map)
        self._vouched[[*lost, *self._on_the_way]] = -1  # the latter were seen where they go to
        self._whole = self._members(deadline)
        for address in self.addresses if known is None else ():
            self._require_whole(address, redis_admin.info(address, self.config, deadline), deadline)
        return [self._expected(slot) for slot in range(N_SLOTS)]

    def provision(self, cluster_id: bytes, generation: bytes, deadline: Deadline) -> None:
        n_keys, processes = self._inspect(deadline)
        values = self._all_markers(deadline)
        wanted = [Marker(cluster_id, slot, generation, 0, 0, "") for slot in range(N_SLOTS)]
        for slot, value in enumerate(values):
            if value is not None and value != wanted[slot].encode():
                raise diagnose(self._slot_name(slot), wanted[slot], value)
        n_markers = sum(value is not None for value in values)
        n_keys -= self.get_meta(MEMBERS, deadline) != [None]
        if n_keys != n_markers:
            raise WrongNodeError(
                f"the cluster at {', '.join(self.config.nodes)} holds {n_keys - n_markers} keys that are no markers. Provisioning writes "
                "on empty nodes only; empty them yourself if their data is not needed."
            )
        self.put_meta(MEMBERS, encode_members(processes), deadline)
        self._put_markers([marker.encode() for marker in wanted], deadline)

    # --- rows -------------------------------------------------------------------------------------------------------------------

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return retry_read(lambda: self._read(parts, deadline), deadline) if self._waits else self._read(parts, deadline)

    def _read(self, parts: Sequence[ReadPart], deadline: Deadline, repair: Begun | None = None) -> list[ReadResult]:
        def run(joined: Sequence[ReadPart]) -> list[ReadResult]:
            batch = ReadBatch(joined)
            self._run(batch, deadline, repair)
            return batch.results

        return read_coalesced(parts, run)

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self._write(parts, deadline)

    def _write(self, parts: Sequence[WritePart], deadline: Deadline, repair: Begun | None = None) -> list[WriteResult]:
        def run(joined: Sequence[WritePart]) -> list[WriteResult]:
            self._run(WriteBatch(joined), deadline, repair)
            return [WriteResult(np.ones(len(part.keys), dtype=bool)) for part in joined]

        return write_coalesced(parts, run)

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        self._run(EraseBatch(parts), deadline)
        return [np.ones(len(part.keys), dtype=bool) for part in parts]

    def read_in_repair(self, address: str, nonce: str, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return self._read(parts, deadline, self._lane(address, nonce, parts))

    def write_in_repair(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self._write(parts, deadline, self._lane(address, nonce, parts))

    def erase_in_repair(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        self._run(EraseBatch(parts), deadline, self._lane(address, nonce, parts))
        return [np.ones(len(part.keys), dtype=bool) for part in parts]

    def stats(self, deadline: Deadline) -> list[NodeStats]:
        self._pool.require_open()
        self._refresh(deadline)
        return [self.stats_or_error(address, deadline) for address in self.addresses]

    def _node_stats(self, address: str, deadline: Deadline) -> NodeStats:
        return redis_admin.node_stats(address, redis_admin.info(address, self.config, deadline))

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _run(self, batch: ClusterBatch, deadline: Deadline, repair: Begun | None = None) -> None:
        """Run a batch in rounds: all rows, then those that were redirected, until none is left or the deadline passes."""
        self._slot_map(deadline)
        self._read_renewed(deadline)
        while batch.pending:
            slot_map = self._slot_map(deadline)
            try:
                redirected = self._round(batch, slot_map, deadline, repair)
            except (NodeUnavailableError, DeadlineExceededError):
                self._map = None  # a failover may have moved the node's slots: the next batch asks
                raise
            if redirected.changed_map:
                self._refresh(deadline)
            if redirected.wait:
                time.sleep(min(_PAUSE_S, deadline.remaining_s()))
            if batch.pending and deadline.expired:
                raise redirected.error(deadline)

    def _round(self, batch: ClusterBatch, slot_map: SlotMap, deadline: Deadline, repair: Begun | None) -> Redirects:
        shares = batch.plan(slot_map, self._codec, self._asking_codec)
        by_node: dict[str, list[Step]] = {}
        for share in shares:
            by_node.setdefault(share.address, []).extend(share.steps.steps)
        checks = self._checks(batch, shares, slot_map, repair)
        for address, steps in by_node.items():
            steps += joined([check.step for check in checks if check.address == address])
        run_id = None if repair is None else run_id_in(repair.process)
        self._exchange(by_node, [share.steps for share in shares], deadline, self._pool if repair is None else self._plain_pool, run_id)
        for check in checks:
            if check.good and not check.importing and repair is None:
                self._vouched[check.slot] = self._number(check.address)
        wrong = [check for check in checks if check.wrong]
        self._changed.update(check.address for check in wrong)  # perhaps they were repaired
        for check in wrong:
            raise diagnose(f"{check.address} (slot {check.slot})", check.marker, check.reply.value)
        here = [check for check in checks if not (check.leaving and (check.reply.error or b"").startswith(b"-ASK "))]
        moved = {check.address for check in here if not self._marker_stays(check.slot, check.reply)}
        return batch.settle(shares, moved, frozenset((check.address, check.slot) for check in checks if check.not_yet))

    def _checks(self, batch: ClusterBatch, shares: list[NodeShare], slot_map: SlotMap, repair: Begun | None) -> list[Check]:
        """The markers to read: one of every node that is asked, and those of its slots that came from another node."""
        checks = {}
        last_slot = {share.address: share.slot for share in shares if not share.asking}
        for address, used_slot in last_slot.items():
            for slot in self._unvouched(address, slot_map) if repair is None else ():  # a repair has written all of its slots' markers
                checks[address, slot] = self._check(address, slot, self._expected(slot), leaving=slot in self._on_the_way)
            slot = self._settled_slot(address, used_slot, slot_map)
            checks[address, slot] = self._check(address, slot, self._expected(slot) if repair is None else self._in_repair(slot, repair))
        for share in shares:
            if not share.asking or share.address in last_slot:
                continue
            own = self._any_settled_slot(share.address, slot_map)
            for slot in np.unique(batch.slots_of(share)).tolist() if own is None else [own]:
                checks[share.address, slot] = self._check(share.address, slot, self._expected(slot), importing=own is None)
        return list(checks.values())

    def _lane(self, address: str, nonce: str, parts: Sequence[ReadPart] | Sequence[WritePart]) -> Begun:
        """What a batch in repair expects."""
        if not all(self.keys_of(address, part.keys).all() for part in parts):
            raise InvalidInputError(f"a batch that repairs node {address} holds rows of other nodes")
        return self._begun_as(address, nonce)

    def _inspect(self, deadline: Deadline) -> tuple[int, set[str]]:
        """Refuse unsafe primaries; return the number of keys in all, and the primaries' processes."""
        self._refresh(deadline)
        n_keys, processes = 0, set()
        for address in self.addresses:
            fields = redis_admin.info(address, self.config, deadline)
            redis_admin.require_safe(address, fields, self.config)
            n_keys += redis_admin.number_in(address, fields, "n_keys")
            processes.add(process_of(fields))
        return n_keys, processes
