"""What memcached and standalone Redis share: nodes under a cluster map of ours, one marker per node.

A store is put together from parts, each in a file of its own: the server's kind, links to the nodes, batches of rows, and repair.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.coordination.map_copies import MAP_NAME, newest_map
from kvemb.coordination.markers import MARKER_KEY, Identity, Marker, accept, diagnose, why_lost
from kvemb.coordination.shard_notes import note_name, whose_keys
from kvemb.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidInputError,
    KvembError,
    MapChangedError,
    NodeLostError,
    NodeUnavailableError,
    StorageError,
    WrongNodeError,
)
from kvemb.net.deadline import Deadline
from kvemb.process import ForkLock
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import RowKeys
from kvemb.schema.move_plan import NODES
from kvemb.stores.coalesce import write_coalesced
from kvemb.stores.owner_fence import OwnerFence
from kvemb.stores.read_retry import ABSENT, ReadRetry
from kvemb.stores.repairable import LostNode
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.standalone.map_publisher import MapPublisher
from kvemb.stores.standalone.moving_rows import MovingRows
from kvemb.stores.standalone.node_links import NodeLinks, NodeServer
from kvemb.stores.standalone.node_repair import NodeRepair
from kvemb.stores.standalone.node_rows import NodeRows, RepairLane
from kvemb.stores.standalone.nodes_view import NodesView, moved_meanwhile, places_to_write
from kvemb.stores.standalone.seen_nodes import SeenNodes, new_marker
from kvemb.stores.store import NodeStats, Store
from kvemb.wire.codec import Codec

_FOLLOW_PAUSE_S, _FOLLOW_TIMEOUT_S = 1.0, 2.0
_SLEPT_S, _LOOK_S = 2.0, 1.0
_LOOKS_AT_OPEN = 3
log = logging.getLogger("kvemb")


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
        self._publishing = MapPublisher(self._links, server)
        self._nodes_now: Callable[[], tuple[str, ...]] | None = None
        self._changing, self._not_before_s = ForkLock(), 0.0
        self._read_at_s = time.monotonic()
        self._other: tuple[ClusterMap, MovingRows] | None = None

    # --- opening ----------------------------------------------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._links.addresses

    @property
    def cluster_map(self) -> ClusterMap:
        return self._links.map

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
        self._links.follow = self._follow
        with self._links.meta_pool.lease(view.addresses, deadline):  # so that the first batch need not connect
            return list(view.markers.values())

    # --- following the cluster map ------------------------------------------------------------------------------------------------

    def follow(self, nodes_now: Callable[[], tuple[str, ...]]) -> None:
        self._nodes_now = nodes_now

    def find_nodes(self, deadline: Deadline) -> None:
        with suppress(KvembError):
            view = SeenNodes(self._server, self._links).view(None, deadline, inspect=False)
            self._links.view = NodesView(view.map, view.places)

    def refresh_map(self, deadline: Deadline) -> bool:
        return not self._has_newest(deadline) and self._refresh_map(deadline)

    def _has_newest(self, deadline: Deadline) -> bool:
        """Whether every node answers, on connections that there are, and none has a newer map."""
        view, half = self._links.view, Deadline.after(deadline.remaining_s() / 2)
        found = self._links.each(lambda address, share: self._links.peek(address, [MAP_NAME.encode()], share)[0], half)
        if any(isinstance(copy, StorageError) for copy in found):
            return False
        copies = [copy for copy in found if not isinstance(copy, StorageError)]
        newest = newest_map(copies, view.addresses, view.map)
        return newest is not None and newest.version <= view.map.version

    def _refresh_map(self, deadline: Deadline, newest: ClusterMap | None = None) -> bool:
        before = self._links.view
        seen = SeenNodes(self._server, self._links)
        cluster_map, places = seen.places(before, newest or before.map, deadline)
        with self._changing:
            now = self._links.view
            if self.role != "trainer":
                places = places_to_write(now, cluster_map, places)
            if (cluster_map.version, places) == (now.map.version, now.places) or cluster_map.version < now.map.version:
                return now is not before
            self._links.view = now.changed(cluster_map, places)
        if (addresses := self._links.addresses) != now.addresses:
            log.warning("storage nodes are now at %s; until now %s", ", ".join(addresses), ", ".join(now.addresses))
        return True

    def _follow(self, error: StorageError) -> bool:
        """After an error that nodes at other addresses, or another map, would explain: whether there are."""
        if not isinstance(error, MapChangedError):
            if time.monotonic() < self._not_before_s:  # a node that is down for long is asked for again and again
                return False
            self._not_before_s = time.monotonic() + _FOLLOW_PAUSE_S
        if self._nodes_now is not None:
            try:
                self._links.in_file = self._nodes_now()
            except ConfigError as why:
                raise type(error)(f"{error} {why}") from error
        elif not isinstance(error, (MapChangedError, NodeUnavailableError, WrongNodeError)):
            return False
        return self._refresh_map(Deadline.after(min(self.config.timeout_s, _FOLLOW_TIMEOUT_S)))

    def publish_map(self, cluster_map: ClusterMap, deadline: Deadline) -> list[str]:
        before = self.addresses  # those that leave are told, too
        if cluster_map.version > self.cluster_map.version:
            self._refresh_map(deadline, cluster_map)
        return self._publishing.publish_map(cluster_map, dict.fromkeys([*self.addresses, *before]), deadline)

    def renew_markers(self, deadline: Deadline) -> list[str]:
        return self._publishing.renew_markers(deadline)

    @property
    def places(self) -> tuple[str, ...]:
        return self._links.view.places

    def require_empty(self, address: str, deadline: Deadline) -> None:
        self._publishing.require_empty(address, deadline)

    def prepare_node(self, address: str, number: int, metas: Mapping[str, bytes], deadline: Deadline) -> None:
        self._publishing.prepare_node(address, number, metas, deadline)

    @property
    def other(self) -> MovingRows | None:
        cluster_map = self._links.map
        if cluster_map.plan is None or cluster_map.plan.kind != NODES:
            return None
        of, rows = self._other or (None, None)
        if of is not cluster_map or rows is None:
            self._other = of, rows = cluster_map, MovingRows(self._rows, cluster_map)
        return rows

    # --- provisioning -------------------------------------------------------------------------------------------------------------

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
        self._fence.begin(shard, epoch, lambda name: self.get_meta(name, deadline), still_ours)

    def close(self) -> None:
        self._links.close()

    # --- rows -------------------------------------------------------------------------------------------------------------------

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        now_s = time.monotonic()
        if now_s - self._read_at_s > _SLEPT_S and self.role == "trainer" and self._links.view.markers:
            # Nodes may have left meanwhile, and been switched off: whoever asks them would wait for his whole deadline.
            with suppress(StorageError, ConfigError):
                self.refresh_map(Deadline.after(min(_LOOK_S, deadline.remaining_s() / 2)))
        self._read_at_s = now_s
        before = self._links.view
        try:
            return self._rows.read(parts, deadline)
        except (*ABSENT, DeadlineExceededError) as error:
            failed = [error]

        def again() -> list[ReadResult]:
            if failed:
                raise failed.pop()  # of the first try, which had no retry around it
            return self._rows.read(parts, deadline)

        return self._retry(self._links.following(again, before), deadline)

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        with self._map_known():
            return self._write(parts, deadline)

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        with self._map_known():
            return self._rows.erase(parts, deadline)

    @contextmanager
    def _map_known(self) -> Iterator[None]:
        """Read the map again where a write was routed by an old one; whether rows were written is for the caller to find out."""
        try:
            yield
        except MapChangedError as error:
            self._links.follow(error)
            raise

    def read_in_repair(self, address: str, nonce: str, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return self._rows.read(parts, deadline, self._lane(address, nonce, parts, deadline))

    def write_in_repair(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self._write(parts, deadline, self._lane(address, nonce, parts, deadline))

    def erase_in_repair(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        return self._rows.erase(parts, deadline, self._lane(address, nonce, parts, deadline))

    def _write(self, parts: Sequence[WritePart], deadline: Deadline, lane: RepairLane | None = None) -> list[WriteResult]:
        one_node = self._links.map.n_nodes == 1
        return write_coalesced(parts, lambda coalesced: self._rows.write(coalesced, deadline, lane), one_node=one_node)

    def node_of(self, keys: RowKeys) -> str:
        view = self._links.view
        nodes = view.map.nodes_of(keys)
        return view.places[0 if nodes is None else int(nodes[0])]

    # --- small values, and what the servers say of themselves -------------------------------------------------------------------

    def get_meta(self, name: str, deadline: Deadline) -> list[bytes | None]:
        key = name.encode()
        return self._retry(self._links.following(lambda: self._links.blobs(key, deadline)), deadline)

    def put_meta(self, name: str, value: bytes, deadline: Deadline) -> None:
        self._links.put_blobs(name.encode(), value, deadline)

    def metas_where_possible(self, names: Sequence[str], deadline: Deadline) -> list[list[bytes | None]]:
        keys = [name.encode() for name in names]
        found = self._links.each(lambda address, share: self._links.peek(address, keys, share), deadline)
        by_node = [copies for copies in found if not isinstance(copies, StorageError)]
        return [[copies[at] for copies in by_node] for at in range(len(names))]

    def put_meta_where_possible(self, name: str, value: bytes, deadline: Deadline) -> None:
        errors = self._links.each(lambda address, share: self._links.put_at(address, name.encode(), value, share), deadline)
        if errors and all(errors):
            raise next(error for error in errors if error is not None)

    def mend_copies(self, name: str, copies: Sequence[bytes | None], damaged: Sequence[bool], value: bytes, deadline: Deadline) -> None:
        self._repair.mend_copies(name, copies, damaged, value, deadline)

    def stats(self, deadline: Deadline) -> list[NodeStats]:
        self._links.pool.require_open()
        return self._stats_in_turn(deadline)

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

    def finish_repair(self, address: str, nonce: str, shards: Collection[int], deadline: Deadline) -> bool:
        return self._repair.finish_repair(address, nonce, shards, deadline)

    def _lane(self, address: str, nonce: str, parts: Sequence[ReadPart] | Sequence[WritePart], deadline: Deadline) -> RepairLane:
        """What a batch in repair is sent by."""
        if not all(self.keys_of(address, part.keys).all() for part in parts):
            if self._links.map.plan is not None:  # its phase has changed since the caller chose the rows
                raise moved_meanwhile(address)
            raise InvalidInputError(f"a batch that repairs node {address} holds rows of other nodes")
        return RepairLane(self._links.number_of(address), self._repair.require_repair(address, nonce, deadline))
