"""The store of memcached and standalone Redis: nodes under a cluster map of ours, one marker per node. Put together from its facets."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from kvemb.config import StorageConfig
from kvemb.coordination.map_copies import MAP_NAME
from kvemb.coordination.markers import MARKER_KEY, Identity, Marker, accept, diagnose, why_lost
from kvemb.coordination.shard_notes import note_name, whose_keys
from kvemb.errors import MapChangedError, NodeLostError, WrongNodeError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from kvemb.stores.owner_fence import OwnerFence
from kvemb.stores.read_retry import ReadRetry
from kvemb.stores.standalone.mapped_nodes import MappedNodes
from kvemb.stores.standalone.node_links import NodeLinks, NodeServer
from kvemb.stores.standalone.node_repair import PlacedRepair
from kvemb.stores.standalone.node_rows import NodeRows
from kvemb.stores.standalone.nodes_view import NodesView
from kvemb.stores.standalone.placed_rows import NodeValues, PlacedRows
from kvemb.stores.standalone.seen_nodes import SeenNodes, new_marker
from kvemb.stores.store import Capabilities, Store
from kvemb.wire.codec import Codec

_LOOKS_AT_OPEN = 3


class NodeStore(Store):
    """Rows spread over nodes by the slots of their keys.

    Args:
        config: the storage section.
        role: "trainer", or "shard:<n>" for the one process that writes shard n's rows.
        codec: of the nodes' protocol.
        server: the operations special to their kind.
    """

    rows: PlacedRows
    nodes: MappedNodes

    def __init__(self, config: StorageConfig, role: str, codec: Codec, server: NodeServer) -> None:
        reads_only = role == "trainer"
        self._server = server
        self._retry = ReadRetry(role, config.on_lost_node)
        self._fence = OwnerFence()
        self._links = links = NodeLinks(server, codec, config.nodes, self._fence)
        batches = NodeRows(links, codec, cas=server.capabilities.cas)
        self.nodes = MappedNodes(links, server, config, writes=not reads_only)
        self.values = NodeValues(links, self._retry)
        self.repair = PlacedRepair(links, server, batches, self._fence)
        refresh_map = self.nodes.refresh_map if reads_only else None
        self.rows = PlacedRows(batches, links, server, retry=self._retry, repair=self.repair, refresh_map=refresh_map)

    @property
    def capabilities(self) -> Capabilities:
        return self._server.capabilities

    def open(self, deadline: Deadline, known: Identity | None = None) -> list[Marker]:
        for _ in range(_LOOKS_AT_OPEN - 1):
            with suppress(MapChangedError):  # slots moved between the look at the map and that at the markers
                return self._retry(lambda: self._open(deadline, known), deadline, connecting=True)
        return self._retry(lambda: self._open(deadline, known), deadline, connecting=True)

    def _open(self, deadline: Deadline, known: Identity | None) -> list[Marker]:
        self._links.pool.require_open()
        self._links.meta_pool = self._links.pool if known is None else self._links.plain_pool
        seen = SeenNodes(self._server, self._links)
        view = seen.view(known, deadline)
        for address in view.addresses:
            run_id, value = seen.require(address, deadline)
            expected = replace(view.markers[address], run_id=run_id)
            if known is not None and why_lost(address, expected, value, run_id, view.placements):
                view.markers[address] = expected
                continue
            if value is None:  # lost, whatever else differs: other nodes do hold a marker
                raise NodeLostError(
                    f"node {address}: holds no marker while other nodes have that of cluster {expected.cluster_id.hex()}. It is none of "
                    "that cluster's, or was restarted empty, flushed or replaced, and its rows are lost there. Nothing was re-initialised."
                )
            view.markers[address] = accept(address, expected, value, run_id, view.placements)
        self._links.view = view
        self._links.follow = self.nodes.follow_error
        with self._links.meta_pool.lease(view.addresses, deadline):  # so that the first batch need not connect
            return list(view.markers.values())

    def provision(self, cluster_id: bytes, generation: bytes, deadline: Deadline, n_shards: int = 1) -> None:
        nodes = self._links.in_file
        cluster_map = ClusterMap.first(len(nodes), n_shards, nodes)
        self._links.view = NodesView(cluster_map, nodes)
        inspected = [self._server.inspect(address, deadline) for address in nodes]
        raw = self._links.blobs(MARKER_KEY, deadline)
        wanted = [new_marker(Identity(cluster_id, generation), i, cluster_map, run_id) for i, (run_id, _) in enumerate(inspected)]
        copies = self._links.blobs(MAP_NAME.encode(), deadline)
        for address, (_, n_keys), value, marker, maps in zip(nodes, inspected, raw, wanted, copies, strict=True):
            if value is None and n_keys > (maps is not None):
                (note,) = self._links.first_look(address, [note_name(0).encode()], deadline)
                raise WrongNodeError(
                    f"{whose_keys(address, n_keys, value, note, time.time())}. A new cluster begins on empty nodes: correct storage.nodes "
                    "in kvemb.yaml."
                )
            if value is not None and value != marker.encode():
                raise diagnose(address, marker, value)
        self._links.put_blobs(MAP_NAME.encode(), cluster_map.encode(), deadline)  # before any marker names it
        self._links.put_blobs(MARKER_KEY, [marker.encode() for marker in wanted], deadline)

    def fence(self, shard: int, epoch: int, deadline: Deadline, *, still_ours: Callable[[], None] | None = None) -> None:
        self._fence.begin(shard, epoch, lambda name: self.values.get(name, deadline), still_ours)

    def kill_other_writers(self, deadline: Deadline) -> int:
        return self._server.kill_other_writers(self.nodes.addresses, deadline)

    def close(self) -> None:
        self._links.close()
