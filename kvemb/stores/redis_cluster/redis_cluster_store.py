"""Redis Cluster (and Valkey's): rows by RESP on links of our own to every primary; the cluster's own slot map, MOVED and ASK followed.

Keys belong to slots and slots move between nodes, so there is one marker per slot. A batch reads one per node, in a slot that it uses. A
row that was redirected is asked for again, within the same deadline, together with all other redirected rows of its batch.

The store is put together from parts, each in a file of its own; a part is given all it needs when it is made:

    connector, topology   opens connections; which node holds which slots
    values, whole, map    small values; among them the list of whole primaries, and the cluster map
    markers               of every slot
    rounds                batches of rows
"""

import time
from collections.abc import Callable, Sequence

from kvemb.config import StorageConfig
from kvemb.coordination.map_copies import MAP_NAME
from kvemb.coordination.markers import Identity, Marker, diagnose, first_identity
from kvemb.coordination.shard_notes import note_name, whose_keys
from kvemb.coordination.shard_owners import OwnerFence
from kvemb.errors import NotProvisionedError, WrongNodeError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.net.pool import Doubts, LinkPool
from kvemb.net.tls_link import connector_of
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.slots import N_SLOTS
from kvemb.stores.read_retry import ReadRetry
from kvemb.stores.redis_cluster.cluster_primaries import ClusterPrimaries, ShardsMap
from kvemb.stores.redis_cluster.cluster_repair import SlotsOfPrimaries
from kvemb.stores.redis_cluster.cluster_rows import ClusterRounds, SlotRows
from kvemb.stores.redis_cluster.cluster_values import ClusterValues
from kvemb.stores.redis_cluster.primary_links import PrimaryConnector
from kvemb.stores.redis_cluster.slot_map import ClusterTopology
from kvemb.stores.redis_cluster.slot_markers import SlotMarkers, slot_marker
from kvemb.stores.redis_cluster.whole_primaries import MEMBERS, WholePrimaries, encode_members, process_of
from kvemb.stores.redis_server import redis_admin
from kvemb.stores.redis_server.redis_login import RedisAccess
from kvemb.stores.store import Capabilities, Store
from kvemb.stores.store_repair import StoreRepair


class RedisClusterStore(Store):
    """A cluster that moves its own slots. `config.nodes` are starting points; the primaries are learnt from them."""

    values: ClusterValues
    capabilities = Capabilities(cas=False, pages=True)

    def __init__(self, config: StorageConfig, role: str) -> None:
        self._config = config
        self._access = access = RedisAccess(config, connector_of(config.tls))
        self._retry = ReadRetry(role, config.on_lost_node)
        self._fence, self._asked = OwnerFence(), redis_admin.CommandsAsked(access, role)
        self._connector = PrimaryConnector(access, role, self._fence)
        doubts = Doubts()
        self._pool = LinkPool(self._checked_link, self._connector.dropped, doubts)
        self._plain_pool = LinkPool(self._connector.connect, self._connector.dropped, doubts)  # to primaries in any state
        self._topology = ClusterTopology(access)
        self.values = ClusterValues(self._topology, self._plain_pool, self._retry)
        self._map = ShardsMap(self.values, self._topology)
        self._whole = WholePrimaries(access, self.values)
        self._markers = SlotMarkers(self._topology, self.values, self._plain_pool)
        rounds = ClusterRounds(self._topology, self._markers, self._pool, self._plain_pool)
        primaries = SlotsOfPrimaries(access, self._topology, self.values, self._whole, self._markers, self._map, self._fence)
        self.repair = StoreRepair(primaries, rounds, self._fence, lambda: self._map.now)
        self.rows = SlotRows(rounds, self._retry, topology=self._topology, access=access, repair=self.repair)
        self.nodes = ClusterPrimaries(self._topology, self.values, self._map, access, self._pool)

    # --- opening ----------------------------------------------------------------------------------------------------------------

    def open(self, deadline: Deadline, known: Identity | None = None) -> list[Marker]:
        return self._retry(lambda: self._open(deadline, known), deadline, connecting=True)

    def _open(self, deadline: Deadline, known: Identity | None) -> list[Marker]:
        self._pool.require_open()
        self._topology.known_before = () if known is None else known.nodes
        self._inspect(deadline)
        slot_map = self._topology.slot_map(deadline)
        values = self._markers.all(deadline)
        origin = known or self._identity(values)
        self._map.open(origin, deadline)
        self._markers.pin(values, origin, self._topology.owners(slot_map), may_be_lost=known is not None)
        self._whole.check_from_now_on()
        self._whole.known = self._whole.read(deadline)
        for address in self._topology.addresses if known is None else ():
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
        n_keys -= sum(self.values.one(name, deadline) is not None for name in (MEMBERS, MAP_NAME))
        if n_keys != n_markers:
            where, note = ", ".join(self._config.nodes), self.values.one(note_name(0), deadline)
            raise WrongNodeError(
                f"{whose_keys(where, n_keys - n_markers, None, note, time.time())}. A new cluster begins on empty nodes: correct "
                "storage.nodes in kvemb.yaml."
            )
        self.values.put(MEMBERS, encode_members(processes), deadline)
        self.values.put(MAP_NAME, ClusterMap.first(0, n_shards).encode(), deadline)  # before any marker, which makes a store read it
        self._markers.put_all([marker.encode() for marker in wanted], deadline)

    def close(self) -> None:
        self._pool.close()
        self._plain_pool.close()

    # --- the owner that writes --------------------------------------------------------------------------------------------------

    def fence(self, shard: int, epoch: int, deadline: Deadline, *, still_ours: Callable[[], None] | None = None) -> None:
        self._fence.begin(shard, epoch, lambda name: self.values.get(name, deadline), still_ours)

    def kill_other_writers(self, deadline: Deadline) -> int:
        return self._connector.kill_others(self._topology.refreshed(deadline).addresses, deadline)

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

    def _identity(self, values: Sequence[bytes | None]) -> Identity:
        """The identity that the first good marker names."""
        found = first_identity((self._topology.slot_name(slot) for slot in range(len(values))), values)
        if found is not None:
            return found
        raise NotProvisionedError(
            f"no slot of the cluster at {', '.join(self._config.nodes)} holds a marker: it is new, or all of its data is gone. "
            "Parameter-server shard 0 provisions empty nodes when it starts for the first time."
        )

    def _inspect(self, deadline: Deadline) -> tuple[int, set[str]]:
        """Refuse unsafe primaries; return the number of keys in all, and the primaries' processes."""
        n_keys, processes = 0, set()
        for address in self._topology.refreshed(deadline).addresses:
            fields = redis_admin.info(address, self._access, deadline)
            redis_admin.require_safe(address, fields, self._config)
            self._asked.require(address, fields["run_id"], deadline)
            n_keys += redis_admin.number_in(address, fields, "n_keys")
            processes.add(process_of(fields))
        return n_keys, processes
