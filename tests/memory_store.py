"""Storage inside this process, for unit tests: the same contract, markers and faults included, without a server.

Nodes are looked up by address in a registry of this process, so that two stores with the same addresses see the same rows, as two clients
of one server would. Rows are kept one by one in a dict: clear, not fast, and never on a real data path.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.coordination.map_copies import MAP_NAME, newest_map
from kvemb.coordination.markers import MARKER_KEY, Identity, Marker, accept, diagnose, why_lost
from kvemb.coordination.replicated_values import Change, ValueCell
from kvemb.coordination.shard_owners import OwnerFence
from kvemb.errors import (
    ClosedError,
    ConfigError,
    NodeUnavailableError,
    NotProvisionedError,
    RecordError,
    StorageError,
    WrongNodeError,
)
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import RowKeys
from kvemb.stores.marked_nodes import RepairLane
from kvemb.stores.read_retry import ReadRetry
from kvemb.stores.redis_server.stored_rows import row_keys_in
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.standalone.node_links import NodeLinks, NodeServer
from kvemb.stores.standalone.node_store import NodesByNumber
from kvemb.stores.store import Capabilities, Store, StoreRows, StoreValues
from kvemb.stores.store_nodes import NodeStats, StoreNodes
from kvemb.stores.store_repair import StoreRepair


@dataclass
class MemoryNode:
    """One node: its values with their compare-and-swap tokens, and a run id that a restarted server would change. Tests may change
    anything here."""

    values: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    next_token: int = 1
    run_id: str = ""
    down: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    def put(self, key: bytes, value: bytes) -> None:
        """Store a value under a fresh token."""
        with self.lock:
            self.values[key] = (value, self.next_token)
            self.next_token += 1

    def put_if(self, key: bytes, value: bytes, token: int) -> int:
        """Store a value only if the key still has that token (0: only if it does not exist); return its new token, 0 if refused."""
        with self.lock:
            if self.values.get(key, (b"", 0))[1] != token:
                return 0
            self.put(key, value)
            return self.values[key][1]

    def erase_if(self, key: bytes, token: int | None) -> bool:
        """Forget a key, with a token only if it still has that one; return whether it is gone."""
        with self.lock:
            held = self.values.get(key, (b"", 0))[1]
            if held and token is not None and held != token:
                return False
            self.values.pop(key, None)
            return True

    @property
    def used_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(len(key) + len(value) for key, (value, _) in self.values.items())

    def flush(self) -> None:
        """Lose everything, as a restarted memcached does."""
        with self.lock:
            self.values.clear()


_NODES: dict[str, MemoryNode] = {}


def memory_node(address: str) -> MemoryNode:
    """Return the node of that address, made on first use."""
    return _NODES.setdefault(address, MemoryNode())


class MemoryNodes(StoreNodes):
    """The nodes, as facet of the store and as a repair sees them (`NodeLinks` and its view)."""

    placements = ()

    def __init__(self, addresses: tuple[str, ...], fence: OwnerFence) -> None:
        self._addresses, self._fence = addresses, fence
        self.map = ClusterMap.first(len(addresses), 1)
        self.nodes = [memory_node(address) for address in addresses]
        self.markers: list[Marker] | None = None
        self.closed = False

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._addresses

    @property
    def cluster_map(self) -> ClusterMap:
        return self.map

    def renew(self, address: str, marker: Marker) -> None:
        assert self.markers is not None, "open() comes first"
        self.markers[self.addresses.index(address)] = marker

    @property
    def view(self) -> "MemoryNodes":
        return self

    def stats(self, deadline: Deadline) -> list[NodeStats]:
        if self.closed:
            raise ClosedError("this store was closed")
        return super().stats(deadline)

    def stats_of(self, address: str, deadline: Deadline) -> NodeStats:
        node = self.at(address)
        return NodeStats(address, "memory", len(node.values), node.used_bytes, 0, 0)

    def max_record_bytes(self, address: str, deadline: Deadline) -> int:
        return 1 << 20

    def alive(self, index: int) -> MemoryNode:
        if self.closed:
            raise ClosedError("this store was closed")
        if self.nodes[index].down:
            raise NodeUnavailableError(f"node {self.addresses[index]}: connection refused")
        return self.nodes[index]

    def at(self, address: str) -> MemoryNode:
        return self.alive(self.addresses.index(address))

    def marker(self, cluster_id: bytes, index: int, generation: bytes) -> Marker:
        return Marker(cluster_id, index, generation, self.map.digest, self.map.serial, self.nodes[index].run_id)

    def copies(self, name: str) -> list[bytes | None]:
        values = [self.alive(index).values.get(name.encode()) for index in range(len(self.nodes))]
        return [value and value[0] for value in values]

    def owners_elsewhere(self, address: str, deadline: Deadline) -> list[bytes | None]:
        return self.copies(self._fence.name)

    def cell(self, address: str, name: str, run_id: str, deadline: Deadline) -> ValueCell:
        key = name.encode()
        return ValueCell(
            f"node {address}",
            name,
            lambda: self.peek(address, [key], deadline)[0],
            lambda old, new: self.swap(address, key, old, new, run_id, deadline),
        )

    def expected(self, address: str) -> Marker:
        assert self.markers is not None, "open() comes first"
        return self.markers[self.addresses.index(address)]

    def number_of(self, address: str) -> int:
        return self.addresses.index(address)

    def look(self, address: str, deadline: Deadline) -> tuple[bytes | None, str]:
        node = self.at(address)
        found = node.values.get(MARKER_KEY)
        return (None if found is None else found[0]), node.run_id

    def peek(self, address: str, keys: list[bytes], deadline: Deadline) -> list[bytes | None]:
        found = [self.at(address).values.get(key) for key in keys]
        return [value and value[0] for value in found]

    def swap(self, address: str, key: bytes, old: bytes | None, new: bytes, run_id: str, deadline: Deadline) -> bool:
        node = self.at(address)
        with node.lock:
            value, token = node.values.get(key, (None, 0))
            return value == old and node.run_id == run_id and node.put_if(key, new, token) != 0


class MemoryValues(StoreValues):
    """Small values, a copy on every node."""

    def __init__(self, nodes: MemoryNodes) -> None:
        self._nodes = nodes

    def get(self, name: str, deadline: Deadline) -> list[bytes | None]:
        return self._nodes.copies(name)

    def put(self, name: str, value: bytes, deadline: Deadline) -> None:
        for index in range(len(self._nodes.nodes)):
            self._nodes.alive(index).put(name.encode(), value)

    def update(self, name: str, change: Change, deadline: Deadline) -> None:
        for address in self._nodes.addresses:
            self._nodes.cell(address, name, self._nodes.look(address, deadline)[1], deadline).update(change)

    def copies_on(self, name: str) -> tuple[str, ...]:
        return tuple(f"node {address}" for address in self._nodes.addresses)

    def mend(self, name: str, copies: Sequence[bytes | None], damaged: Sequence[bool], value: bytes, deadline: Deadline) -> None:
        for address, copy, wrong in zip(self._nodes.addresses, copies, damaged, strict=True):
            if wrong:
                self._nodes.cell(address, name, self._nodes.look(address, deadline)[1], deadline).mend(copy, value)


class MarkedMemory(NodesByNumber):
    """The nodes as a repair sees them, whose keys can be listed."""

    def keys_on(self, address: str, slots: NDArray[np.bool_], deadline: Deadline) -> Iterator[RowKeys]:
        yield from row_keys_in(list(cast(MemoryNodes, self._links).at(address).values))


class MemoryBatches:
    """Batches in a repair."""

    def __init__(self, store: "MemoryStore") -> None:
        self._store = store

    def read(self, parts: Sequence[ReadPart], deadline: Deadline, lane: RepairLane | None = None) -> list[ReadResult]:
        return self._store.read_checked(parts, self._marker(lane))

    def write(self, parts: Sequence[WritePart], deadline: Deadline, lane: RepairLane | None = None) -> list[WriteResult]:
        return self._store.write_checked(parts, self._marker(lane))

    def erase(self, parts: Sequence[WritePart], deadline: Deadline, lane: RepairLane | None = None) -> list[NDArray[np.bool_]]:
        return self._store.erase_checked(parts, self._marker(lane))

    def _marker(self, lane: RepairLane | None) -> dict[int, Marker]:
        assert lane is not None
        nodes = self._store.nodes
        return {nodes.number_of(lane.address): lane.begun(nodes.expected(lane.address))}


class MemoryStore(Store, StoreRows):
    """Nodes of this process. `role` is accepted as by every store and has no meaning here: there are no connections.

    It is its own facet `rows`, so that a test's subclass may spoil reads and writes.
    """

    nodes: MemoryNodes

    def __init__(self, config: StorageConfig, role: str) -> None:
        self._fence = OwnerFence()
        self._retry = ReadRetry(role, config.on_lost_node)
        self.rows = self
        self.nodes = MemoryNodes(config.nodes, self._fence)
        self.values = MemoryValues(self.nodes)
        marked = MarkedMemory(cast(NodeLinks, self.nodes), cast(NodeServer, self.nodes), self._fence)
        self.repair = StoreRepair(marked, MemoryBatches(self), self._fence, lambda: self.nodes.map)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(cas=True)

    def open(self, deadline: Deadline, known: Identity | None = None) -> list[Marker]:
        return self._retry(lambda: self._open(deadline, known), deadline, connecting=True)

    def _open(self, deadline: Deadline, known: Identity | None) -> list[Marker]:
        raw = [self.nodes.look(address, deadline)[0] for address in self.nodes.addresses]
        first = next((value for value in raw if value), None)
        if known is None and first is None:
            raise NotProvisionedError("memory storage holds no markers")
        origin = known or Marker.decode(first or b"", "memory")
        copies = self.values.get(MAP_NAME, deadline)
        self.nodes.map = newest_map(copies, known=None if known is None else known.cluster_map) or self.nodes.map
        if self.nodes.map.n_nodes != len(self.nodes.nodes):
            raise ConfigError(
                f"{len(self.nodes.nodes)} given, the cluster map (serial {self.nodes.map.serial}) has {self.nodes.map.n_nodes}"
            )
        markers = []
        for index, (address, value) in enumerate(zip(self.nodes.addresses, raw, strict=True)):
            wanted = self.nodes.marker(origin.cluster_id, index, origin.generation)
            lost = known is not None and why_lost(address, wanted, value, wanted.run_id)
            markers.append(wanted if lost else accept(address, wanted, value, wanted.run_id))
        self.nodes.markers = markers
        return markers

    def provision(self, cluster_id: bytes, generation: bytes, deadline: Deadline, n_shards: int = 1) -> None:
        self.nodes.map = ClusterMap.first(len(self.nodes.nodes), n_shards)
        wanted = [self.nodes.marker(cluster_id, index, generation).encode() for index in range(len(self.nodes.nodes))]
        for index, marker in enumerate(wanted):
            values = {key: value for key, (value, _) in self.nodes.alive(index).values.items()}
            values.pop(MAP_NAME.encode(), None)
            if values and values != {MARKER_KEY: marker}:
                raise WrongNodeError(f"node {self.nodes.addresses[index]}: not empty; provisioning writes on empty nodes only")
        for node, marker in zip(self.nodes.nodes, wanted, strict=True):
            node.put(MAP_NAME.encode(), self.nodes.map.encode())
            node.put(MARKER_KEY, marker)

    def fence(self, shard: int, epoch: int, deadline: Deadline, *, still_ours: Callable[[], None] | None = None) -> None:
        self._fence.begin(shard, epoch, lambda name: self.values.get(name, deadline), still_ours)

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return self._retry(lambda: self.read_checked(parts, self._expected_of(parts)), deadline)

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self.write_checked(parts, self._expected_of(parts))

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        return self.erase_checked(parts, self._expected_of(parts))

    def read_checked(self, parts: Sequence[ReadPart], expected: dict[int, Marker]) -> list[ReadResult]:
        results = self._read(parts)
        self._check(expected)
        return results

    def write_checked(self, parts: Sequence[WritePart], expected: dict[int, Marker]) -> list[WriteResult]:
        self._require_not_fenced()
        results = self._write(parts)
        self._check(expected)
        return results

    def erase_checked(self, parts: Sequence[WritePart], expected: dict[int, Marker]) -> list[NDArray[np.bool_]]:
        self._require_not_fenced()
        gone = self._erase(parts)
        self._check(expected)
        return gone

    def _read(self, parts: Sequence[ReadPart]) -> list[ReadResult]:
        results = []
        for part in parts:
            keys, nodes = part.keys.encode(), self._route(part.keys.slots())
            records = np.zeros((len(keys), part.prefix_bytes), dtype=np.uint8)
            found, tokens = np.zeros(len(keys), dtype=bool), np.zeros(len(keys), dtype=np.uint64)
            foreign = np.zeros(len(keys), dtype=bool)
            for row, (key, node) in enumerate(zip(keys, nodes, strict=True)):
                value, token = self.nodes.alive(node).values.get(bytes(key), (b"", 0))
                if token and len(value) != part.record_bytes and part.foreign:
                    foreign[row], tokens[row] = True, token
                    continue
                if token and len(value) != part.record_bytes:
                    raise RecordError(
                        f"node {self.nodes.addresses[node]}, id {part.keys.ids[row]}: {len(value)} bytes, expected {part.record_bytes}"
                    )
                if token:
                    found[row], tokens[row] = True, token
                    records[row] = np.frombuffer(value[: part.prefix_bytes], dtype=np.uint8)
            order = np.argsort(nodes, kind="stable")
            given = tokens[order] if part.tokens else None
            results.append(ReadResult(records[order], found[order], order, given, foreign[order] if part.foreign else None))
        return results

    def _write(self, parts: Sequence[WritePart]) -> list[WriteResult]:
        results = []
        for part in parts:
            tokens = part.tokens.copy() if part.tokens is not None else np.zeros(len(part.keys), dtype=np.uint64)
            stored = np.zeros(len(part.keys), dtype=bool)
            nodes = self._route(part.keys.slots())
            for row, key in enumerate(part.keys.encode()):
                token = self.nodes.alive(nodes[row]).put_if(bytes(key), bytes(part.records[row]), int(tokens[row]))
                stored[row], tokens[row] = token != 0, token
            results.append(WriteResult(stored, tokens))
        return results

    def _erase(self, parts: Sequence[WritePart]) -> list[NDArray[np.bool_]]:
        results = []
        for part in parts:
            gone = np.ones(len(part.keys), dtype=bool)
            nodes = self._route(part.keys.slots())
            for row, key in enumerate(part.keys.encode()):
                gone[row] = self.nodes.alive(nodes[row]).erase_if(bytes(key), None if part.tokens is None else int(part.tokens[row]))
            results.append(gone)
        return results

    def node_of(self, keys: RowKeys) -> str:
        nodes = self.nodes.map.nodes_of(keys)
        return self.nodes.addresses[0 if nodes is None else int(nodes[0])]

    def close(self) -> None:
        self.nodes.closed = True

    def _route(self, slots: NDArray[np.int64]) -> NDArray[np.uint16]:
        return self.nodes.map.slot_nodes[slots]

    def _expected_of(self, parts: Sequence[ReadPart] | Sequence[WritePart]) -> dict[int, Marker]:
        """The markers of the nodes that a batch touches, renewed as a new connection would renew them."""
        if self.nodes.markers is None:
            return {}
        touched = sorted({int(node) for part in parts for node in self._route(part.keys.slots())})
        for index in touched:
            got, run_id = self.nodes.look(self.nodes.addresses[index], Deadline.after(1))
            with suppress(StorageError):  # the check after the batch says it
                self.nodes.markers[index] = accept(self.nodes.addresses[index], self.nodes.markers[index], got, run_id)
        return {index: self.nodes.markers[index] for index in touched}

    def _check(self, expected: dict[int, Marker]) -> None:
        for index, marker in expected.items():
            got, run_id = self.nodes.look(self.nodes.addresses[index], Deadline.after(1))
            if got != marker.encode() or run_id != marker.run_id:
                raise diagnose(self.nodes.addresses[index], replace(marker, run_id=run_id), got)

    def _require_not_fenced(self) -> None:
        if self._fence.name:
            self._fence.require_not_behind(self.values.get(self._fence.name, Deadline.after(1)))
