"""What memcached and standalone Redis share: nodes under a cluster map of ours, one marker per node.

A store is put together from parts, each in a file of its own: the server's kind, links to the nodes, batches of rows, and repair.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.coordination.map_copies import MAP_NAME, map_in_force
from kvemb.coordination.markers import MARKER_KEY, Identity, Marker, accept, diagnose, first_identity, why_lost
from kvemb.errors import ConfigError, InvalidInputError, NodeLostError, NotProvisionedError, WrongNodeError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import RowKeys
from kvemb.stores.coalesce import read_coalesced, write_coalesced
from kvemb.stores.owner_fence import OwnerFence
from kvemb.stores.read_retry import PASSING, ReadRetry
from kvemb.stores.repairable import LostNode
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.standalone.node_links import NodeLinks, NodeServer
from kvemb.stores.standalone.node_repair import NodeRepair
from kvemb.stores.standalone.node_rows import NodeRows
from kvemb.stores.store import NodeStats, Store
from kvemb.wire.codec import Codec


class NodeStore(Store):
    """Rows spread over nodes by the slots of their keys. It has as many methods as the port of stores: most hand on to a part.

    Args:
        config: the storage section.
        role: "trainer", or "shard:<n>" for the one process that writes shard n's rows.
        codec: of the nodes' protocol.
        server: what is special to their kind.
        cas: whether writes are compare-and-swap, see `Capabilities`.
    """

    def __init__(self, config: StorageConfig, role: str, codec: Codec, server: NodeServer, *, cas: bool) -> None:
        self.config, self.role = config, role
        self._server = server
        self._retry = ReadRetry(role, config.on_lost_node)
        self._fence = OwnerFence()
        self._links = NodeLinks(server, codec, config.nodes, self._fence)
        self._rows = NodeRows(self._links, codec, cas=cas)
        self._repair = NodeRepair(self._links, self._fence)

    # --- opening ----------------------------------------------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._links.addresses

    @property
    def cluster_map(self) -> ClusterMap:
        return self._links.map

    def open(self, deadline: Deadline, known: Identity | None = None) -> list[Marker]:
        return self._retry(lambda: self._open(deadline, known), deadline, PASSING)

    def _open(self, deadline: Deadline, known: Identity | None) -> list[Marker]:
        self._links.pool.require_open()
        self._links.meta_pool = self._links.pool if known is None else self._links.plain_pool
        run_ids = {address: self._server.inspect(address, deadline)[0] for address in self.addresses}
        raw = self._links.blobs(MARKER_KEY, deadline)
        identity = known or self._identity(raw)
        self._links.map = self._map_on_nodes(identity, deadline)
        markers = {}
        for index, (address, value) in enumerate(zip(self.addresses, raw, strict=True)):
            expected = self._marker(identity, index, run_ids[address])
            if known is not None and why_lost(address, expected, value, expected.run_id):
                markers[address] = expected
                continue
            if value is None:  # lost, whatever else differs: other nodes do hold a marker
                raise NodeLostError(
                    f"node {address}: holds no marker while other nodes do: it was restarted empty, flushed or replaced. Its rows are lost "
                    "there; nothing was re-initialised."
                )
            markers[address] = accept(address, expected, value, expected.run_id)
        self._links.markers = markers
        return list(markers.values())

    def follow(self, nodes_now: Callable[[], tuple[str, ...]]) -> None:
        self._links.nodes_now = nodes_now

    def _map_on_nodes(self, identity: Identity, deadline: Deadline) -> ClusterMap:
        found = map_in_force(self._links.blobs(MAP_NAME.encode(), deadline), self.copies_on(MAP_NAME), identity)
        if found.n_nodes != len(self.addresses):
            raise ConfigError(
                f"storage.nodes: {len(self.addresses)} given, the cluster map (serial {found.serial}) has {found.n_nodes}. Name the nodes "
                "that the cluster was made with, in that order."
            )
        return found

    def provision(self, cluster_id: bytes, generation: bytes, deadline: Deadline, n_shards: int = 1) -> None:
        self._links.map = ClusterMap.first(len(self.addresses), n_shards)
        inspected = [self._server.inspect(address, deadline) for address in self.addresses]
        raw = self._links.blobs(MARKER_KEY, deadline)
        wanted = [self._marker(Identity(cluster_id, generation), i, run_id) for i, (run_id, _) in enumerate(inspected)]
        copies = self._links.blobs(MAP_NAME.encode(), deadline)
        for address, (_, n_keys), value, marker, maps in zip(self.addresses, inspected, raw, wanted, copies, strict=True):
            if value is None and n_keys > (maps is not None):
                raise WrongNodeError(
                    f"node {address}: holds {n_keys} keys and no marker. Provisioning writes on empty nodes only; empty the node "
                    "yourself if its data is not needed, or give another one."
                )
            if value is not None and value != marker.encode():
                raise diagnose(address, marker, value)
        self._links.put_blobs(MAP_NAME.encode(), [self._links.map.encode()] * len(self.addresses), deadline)  # before any marker names it
        self._links.put_blobs(MARKER_KEY, [marker.encode() for marker in wanted], deadline)

    def fence(self, shard: int, epoch: int, deadline: Deadline, *, still_ours: Callable[[], None] | None = None) -> None:
        self._fence.begin(shard, epoch, lambda name: self.get_meta(name, deadline), still_ours)

    def close(self) -> None:
        self._links.close()

    # --- rows -------------------------------------------------------------------------------------------------------------------

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return self._retry(self._links.following(lambda: self._read(parts, deadline)), deadline)

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self._write(parts, deadline)

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        return self._rows.erase(parts, deadline, None)

    def read_in_repair(self, address: str, nonce: str, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return self._read(parts, deadline, self._lane(address, nonce, parts, deadline))

    def write_in_repair(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self._write(parts, deadline, self._lane(address, nonce, parts, deadline))

    def erase_in_repair(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        return self._rows.erase(parts, deadline, self._lane(address, nonce, parts, deadline))

    def _read(self, parts: Sequence[ReadPart], deadline: Deadline, repair: Marker | None = None) -> list[ReadResult]:
        return read_coalesced(parts, lambda coalesced: self._rows.read(coalesced, deadline, repair))

    def _write(self, parts: Sequence[WritePart], deadline: Deadline, repair: Marker | None = None) -> list[WriteResult]:
        one_node = len(self.addresses) == 1
        return write_coalesced(parts, lambda coalesced: self._rows.write(coalesced, deadline, repair), one_node=one_node)

    def node_of(self, keys: RowKeys) -> str:
        nodes = self._links.map.nodes_of(keys)
        return self.addresses[0 if nodes is None else int(nodes[0])]

    # --- small values, and what the servers say of themselves -------------------------------------------------------------------

    def get_meta(self, name: str, deadline: Deadline) -> list[bytes | None]:
        key = name.encode()
        return self._retry(self._links.following(lambda: self._links.blobs(key, deadline)), deadline)

    def put_meta(self, name: str, value: bytes, deadline: Deadline) -> None:
        self._links.put_blobs(name.encode(), [value] * len(self.addresses), deadline)

    def mend_copies(self, name: str, copies: Sequence[bytes | None], damaged: Sequence[bool], value: bytes, deadline: Deadline) -> None:
        self._repair.mend_copies(name, copies, damaged, value, deadline)

    def stats(self, deadline: Deadline) -> list[NodeStats]:
        self._links.pool.require_open()
        return [self.stats_or_error(address, deadline) for address in self.addresses]

    # --- repair -----------------------------------------------------------------------------------------------------------------

    def lost_nodes(self, deadline: Deadline) -> list[LostNode]:
        return self._repair.lost_nodes(deadline)

    def begin_repair(self, address: str, deadline: Deadline, *, even_if_whole: bool = False) -> str | None:
        return self._repair.begin_repair(address, deadline, even_if_whole=even_if_whole)

    def keys_of(self, address: str, keys: RowKeys) -> NDArray[np.bool_]:
        return self._repair.keys_of(address, keys)

    def put_meta_in_repair(self, address: str, nonce: str, name: str, value: bytes, deadline: Deadline) -> None:
        self._repair.put_meta_in_repair(address, nonce, name, value, deadline)

    def report_repaired(self, address: str, nonce: str, shard: int, deadline: Deadline) -> None:
        self._repair.report_repaired(address, nonce, shard, deadline)

    def finish_repair(self, address: str, nonce: str, n_shards: int, deadline: Deadline) -> bool:
        return self._repair.finish_repair(address, nonce, n_shards, deadline)

    def _lane(self, address: str, nonce: str, parts: Sequence[ReadPart] | Sequence[WritePart], deadline: Deadline) -> Marker:
        """The marker that a batch in repair expects."""
        if not all(self.keys_of(address, part.keys).all() for part in parts):
            raise InvalidInputError(f"a batch that repairs node {address} holds rows of other nodes")
        return self._repair.require_repair(address, nonce, deadline)

    def _marker(self, identity: Identity, node: int, run_id: str) -> Marker:
        return Marker(identity.cluster_id, node, identity.generation, self._links.map.digest, self._links.map.serial, run_id)

    def _identity(self, raw: Sequence[bytes | None]) -> Identity:
        """What the first good marker says."""
        found = first_identity(self.addresses, raw)
        if found is not None:
            return found
        raise NotProvisionedError(
            f"none of the nodes {', '.join(self.addresses)} holds a marker: the cluster is new, or all of its data is gone. "
            "Parameter-server shard 0 provisions empty nodes when it starts for the first time."
        )
