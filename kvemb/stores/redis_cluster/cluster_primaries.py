"""The facet `nodes` of a Redis Cluster's store, and the cluster map there, which says the shards alone.

The cluster places its slots itself, and has one copy of that map, under a key. The copy goes where its slot goes, and is lost with its
primary. Shards know the map, and put it back. The highest version counts.
"""

import re

from kvemb.coordination.map_copies import MAP_NAME, map_in_force, newest_map, put_newer
from kvemb.coordination.markers import Identity
from kvemb.errors import StorageError
from kvemb.net.deadline import Deadline
from kvemb.net.pool import LinkPool
from kvemb.process import ForkLock
from kvemb.schema.cluster_map import ClusterMap
from kvemb.stores.redis_cluster.cluster_values import ClusterValues
from kvemb.stores.redis_cluster.slot_map import ClusterTopology
from kvemb.stores.redis_server import redis_admin
from kvemb.stores.redis_server.redis_commands import ask, text_of
from kvemb.stores.redis_server.redis_login import RedisAccess, logged_in
from kvemb.stores.store_nodes import NodeStats, StoreNodes

_OPEN = re.compile(r"\[(\d{1,5})-[<>]-")  # in CLUSTER NODES


class ShardsMap:
    """The newest map that one store knows (`now`), and its copy in the cluster. Thread-safe."""

    def __init__(self, values: ClusterValues, topology: ClusterTopology) -> None:
        self._values, self._topology = values, topology
        self._changing = ForkLock()
        self.now = ClusterMap.first(0, 1)  # until the store is opened

    def open(self, origin: Identity, deadline: Deadline) -> None:
        """Follow the newest of the copy and of the map that the identity knows; raises as `map_in_force`."""
        copy = self._values.one(MAP_NAME, deadline)
        self.now = map_in_force([copy], (self._topology.holder_of(MAP_NAME),), origin)

    def refresh(self, deadline: Deadline) -> bool:
        """Look at the copy, and follow it where it is newer; return whether it is."""
        newest = newest_map([self._values.look(MAP_NAME, deadline)], (self._topology.holder_of(MAP_NAME),), self.now)
        return newest is not None and self._follow(newest)

    def publish(self, cluster_map: ClusterMap, deadline: Deadline) -> list[str]:
        """See `StoreNodes.publish_map`."""
        self._follow(cluster_map)
        try:
            self.keep(deadline)
        except StorageError as error:
            return [str(error)]
        return []

    def keep(self, deadline: Deadline) -> None:
        """Let the copy be the map that is followed, unless it is a newer one."""
        put_newer(self._values.cell(MAP_NAME, deadline), self.now)

    def _follow(self, cluster_map: ClusterMap) -> bool:
        with self._changing:
            newer = cluster_map.version > self.now.version
            if newer:
                self.now = cluster_map
            return newer


class ClusterPrimaries(StoreNodes):
    """The facet `nodes`; methods without a docstring are those of `StoreNodes`."""

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

    def open_slots(self, deadline: Deadline) -> list[int]:
        found: set[str] = set()
        for address, share in deadline.shared(self._topology.refreshed(deadline).addresses):
            with logged_in(address, self._access, share) as link:
                told = text_of(link, ask(link, share, "CLUSTER", "NODES"), "CLUSTER NODES")
            found.update(_OPEN.findall(told))  # a node tells its own only
        return sorted(map(int, found))

    def stats(self, deadline: Deadline) -> list[NodeStats]:
        self._pool.require_open()
        self._topology.refreshed(deadline)
        return super().stats(deadline)

    def stats_of(self, address: str, deadline: Deadline) -> NodeStats:
        return redis_admin.node_stats(address, redis_admin.info(address, self._access, deadline), self._access.config)

    def settings(self, address: str, deadline: Deadline) -> dict[str, str]:
        return redis_admin.settings(address, self._access, deadline)
