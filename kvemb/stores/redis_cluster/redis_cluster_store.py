"""Redis Cluster (and Valkey's): rows by RESP on links of our own to every primary; the cluster's own slot map, MOVED and ASK followed.

Keys belong to slots and slots move between nodes, so there is one marker per slot. A batch reads one per node, in a slot that it uses. A
row that was redirected is asked for again, within the same deadline, together with all other redirected rows of its batch.

The store is put together from parts, each in a file of its own; what a part needs, it is given when it is made:

    connector, topology   who opens connections; who holds which slots
    values, whole, map    small values; among them the list of whole primaries, and the cluster map
    markers               of every slot
    rounds, repairs       batches of rows; the repair of a primary
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.coordination.map_copies import MAP_NAME
from kvemb.coordination.markers import Identity, Marker, diagnose, first_identity
from kvemb.coordination.shard_notes import note_name, whose_keys
from kvemb.errors import InvalidInputError, NotProvisionedError, WrongNodeError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.net.pool import Doubts, LinkPool
from kvemb.net.tls_link import connector_of
from kvemb.schema.bucket_limits import BucketLimits
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import RowKeys
from kvemb.schema.slots import N_SLOTS
from kvemb.schema.table_def import TableDef
from kvemb.stores.coalesce import write_coalesced
from kvemb.stores.owner_fence import OwnerFence
from kvemb.stores.read_retry import ReadRetry
from kvemb.stores.redis_cluster.cluster_batch import EraseBatch, ReadBatch, WriteBatch
from kvemb.stores.redis_cluster.cluster_members import MEMBERS, encode_members, process_of
from kvemb.stores.redis_cluster.cluster_repair import ClusterRepair
from kvemb.stores.redis_cluster.cluster_rounds import ClusterRounds
from kvemb.stores.redis_cluster.cluster_topology import ClusterTopology
from kvemb.stores.redis_cluster.cluster_values import ClusterValues
from kvemb.stores.redis_cluster.node_change import CHANGE_NAME, NodeChange
from kvemb.stores.redis_cluster.primary_links import PrimaryConnector
from kvemb.stores.redis_cluster.shards_map import ShardsMap
from kvemb.stores.redis_cluster.slot_markers import Begun, SlotMarkers, slot_marker
from kvemb.stores.redis_cluster.whole_primaries import WholePrimaries
from kvemb.stores.redis_server import hash_limits, held_rows, redis_admin
from kvemb.stores.redis_server.redis_commands import MAX_VALUE_BYTES, RedisAccess
from kvemb.stores.redis_server.row_scan import rows_on
from kvemb.stores.repairable import LostNode
from kvemb.stores.row_io import HeldRows, ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.store import Capabilities, NodeStats, Store, UnfinishedChange


class RedisClusterStore(Store):
    """A cluster that moves its own slots. `config.nodes` are starting points; the primaries are learnt from them.

    It has as many methods as the port of stores: most hand on to a part.
    """

    capabilities = Capabilities(cas=False, max_record_bytes=MAX_VALUE_BYTES, pages=True)

    def __init__(self, config: StorageConfig, role: str) -> None:
        self.config, self.role = config, role
        self._access = access = RedisAccess(config, connector_of(config.tls))
        self._retry = ReadRetry(role, config.on_lost_node)
        self._fence = OwnerFence()
        self._connector = PrimaryConnector(access, role, self._fence)
        doubts = Doubts()
        self._pool = LinkPool(self._checked_link, self._connector.dropped, doubts)
        self._plain_pool = LinkPool(self._connector.connect, self._connector.dropped, doubts)  # to primaries in any state
        self._topology = ClusterTopology(access)
        self._values = ClusterValues(self._topology, self._plain_pool, self._retry)
        self._map = ShardsMap(self._values, self._topology)
        self._whole = WholePrimaries(access, self._values)
        self._markers = SlotMarkers(self._topology, self._values, self._plain_pool)
        self._rounds = ClusterRounds(self._topology, self._markers, self._pool, self._plain_pool)
        self._repairs = ClusterRepair(access, self._topology, self._values, self._whole, self._markers, self._map, self._fence)

    # --- opening ----------------------------------------------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._topology.addresses

    @property
    def cluster_map(self) -> ClusterMap:
        return self._map.now

    def open(self, deadline: Deadline, known: Identity | None = None) -> list[Marker]:
        return self._retry(lambda: self._open(deadline, known), deadline, connecting=True)

    def _open(self, deadline: Deadline, known: Identity | None) -> list[Marker]:
        self._pool.require_open()
        self._inspect(deadline)
        slot_map = self._topology.slot_map(deadline)
        values = self._markers.all(deadline)
        origin = known or self._identity(values)
        self._map.open(origin, deadline)
        self._markers.pin(values, origin, self._topology.owners(slot_map), may_be_lost=known is not None)
        self._whole.check_from_now_on()
        self._whole.known = self._whole.read(deadline)
        for address in self.addresses if known is None else ():
            self._whole.require(address, redis_admin.info(address, self._access, deadline), deadline)
        return [self._markers.expected(slot) for slot in range(N_SLOTS)]

    def provision(self, cluster_id: bytes, generation: bytes, deadline: Deadline, n_shards: int = 1) -> None:
        n_keys, processes = self._inspect(deadline)
        values = self._markers.all(deadline)
        wanted = [slot_marker(cluster_id, slot, generation) for slot in range(N_SLOTS)]
        for slot, value in enumerate(values):
            if value is not None and value != wanted[slot].encode():
                raise diagnose(self._topology.slot_name(slot), wanted[slot], value)
        n_markers = sum(value is not None for value in values)
        n_keys -= sum(self._values.get(name, deadline) is not None for name in (MEMBERS, MAP_NAME))
        if n_keys != n_markers:
            where, note = ", ".join(self.config.nodes), self._values.get(note_name(0), deadline)
            raise WrongNodeError(
                f"{whose_keys(where, n_keys - n_markers, None, note, time.time())}. A new cluster begins on empty nodes: correct "
                "storage.nodes in kvemb.yaml."
            )
        self._values.put(MEMBERS, encode_members(processes), deadline)
        self._values.put(MAP_NAME, ClusterMap.first(0, n_shards).encode(), deadline)  # before any marker: who finds one looks for it
        self._markers.put_all([marker.encode() for marker in wanted], deadline)

    def close(self) -> None:
        self._pool.close()
        self._plain_pool.close()

    # --- who the shards are -------------------------------------------------------------------------------------------------------

    def unfinished_change(self, deadline: Deadline) -> UnfinishedChange | None:
        data = self._values.look(CHANGE_NAME, deadline)
        if data is None:
            return None
        change, slot_map = NodeChange.decode(data), self._topology.refreshed(deadline)
        names = [slot_map.names.get(address, "") for address in slot_map.addresses]
        return UnfinishedChange(change.kind, change.left([names[node] for node in slot_map.nodes.tolist()]), change.aborting)

    def refresh_map(self, deadline: Deadline) -> bool:
        return self._map.refresh(deadline)

    def publish_map(self, cluster_map: ClusterMap, deadline: Deadline) -> list[str]:
        return self._map.publish(cluster_map, deadline)

    def renew_markers(self, deadline: Deadline) -> list[str]:
        return []  # they name no map

    # --- who may write ----------------------------------------------------------------------------------------------------------

    def fence(self, shard: int, epoch: int, deadline: Deadline, *, still_ours: Callable[[], None] | None = None) -> None:
        self._fence.begin(shard, epoch, lambda name: self.get_meta(name, deadline), still_ours)

    def kill_other_writers(self, deadline: Deadline) -> int:
        return self._connector.kill_other_writers(self._topology.refreshed(deadline).addresses, deadline)

    # --- rows -------------------------------------------------------------------------------------------------------------------

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return self._retry(lambda: self._read(parts, deadline), deadline)

    def _read(self, parts: Sequence[ReadPart], deadline: Deadline, repair: Begun | None = None) -> list[ReadResult]:
        batch = ReadBatch(parts)
        self._rounds.run(batch, deadline, repair)
        return batch.results

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self._write(parts, deadline)

    def _write(self, parts: Sequence[WritePart], deadline: Deadline, repair: Begun | None = None) -> list[WriteResult]:
        def run(coalesced: Sequence[WritePart]) -> list[WriteResult]:
            self._rounds.run(WriteBatch(coalesced), deadline, repair)
            return [WriteResult(np.ones(len(part.keys), dtype=bool)) for part in coalesced]

        return write_coalesced(parts, run)

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        return self._erase(parts, deadline)

    def _erase(self, parts: Sequence[WritePart], deadline: Deadline, repair: Begun | None = None) -> list[NDArray[np.bool_]]:
        self._rounds.run(EraseBatch(parts), deadline, repair)
        return [np.ones(len(part.keys), dtype=bool) for part in parts]

    def node_of(self, keys: RowKeys) -> str:
        return self._topology.address_of(int(keys.slots()[0]))

    # --- small values, and what the servers say of themselves -------------------------------------------------------------------

    def get_meta(self, name: str, deadline: Deadline) -> list[bytes | None]:
        return [self._values.get(name, deadline)]

    def copies_on(self, name: str) -> tuple[str, ...]:
        return (self._topology.holder_of(name),)

    def mend_copies(self, name: str, copies: Sequence[bytes | None], damaged: Sequence[bool], value: bytes, deadline: Deadline) -> None:
        self._values.mend(name, copies, damaged, value, deadline)

    def put_meta(self, name: str, value: bytes, deadline: Deadline) -> None:
        self._values.put(name, value, deadline)

    def stats(self, deadline: Deadline) -> list[NodeStats]:
        self._pool.require_open()
        self._topology.refreshed(deadline)
        return self._stats_in_turn(deadline)

    def held_rows(self, address: str, tables: Sequence[TableDef], deadline: Deadline) -> list[HeldRows | None]:
        return held_rows.held_rows(self, address, self._access, tables, deadline)

    def bucket_limits(self, address: str, deadline: Deadline) -> BucketLimits:
        return hash_limits.read_limits(address, self._access, deadline)

    def set_bucket_limits(self, address: str, limits: BucketLimits, deadline: Deadline) -> None:
        hash_limits.set_limits(address, self._access, limits, deadline)

    def settings(self, address: str, deadline: Deadline) -> dict[str, str]:
        return redis_admin.settings(address, self._access, deadline)

    def _node_stats(self, address: str, deadline: Deadline) -> NodeStats:
        return redis_admin.node_stats(address, redis_admin.info(address, self._access, deadline), self.config)

    # --- repair -----------------------------------------------------------------------------------------------------------------

    def lost_nodes(self, deadline: Deadline) -> list[LostNode]:
        return self._repairs.lost_nodes(deadline)

    def looks_lost(self, deadline: Deadline) -> bool:
        return self._repairs.looks_lost(deadline)

    def begin_repair(self, address: str, deadline: Deadline, *, even_if_whole: bool = False) -> str | None:
        return self._repairs.begin_repair(address, deadline, even_if_whole=even_if_whole)

    def keys_of(self, address: str, keys: RowKeys) -> NDArray[np.bool_]:
        return self._repairs.keys_of(address, keys)

    def keys_on(self, address: str, deadline: Deadline) -> Iterator[RowKeys]:
        return rows_on(address, self._access, deadline)

    def read_in_repair(self, address: str, nonce: str, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return self._read(parts, deadline, self._lane(address, nonce, parts))

    def write_in_repair(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self._write(parts, deadline, self._lane(address, nonce, parts))

    def erase_in_repair(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        return self._erase(parts, deadline, self._lane(address, nonce, parts))

    def make_way(self, keys: RowKeys, deadline: Deadline, *, repair: tuple[str, str] | None = None) -> int:
        return self._repairs.make_way(keys, deadline, repair=repair)

    def put_meta_in_repair(self, address: str, nonce: str, name: str, value: bytes, deadline: Deadline) -> None:
        self._repairs.put_meta_in_repair(address, nonce, name, value, deadline)

    def report_repaired(self, address: str, nonce: str, shard: int, deadline: Deadline) -> None:
        self._repairs.report_repaired(address, nonce, shard, deadline)

    def finish_repair(self, address: str, nonce: str, shards: Collection[int], deadline: Deadline) -> bool:
        return self._repairs.finish_repair(address, nonce, shards, deadline)

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _checked_link(self, address: str, deadline: Deadline) -> Link:
        """A new connection for rows: one that leads to a primary that is known to be whole."""
        link = self._connector.connect(address, deadline)
        try:
            self._whole.check(link, deadline)
        except BaseException:
            link.close()
            raise
        return link

    def _lane(self, address: str, nonce: str, parts: Sequence[ReadPart] | Sequence[WritePart]) -> Begun:
        """What a batch in repair expects."""
        if not all(self.keys_of(address, part.keys).all() for part in parts):
            raise InvalidInputError(f"a batch that repairs node {address} holds rows of other nodes")
        return self._repairs.begun_as(address, nonce)

    def _identity(self, values: Sequence[bytes | None]) -> Identity:
        """What the first good marker says."""
        found = first_identity([self._topology.slot_name(slot) for slot in range(len(values))], values)
        if found is not None:
            return found
        raise NotProvisionedError(
            f"no slot of the cluster at {', '.join(self.config.nodes)} holds a marker: it is new, or all of its data is gone. "
            "Parameter-server shard 0 provisions empty nodes when it starts for the first time."
        )

    def _inspect(self, deadline: Deadline) -> tuple[int, set[str]]:
        """Refuse unsafe primaries; return the number of keys in all, and the primaries' processes."""
        n_keys, processes = 0, set()
        for address in self._topology.refreshed(deadline).addresses:
            fields = redis_admin.info(address, self._access, deadline)
            redis_admin.require_safe(address, fields, self.config)
            n_keys += redis_admin.number_in(address, fields, "n_keys")
            processes.add(process_of(fields))
        return n_keys, processes
