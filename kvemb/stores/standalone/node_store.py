"""The store of memcached and standalone Redis: nodes under a cluster map of ours, one marker per node. Put together from its facets.

The facets `rows` and `values` are here, too: calls are tried again where nodes or their map have changed.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.coordination.map_copies import MAP_NAME, put_newer
from kvemb.coordination.markers import MARKER_KEY, Identity, Marker, accept, diagnose, why_lost
from kvemb.coordination.replicated_values import Change, ValueCell
from kvemb.coordination.shard_notes import note_name, whose_keys
from kvemb.coordination.shard_owners import OwnerFence
from kvemb.errors import (
    ConfigError,
    DeadlineExceededError,
    MapChangedError,
    NodeLostError,
    NodeUnavailableError,
    StorageError,
    WrongNodeError,
)
from kvemb.net.deadline import Deadline
from kvemb.schema.bucket_limits import BucketLimits
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import Containers, RowKeys
from kvemb.schema.move_plan import NODES
from kvemb.schema.table_def import TableDef
from kvemb.stores.marked_nodes import MarkedNodes, MarkedState, RepairLane
from kvemb.stores.read_retry import ABSENT, ReadRetry
from kvemb.stores.row_io import HeldRows, ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.standalone.mapped_nodes import MappedNodes, SeenNodes, new_marker
from kvemb.stores.standalone.node_links import NodeLinks, NodeServer
from kvemb.stores.standalone.node_rows import MovingRows, NodeRows
from kvemb.stores.standalone.nodes_view import NodesView
from kvemb.stores.store import Capabilities, Store, StoreRows, StoreValues
from kvemb.stores.store_repair import StoreRepair
from kvemb.wire.codec import Codec

_LOOKS_AT_OPEN = 3
_SLEPT_S, _LOOK_S = 2.0, 1.0


class PlacedRows(StoreRows):
    """The facet `rows`; methods without a docstring are those of `StoreRows`."""

    def __init__(
        self,
        batches: NodeRows,
        links: NodeLinks,
        server: NodeServer,
        *,
        retry: ReadRetry,
        repair: StoreRepair,
        refresh_map: Callable[[Deadline], bool] | None,
    ) -> None:
        self._batches, self._links, self._server = batches, links, server
        self._retry, self._repair, self._refresh_map = retry, repair, refresh_map
        self._read_at_s = time.monotonic()
        self._moving: tuple[ClusterMap, MovingRows] | None = None

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        now_s = time.monotonic()
        if now_s - self._read_at_s > _SLEPT_S and self._refresh_map is not None and self._links.view.markers:
            # Nodes may have left meanwhile, and been switched off: a read from them would wait for its whole deadline.
            with suppress(StorageError, ConfigError):
                self._refresh_map(Deadline.after(min(_LOOK_S, deadline.remaining_s() / 2)))
        self._read_at_s = now_s
        before = self._links.view
        try:
            return self._batches.read(parts, deadline)
        except (*ABSENT, DeadlineExceededError) as error:
            failed = [error]

        def again() -> list[ReadResult]:
            if failed:
                raise failed.pop()  # of the first try, which had no retry around it
            return self._batches.read(parts, deadline)

        return self._retry(self._links.following(again, deadline, before), deadline)

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        with self._map_known():
            return self._batches.write(parts, deadline)

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        with self._map_known():
            return self._batches.erase(parts, deadline)

    @contextmanager
    def _map_known(self) -> Iterator[None]:
        """Read the map again where a write was routed by an old one; whether rows were written is for the caller to find out."""
        try:
            yield
        except MapChangedError as error:
            self._links.follow(error, None)
            raise

    @property
    def moving(self) -> MovingRows | None:
        cluster_map = self._links.view.map
        if cluster_map.plan is None or cluster_map.plan.kind != NODES:
            return None
        of, rows = self._moving or (None, None)
        if of is not cluster_map or rows is None:
            self._moving = of, rows = cluster_map, MovingRows(self._batches, cluster_map)
        return rows

    def node_of(self, keys: RowKeys) -> str:
        view = self._links.view
        nodes = view.map.nodes_of(keys)
        return view.places[0 if nodes is None else int(nodes[0])]

    def held_on(self, address: str, tables: Sequence[TableDef], deadline: Deadline) -> list[HeldRows | None]:
        return self._server.held_on(address, self._repair, tables, deadline)

    def bucket_limits(self, address: str, deadline: Deadline) -> BucketLimits | None:
        return self._server.bucket_limits(address, deadline)

    def set_bucket_limits(self, address: str, limits: BucketLimits, deadline: Deadline) -> None:
        self._server.set_bucket_limits(address, limits, deadline)


class NodeValues(StoreValues):
    """The facet `values`: every node has a copy of each; methods without a docstring are those of `StoreValues`."""

    def __init__(self, links: NodeLinks, retry: ReadRetry) -> None:
        self._links, self._retry = links, retry

    def get(self, name: str, deadline: Deadline) -> list[bytes | None]:
        return self._retry(self._links.following(lambda: self._links.blobs(name.encode(), deadline), deadline), deadline)

    def put(self, name: str, value: bytes, deadline: Deadline) -> None:
        self._links.put_blobs(name.encode(), value, deadline)

    def update(self, name: str, change: Change, deadline: Deadline) -> None:
        for address, share in deadline.shared(self._links.view.addresses):
            self._links.cell(address, name, self._links.look(address, share)[1], share).update(change)

    def get_where_possible(self, names: Sequence[str], deadline: Deadline) -> list[list[bytes | None]]:
        keys = [name.encode() for name in names]
        found = self._links.each(lambda address, share: self._links.peek(address, keys, share), deadline)
        by_node = [copies for copies in found if not isinstance(copies, StorageError)]
        return [[copies[at] for copies in by_node] for at in range(len(names))]

    def put_where_possible(self, name: str, value: bytes, deadline: Deadline) -> None:
        errors = self._links.each(lambda address, share: self._links.put_at(address, name.encode(), value, share), deadline)
        if errors and all(errors):
            raise next(error for error in errors if error is not None)

    def copies_on(self, name: str) -> tuple[str, ...]:
        return tuple(f"node {address}" for address in self._links.view.addresses)

    def mend(self, name: str, copies: Sequence[bytes | None], damaged: Sequence[bool], value: bytes, deadline: Deadline) -> None:
        for address, copy, wrong in zip(self._links.view.addresses, copies, damaged, strict=True):
            if wrong:
                run_id = self._links.look(address, deadline)[1]
                self._links.cell(address, name, run_id, deadline).mend(copy, value)


class NodeStore(Store):
    """Rows spread over nodes by the slots of their keys."""

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
        self.repair = StoreRepair(NodesByNumber(links, server, self._fence), batches, self._fence, lambda: links.view.map)
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
        for at, (address, (run_id, _), maps) in enumerate(zip(nodes, inspected, copies, strict=True)):
            if maps is None and not self._server.swap(address, MAP_NAME.encode(), None, cluster_map.encode(), run_id, deadline):
                raise ConfigError(
                    f"storage.nodes: {address} leads to the same server as {' or '.join(nodes[:at])}; each node is a server of its own. No "
                    "row and no marker was written: correct storage.nodes in kvemb.yaml, and start the shard again."
                )
        self._links.put_blobs(MAP_NAME.encode(), cluster_map.encode(), deadline)  # before any marker names it
        self._links.put_blobs(MARKER_KEY, [marker.encode() for marker in wanted], deadline)

    def fence(self, shard: int, epoch: int, deadline: Deadline, *, still_ours: Callable[[], None] | None = None) -> None:
        self._fence.begin(shard, epoch, lambda name: self.values.get(name, deadline), still_ours)

    def kill_other_writers(self, deadline: Deadline) -> int:
        return self._server.kill_other_writers(self.nodes.addresses, deadline)

    def close(self) -> None:
        self._links.close()
        self.nodes.close()


log = logging.getLogger("kvemb")


class NodesByNumber(MarkedNodes):
    """Nodes under a map of ours, with one marker each; methods without a docstring are those of `MarkedNodes`."""

    def __init__(self, links: NodeLinks, server: NodeServer, fence: OwnerFence) -> None:
        self._links, self._server, self._fence = links, server, fence

    def keys_on(self, address: str, slots: NDArray[np.bool_], deadline: Deadline) -> Iterator[RowKeys] | None:
        return self._server.keys_on(address, slots, deadline)

    def make_way(self, containers: Containers, deadline: Deadline, lane: RepairLane | None) -> int:
        n_changed = 0
        for address in self._links.view.addresses if lane is None else [lane.address]:
            names = [bytes(key) for key in containers.keys.encode()[self.slots_of(address)[containers.keys.slots()]]]
            if names:
                run_id = self._links.look(address, deadline)[1] if lane is None else lane.process
                n_changed += self._server.make_way(address, names, containers, run_id, deadline, clear=lane is not None)
        return n_changed

    def addresses(self, deadline: Deadline) -> Sequence[str]:
        return self._links.view.addresses

    def state(self, address: str, deadline: Deadline, lane: RepairLane | None = None) -> MarkedState:
        (got, run_id), view = self._links.look(address, deadline), self._links.view
        judged = why_lost(address, view.expected(address), got, run_id, view.placements)
        if judged is None and got is not None:  # perhaps renewed by another shard
            view.renew(address, Marker.decode(got, address))
        return MarkedState(address, run_id, np.array([view.number_of(address)]), [got], [judged])

    def expected(self, state: MarkedState, at: int) -> Marker:
        # Naming the map in force: a shard that has seen a flip writes no marker from before it.
        return replace(self._links.view.expected(state.address), run_id=state.process).naming(self._links.view.map)

    def swap(self, state: MarkedState, changes: Mapping[int, Marker], deadline: Deadline) -> bool:
        return all(
            self._server.swap(state.address, MARKER_KEY, state.values[at], marker.encode(), state.process, deadline)
            for at, marker in changes.items()
        )

    def slots_of(self, address: str, lane: RepairLane | None = None) -> NDArray[np.bool_]:
        cluster_map, number = self._links.view.map, self._links.view.number_of(address)
        mine: NDArray[np.bool_] = cluster_map.slot_nodes == number
        if cluster_map.second_nodes is not None:  # rows that a move brings there belong there, too
            mine |= cluster_map.second_nodes == number
        return mine

    def cell(self, address: str, name: str, process: str, deadline: Deadline) -> ValueCell:
        return self._links.cell(address, name, process, deadline)

    def report(self, lane: RepairLane, shard: int) -> tuple[str, bytes]:
        return f"kvemb:repaired:{shard}", lane.nonce.encode()

    def covers(self, report: bytes | None, lane: RepairLane, places: NDArray[np.int64]) -> bool:
        return report == lane.nonce.encode()

    def over(self, lane: RepairLane, shards: Collection[int], deadline: Deadline) -> None:
        view = self._links.view
        view.renew(lane.address, lane.ended(replace(view.expected(lane.address), run_id=lane.process)).naming(view.map))

    def keep(self, whole: Sequence[MarkedState], deadline: Deadline) -> None:
        for state, share in deadline.shared(whole if self._fence.record else ()):
            try:
                elsewhere = partial(self._links.owners_elsewhere, state.address, share)
                self._fence.keep(self.cell(state.address, self._fence.name, state.process, share), elsewhere)
                put_newer(self.cell(state.address, MAP_NAME, state.process, share), self._links.view.map)
            except (NodeUnavailableError, DeadlineExceededError) as error:
                log.warning("%s", error)
