"""Storage inside this process, for unit tests: the same contract, markers and faults included, without a server.

Nodes are looked up by address in a registry of this process, so that two stores with the same addresses see the same rows, as two clients
of one server would. Rows are kept one by one in a dict: clear, not fast, and never on a real data path.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.coordination.map_copies import MAP_NAME, newest_map
from kvemb.coordination.markers import MARKER_KEY, Identity, Marker, accept, diagnose, why_lost
from kvemb.errors import (
    ClosedError,
    ConfigError,
    InvalidInputError,
    NodeUnavailableError,
    NotProvisionedError,
    RecordError,
    StorageError,
    WrongNodeError,
)
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import RowKeys
from kvemb.stores.owner_fence import OwnerFence
from kvemb.stores.read_retry import ReadRetry
from kvemb.stores.redis_server.key_parsing import row_keys_in
from kvemb.stores.repairable import LostNode
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.standalone.node_repair import NodeRepair
from kvemb.stores.store import Capabilities, NodeStats, Store


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


class MemoryStore(Store):
    """Nodes of this process. `role` is accepted as by every store and has no meaning here: there are no connections."""

    def __init__(self, config: StorageConfig, role: str) -> None:
        self._addresses = config.nodes
        self.map = ClusterMap.first(len(config.nodes), 1)
        self._nodes = [memory_node(address) for address in config.nodes]
        self._markers: list[Marker] | None = None
        self._closed = False
        self._retry = ReadRetry(role, config.on_lost_node)
        self._fence = OwnerFence()
        self._repair = NodeRepair(self, self._fence)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(cas=True, max_record_bytes=1 << 20)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._addresses

    @property
    def cluster_map(self) -> ClusterMap:
        return self.map

    def open(self, deadline: Deadline, known: Identity | None = None) -> list[Marker]:
        return self._retry(lambda: self._open(deadline, known), deadline, connecting=True)

    def _open(self, deadline: Deadline, known: Identity | None) -> list[Marker]:
        raw = [self.look(address, deadline)[0] for address in self.addresses]
        first = next((value for value in raw if value), None)
        if known is None and first is None:
            raise NotProvisionedError("memory storage holds no markers")
        origin = known or Marker.decode(first or b"", "memory")
        copies = self.get_meta(MAP_NAME, deadline)
        self.map = newest_map(copies, known=None if known is None else known.cluster_map) or self.map
        if self.map.n_nodes != len(self._nodes):
            raise ConfigError(f"{len(self._nodes)} given, the cluster map (serial {self.map.serial}) has {self.map.n_nodes}")
        markers = []
        for index, (address, value) in enumerate(zip(self.addresses, raw, strict=True)):
            wanted = self._marker(origin.cluster_id, index, origin.generation)
            lost = known is not None and why_lost(address, wanted, value, wanted.run_id)
            markers.append(wanted if lost else accept(address, wanted, value, wanted.run_id))
        self._markers = markers
        return markers

    def provision(self, cluster_id: bytes, generation: bytes, deadline: Deadline, n_shards: int = 1) -> None:
        self.map = ClusterMap.first(len(self._nodes), n_shards)
        wanted = [self._marker(cluster_id, index, generation).encode() for index in range(len(self._nodes))]
        for index, marker in enumerate(wanted):
            values = {key: value for key, (value, _) in self._alive(index).values.items()}
            values.pop(MAP_NAME.encode(), None)
            if values and values != {MARKER_KEY: marker}:
                raise WrongNodeError(f"node {self.addresses[index]}: not empty; provisioning writes on empty nodes only")
        for node, marker in zip(self._nodes, wanted, strict=True):
            node.put(MAP_NAME.encode(), self.map.encode())
            node.put(MARKER_KEY, marker)

    def fence(self, shard: int, epoch: int, deadline: Deadline, *, still_ours: Callable[[], None] | None = None) -> None:
        self._fence.begin(shard, epoch, lambda name: self.get_meta(name, deadline), still_ours)

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return self._retry(lambda: self._read_checked(parts), deadline)

    def _read_checked(self, parts: Sequence[ReadPart]) -> list[ReadResult]:
        expected = self._expected_of(parts)
        results = self._read(parts)
        self._check(expected)
        return results

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        expected = self._expected_of(parts)
        self._require_not_fenced()
        results = self._write(parts)
        self._check(expected)
        return results

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        expected = self._expected_of(parts)
        self._require_not_fenced()
        gone = self._erase(parts)
        self._check(expected)
        return gone

    def read_in_repair(self, address: str, nonce: str, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        expected = self._repair_of(address, nonce, parts, deadline)
        results = self._read(parts)
        self._check(expected)
        return results

    def write_in_repair(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        expected = self._repair_of(address, nonce, parts, deadline)
        self._require_not_fenced()
        results = self._write(parts)
        self._check(expected)
        return results

    def erase_in_repair(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        expected = self._repair_of(address, nonce, parts, deadline)
        self._require_not_fenced()
        gone = self._erase(parts)
        self._check(expected)
        return gone

    def keys_on(self, address: str, deadline: Deadline) -> Iterator[RowKeys]:
        yield from row_keys_in(list(self._at(address).values))

    def _read(self, parts: Sequence[ReadPart]) -> list[ReadResult]:
        results = []
        for part in parts:
            keys, nodes = part.keys.encode(), self._route(part.keys.slots())
            records = np.zeros((len(keys), part.prefix_bytes), dtype=np.uint8)
            found, tokens = np.zeros(len(keys), dtype=bool), np.zeros(len(keys), dtype=np.uint64)
            foreign = np.zeros(len(keys), dtype=bool)
            for row, (key, node) in enumerate(zip(keys, nodes, strict=True)):
                value, token = self._alive(node).values.get(bytes(key), (b"", 0))
                if token and len(value) != part.record_bytes and part.foreign:
                    foreign[row], tokens[row] = True, token
                    continue
                if token and len(value) != part.record_bytes:
                    raise RecordError(
                        f"node {self.addresses[node]}, id {part.keys.ids[row]}: value of {len(value)} bytes, expected {part.record_bytes}"
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
                token = self._alive(nodes[row]).put_if(bytes(key), bytes(part.records[row]), int(tokens[row]))
                stored[row], tokens[row] = token != 0, token
            results.append(WriteResult(stored, tokens))
        return results

    def _erase(self, parts: Sequence[WritePart]) -> list[NDArray[np.bool_]]:
        results = []
        for part in parts:
            gone = np.ones(len(part.keys), dtype=bool)
            nodes = self._route(part.keys.slots())
            for row, key in enumerate(part.keys.encode()):
                gone[row] = self._alive(nodes[row]).erase_if(bytes(key), None if part.tokens is None else int(part.tokens[row]))
            results.append(gone)
        return results

    def node_of(self, keys: RowKeys) -> str:
        nodes = self.map.nodes_of(keys)
        return self.addresses[0 if nodes is None else int(nodes[0])]

    def get_meta(self, name: str, deadline: Deadline) -> list[bytes | None]:
        values = [self._alive(i).values.get(name.encode()) for i in range(len(self._nodes))]
        return [value and value[0] for value in values]

    def put_meta(self, name: str, value: bytes, deadline: Deadline) -> None:
        for index in range(len(self._nodes)):
            self._alive(index).put(name.encode(), value)

    def mend_copies(self, name: str, copies: Sequence[bytes | None], damaged: Sequence[bool], value: bytes, deadline: Deadline) -> None:
        self._repair.mend_copies(name, copies, damaged, value, deadline)

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

    def require_ours(self, address: str, copy: bytes | None, deadline: Deadline) -> None:
        self._fence.require_ours(copy, f"node {address}", lambda: self.get_meta(self._fence.name, deadline))

    def stats(self, deadline: Deadline) -> list[NodeStats]:
        nodes = [self._alive(index) for index in range(len(self._nodes))]
        return [NodeStats(a, "memory", len(n.values), n.used_bytes, 0, 0) for a, n in zip(self.addresses, nodes, strict=True)]

    def close(self) -> None:
        self._closed = True

    def _route(self, slots: NDArray[np.int64]) -> NDArray[np.uint16]:
        return self.map.slot_nodes[slots]

    def _alive(self, index: int) -> MemoryNode:
        if self._closed:
            raise ClosedError("this store was closed")
        if self._nodes[index].down:
            raise NodeUnavailableError(f"node {self.addresses[index]}: connection refused")
        return self._nodes[index]

    # --- markers and repair -----------------------------------------------------------------------------------------------------

    def _marker(self, cluster_id: bytes, index: int, generation: bytes) -> Marker:
        return Marker(cluster_id, index, generation, self.map.digest, self.map.serial, self._nodes[index].run_id)

    def _expected_of(self, parts: Sequence[ReadPart] | Sequence[WritePart]) -> dict[int, Marker]:
        """The markers of the nodes that a batch touches, renewed as a new connection would renew them."""
        if self._markers is None:
            return {}
        touched = sorted({int(node) for part in parts for node in self._route(part.keys.slots())})
        for index in touched:
            got, run_id = self.look(self.addresses[index], Deadline.after(1))
            with suppress(StorageError):  # the check after the batch says it
                self._markers[index] = accept(self.addresses[index], self._markers[index], got, run_id)
        return {index: self._markers[index] for index in touched}

    def _check(self, expected: dict[int, Marker]) -> None:
        for index, marker in expected.items():
            got, run_id = self.look(self.addresses[index], Deadline.after(1))
            if got != marker.encode() or run_id != marker.run_id:
                raise diagnose(self.addresses[index], replace(marker, run_id=run_id), got)

    def _repair_of(
        self, address: str, nonce: str, parts: Sequence[ReadPart] | Sequence[WritePart], deadline: Deadline
    ) -> dict[int, Marker]:
        if not all(self.keys_of(address, part.keys).all() for part in parts):
            raise InvalidInputError(f"a batch that repairs node {address} holds rows of other nodes")
        return {self.addresses.index(address): self._repair.require_repair(address, nonce, deadline)}

    def _require_not_fenced(self) -> None:
        if self._fence.name:
            self._fence.require_not_behind(self.get_meta(self._fence.name, Deadline.after(1)))

    def _at(self, address: str) -> MemoryNode:
        return self._alive(self.addresses.index(address))

    def expected(self, address: str) -> Marker:
        assert self._markers is not None, "open() comes first"
        return self._markers[self.addresses.index(address)]

    placements = ()

    def number_of(self, address: str) -> int:
        return self.addresses.index(address)

    def look(self, address: str, deadline: Deadline) -> tuple[bytes | None, str]:
        node = self._at(address)
        found = node.values.get(MARKER_KEY)
        return (None if found is None else found[0]), node.run_id

    def peek(self, address: str, keys: list[bytes], deadline: Deadline) -> list[bytes | None]:
        found = [self._at(address).values.get(key) for key in keys]
        return [value and value[0] for value in found]

    def swap(self, address: str, key: bytes, old: bytes | None, new: bytes, run_id: str, deadline: Deadline) -> bool:
        node = self._at(address)
        with node.lock:
            value, token = node.values.get(key, (None, 0))
            return value == old and node.run_id == run_id and node.put_if(key, new, token) != 0
