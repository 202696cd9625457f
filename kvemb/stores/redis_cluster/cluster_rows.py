"""Batches of rows on a Redis Cluster, run in rounds with the markers that vouch for them: all rows first, then those redirected.

Also the facet `rows` of its store.
"""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.markers import diagnose
from kvemb.errors import DeadlineExceededError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.net.pool import LinkPool
from kvemb.schema.bucket_limits import BucketLimits
from kvemb.schema.keys import RowKeys
from kvemb.schema.table_def import TableDef
from kvemb.stores.marked_nodes import RepairLane
from kvemb.stores.node_batch import CoalescedWrite
from kvemb.stores.read_retry import ReadRetry
from kvemb.stores.redis_cluster.cluster_batch import ClusterBatch, EraseBatch, NodeShare, ReadBatch, Redirects, WriteBatch
from kvemb.stores.redis_cluster.primary_links import exchange
from kvemb.stores.redis_cluster.slot_map import ClusterTopology, SlotMap
from kvemb.stores.redis_cluster.slot_markers import Check, SlotMarkers, merged_steps
from kvemb.stores.redis_cluster.whole_primaries import run_id_in
from kvemb.stores.redis_server.redis_commands import NOT_NOW, redirect_target
from kvemb.stores.redis_server.redis_login import RedisAccess
from kvemb.stores.redis_server.stored_rows import count_rows, read_limits, set_limits
from kvemb.stores.row_io import HeldRows, ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.store import StoreRows
from kvemb.stores.store_repair import StoreRepair
from kvemb.wire.replies import Step
from kvemb.wire.resp.resp_codec import RespCodec

_PAUSE_S = 0.02  # between rounds while the cluster says "not now"


class ClusterRounds:
    """Runs batches of rows on a Redis Cluster, round by round, until no row is redirected any more."""

    def __init__(self, topology: ClusterTopology, markers: SlotMarkers, rows: LinkPool, repair: LinkPool) -> None:
        self._topology, self._markers = topology, markers
        self._rows, self._repair = rows, repair
        self._codec = RespCodec()
        self._asking_codec = RespCodec(asking=True)

    def read(self, parts: Sequence[ReadPart], deadline: Deadline, lane: RepairLane | None = None) -> list[ReadResult]:
        """Read parts; `lane` is that of a batch in repair."""
        batch = ReadBatch(parts)
        self.run(batch, deadline, lane)
        return batch.results

    def write(self, parts: Sequence[WritePart], deadline: Deadline, lane: RepairLane | None = None) -> list[WriteResult]:
        """Write parts."""
        self.run(WriteBatch(CoalescedWrite(parts).parts), deadline, lane)
        return [WriteResult(np.ones(len(part.keys), dtype=bool)) for part in parts]

    def erase(self, parts: Sequence[WritePart], deadline: Deadline, lane: RepairLane | None = None) -> list[NDArray[np.bool_]]:
        """Delete the rows of parts."""
        self.run(EraseBatch(parts), deadline, lane)
        return [np.ones(len(part.keys), dtype=bool) for part in parts]

    def run(self, batch: ClusterBatch, deadline: Deadline, lane: RepairLane | None = None) -> None:
        """Run a batch in rounds until no row remains or the deadline passes."""
        self._topology.slot_map(deadline)
        try:
            self._markers.read_renewed(deadline)
            while batch.pending:
                redirected = self._round(batch, self._topology.slot_map(deadline), deadline, lane)
                if redirected.unclear:
                    self._topology.refreshed(deadline, *redirected.moved.values())
                elif redirected.moved:
                    self._topology.follow(redirected.moved, deadline)
                if redirected.wait:
                    time.sleep(min(_PAUSE_S, deadline.remaining_s()))
                if batch.pending and deadline.expired:
                    raise redirected.error(deadline)
        except (NodeUnavailableError, DeadlineExceededError):
            self._topology.doubt()  # a failover may have moved the node's slots: the next batch asks
            raise

    def _round(self, batch: ClusterBatch, slot_map: SlotMap, deadline: Deadline, lane: RepairLane | None) -> Redirects:
        shares = batch.plan(slot_map, self._codec, self._asking_codec)
        by_node: dict[str, list[Step]] = {}
        for share in shares:
            by_node.setdefault(share.address, []).extend(share.steps.steps)
        checks, places = self._checks(batch, shares, slot_map, lane), None if lane is None else lane.places
        for address in {check.address for check in checks}:
            by_node.setdefault(address, []).extend(merged_steps([check.step for check in checks if check.address == address]))
        run_ids = {} if lane is None else {lane.address: run_id_in(lane.process)}
        exchange(
            self._rows if lane is None else self._repair, by_node, [share.steps for share in shares], deadline, run_ids, self._codec.limit
        )
        for check in checks:
            if check.good and not check.importing and lane is None:
                self._topology.vouch([check.slot], check.address)
        wrong = [check for check in checks if check.wrong]
        self._markers.changed.update(at for check in wrong for at in (check.address, slot_map.address_of(check.slot)))  # perhaps repaired
        for check in wrong:
            raise diagnose(f"{check.address} (slot {check.slot})", check.marker, check.reply.value)
        here = [check for check in checks if not (check.leaving and (check.reply.error or b"").startswith(b"-ASK "))]
        moved = {check.address for check in here if not self._markers.stays(check.slot, check.reply)}
        redirected = batch.settle(shares, moved, *_not_vouched(checks, slot_map, in_repair=lane is not None))
        for check in here:
            line = check.reply.error or b""
            redirected.last = line or redirected.last
            redirected.unclear |= line.startswith(NOT_NOW)
            redirected.wait |= line.startswith(b"-ASK ") and self._markers.any_settled_slot(check.address, slot_map, places) is None
            if line.startswith(b"-MOVED "):
                redirected.moved[check.slot] = redirect_target(line, check.address)
        return redirected

    def _checks(self, batch: ClusterBatch, shares: list[NodeShare], slot_map: SlotMap, lane: RepairLane | None) -> list[Check]:
        """The markers to read: one of every node that is asked, and those of its slots that came from another node."""
        checks, markers = {}, self._markers
        last_slot = {share.address: share.slot for share in shares if not share.asking}
        for address, used_slot in last_slot.items():
            for slot in markers.unvouched(address, slot_map) if lane is None else ():  # a repair has written all of its slots' markers
                leaving = slot in self._topology.on_the_way
                checks[address, slot] = markers.check(address, slot, markers.expected(slot), leaving=leaving)
            for slot in markers.vouching(address, used_slot, slot_map, None if lane is None else lane.places):
                expected = markers.expected(slot) if lane is None else lane.begun(markers.expected(slot))
                leaving = lane is not None and slot in self._topology.on_the_way  # all that is in repair, perhaps
                checks[address, slot] = markers.check(address, slot, expected, leaving=leaving)
        for share in shares:
            if not share.asking:
                continue
            own = markers.any_settled_slot(share.address, slot_map)
            if own is not None and lane is None and share.address not in last_slot:
                checks[share.address, own] = markers.check(share.address, own, markers.expected(own))
            for slot in np.unique(batch.slots_of(share)).tolist():
                expected = markers.expected(slot) if lane is None else lane.begun(markers.expected(slot))
                source = slot_map.address_of(slot)
                checks.setdefault((source, slot), markers.check(source, slot, expected, leaving=True))
                checks[share.address, slot] = markers.check(share.address, slot, expected, importing=True)
        return list(checks.values())


