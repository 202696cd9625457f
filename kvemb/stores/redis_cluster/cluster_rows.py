"""The facets `rows` and `nodes` of a Redis Cluster's store."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.net.deadline import Deadline
from kvemb.net.pool import LinkPool
from kvemb.schema.bucket_limits import BucketLimits
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import RowKeys
from kvemb.schema.table_def import TableDef
from kvemb.stores.read_retry import ReadRetry
from kvemb.stores.redis_cluster.cluster_rounds import ClusterRounds
from kvemb.stores.redis_cluster.cluster_topology import ClusterTopology
from kvemb.stores.redis_cluster.cluster_values import ClusterValues
from kvemb.stores.redis_cluster.node_change import CHANGE_NAME, NodeChange
from kvemb.stores.redis_cluster.shards_map import ShardsMap
from kvemb.stores.redis_server import hash_limits, held_rows, redis_admin
from kvemb.stores.redis_server.redis_commands import RedisAccess
from kvemb.stores.row_io import HeldRows, ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.store import StoreRows
from kvemb.stores.store_nodes import NodeStats, StoreNodes, UnfinishedChange
from kvemb.stores.store_repair import StoreRepair


class SlotRows(StoreRows):
    """The facet `rows`; methods without a docstring are those of `StoreRows`.

    Args:
        rounds: batches of rows.
        retry: repeats reads while a primary is down.
        topology: which node holds which slot.
        access: how servers are reached.
        repair: says which keys are a primary's.
    """

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
        return held_rows.held_rows(self._repair, address, self._access, tables, deadline)

    def bucket_limits(self, address: str, deadline: Deadline) -> BucketLimits:
        return hash_limits.read_limits(address, self._access, deadline)

    def set_bucket_limits(self, address: str, limits: BucketLimits, deadline: Deadline) -> None:
        hash_limits.set_limits(address, self._access, limits, deadline)


class ClusterPrimaries(StoreNodes):
    """The facet `nodes`; methods without a docstring are those of `StoreNodes`.

    Args:
        topology: which node holds which slot.
        values: small values.
        shards_map: the cluster map, of which the cluster has a copy.
        access: how servers are reached.
        pool: of the store's links.
    """

    def __init__(
        self, topology: ClusterTopology, values: ClusterValues, shards_map: ShardsMap, access: RedisAccess, pool: LinkPool
    ) -> None:
        self._topology, self._values, self._map, self._access, self._pool = topology, values, shards_map, access, pool

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._topology.addresses

    @property
    def cluster_map(self) -> ClusterMap:
        return self._map.now

    def refresh_map(self, deadline: Deadline) -> bool:
        return self._map.refresh(deadline)

    def publish_map(self, cluster_map: ClusterMap, deadline: Deadline) -> list[str]:
        return self._map.publish(cluster_map, deadline)

    def renew_markers(self, deadline: Deadline) -> list[str]:
        return []  # they name no map

    def unfinished_change(self, deadline: Deadline) -> UnfinishedChange | None:
        data = self._values.look(CHANGE_NAME, deadline)
        if data is None:
            return None
        change, slot_map = NodeChange.decode(data), self._topology.refreshed(deadline)
        names = [slot_map.names.get(address, "") for address in slot_map.addresses]
        return UnfinishedChange(change.kind, change.left([names[node] for node in slot_map.nodes.tolist()]), change.aborting)

    def stats(self, deadline: Deadline) -> list[NodeStats]:
        self._pool.require_open()
        self._topology.refreshed(deadline)
        return super().stats(deadline)

    def stats_of(self, address: str, deadline: Deadline) -> NodeStats:
        return redis_admin.node_stats(address, redis_admin.info(address, self._access, deadline), self._access.config)

    def settings(self, address: str, deadline: Deadline) -> dict[str, str]:
        return redis_admin.settings(address, self._access, deadline)
