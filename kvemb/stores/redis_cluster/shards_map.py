"""The cluster map of a cluster that places its slots itself: it says the shards alone, and the cluster has one copy, under a key.

That copy goes where its slot goes, and is lost with its primary. Shards know the map, and put it back. The highest version counts.
"""

from kvemb.coordination.map_copies import MAP_NAME, is_behind, map_in_force, newest_map
from kvemb.coordination.markers import Identity
from kvemb.errors import ProtocolError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.process import ForkLock
from kvemb.schema.cluster_map import ClusterMap
from kvemb.stores.redis_cluster.cluster_topology import ClusterTopology
from kvemb.stores.redis_cluster.cluster_values import ClusterValues

_MAX_TRIES = 100


class ShardsMap:
    """The map that one store follows, and its copy in the cluster. Thread-safe.

    Args:
        values: where the copy lies.
        topology: which node holds it, for messages.

    Attributes:
        now: the newest that is known.
    """

    def __init__(self, values: ClusterValues, topology: ClusterTopology) -> None:
        self._values, self._topology = values, topology
        self._changing = ForkLock()
        self.now = ClusterMap.first(0, 1)  # until the store is opened

    def open(self, origin: Identity, deadline: Deadline) -> None:
        """Follow the newest of the copy and of the map that the identity knows; raises as `map_in_force`."""
        copy = self._values.get(MAP_NAME, deadline)
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
        for _ in range(_MAX_TRIES):
            copy, ours = self._values.look(MAP_NAME, deadline), self.now
            if not is_behind(copy, ours):
                return
            if self._values.swap(MAP_NAME, copy, ours.encode(), deadline):
                return
        raise ProtocolError(f"{self._topology.holder_of(MAP_NAME)}: {MAP_NAME} changed {_MAX_TRIES} times while it was to be written")

    def _follow(self, cluster_map: ClusterMap) -> bool:
        with self._changing:
            newer = cluster_map.version > self.now.version
            if newer:
                self.now = cluster_map
            return newer