_Open = set[tuple[str, int]]


def _not_vouched(checks: Sequence[Check], slot_map: SlotMap, *, in_repair: bool) -> tuple[_Open, _Open]:
    """Return importing nodes and slots without a marker: those whose source has it, as far as none vouches; those where neither has it."""
    good = {(check.address, check.slot) for check in checks if check.good}
    whole = {check.address for check in checks if check.good and not check.importing}
    without = {(check.address, check.slot) for check in checks if check.not_yet}
    lost = {(address, slot) for address, slot in without if (slot_map.address_of(slot), slot) not in good}
    return {(address, slot) for address, slot in without - lost if address not in whole and not in_repair}, lost


class SlotRows(StoreRows):
    """The facet `rows`; methods without a docstring are those of `StoreRows`."""

    def __init__(
        self, rounds: ClusterRounds, retry: ReadRetry, *, topology: ClusterTopology, access: RedisAccess, repair: StoreRepair
    ) -> None:
        self._rounds, self._retry, self._topology, self._access, self._repair = rounds, retry, topology, access, repair

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return self._retry(lambda: self._rounds.read(parts, deadline), deadline)

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self._rounds.write(parts, deadline)

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        return self._rounds.erase(parts, deadline)

    def node_of(self, keys: RowKeys) -> str:
        return self._topology.address_of(int(keys.slots()[0]))

    def held_on(self, address: str, tables: Sequence[TableDef], deadline: Deadline) -> list[HeldRows | None]:
        return count_rows(self._repair, address, self._access, tables, deadline)

    def bucket_limits(self, address: str, deadline: Deadline) -> BucketLimits:
        return read_limits(address, self._access, deadline)

    def set_bucket_limits(self, address: str, limits: BucketLimits, deadline: Deadline) -> None:
        set_limits(address, self._access, limits, deadline)
