"""Storage inside this process, for unit tests: the same contract, markers and faults included, without a server.

Nodes are looked up by address in a registry of this process, so that two stores with the same addresses see the same rows, as two clients
of one server would. Rows are kept one by one in a dict: clear, not fast, and never on a real data path.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.errors import ClosedError, NodeUnavailableError, NotProvisionedError, RecordError, WrongNodeError
from kvemb.net.deadline import Deadline
from kvemb.stores.base import Capabilities, NodeStats, ReadPart, ReadResult, Store, WritePart, WriteResult
from kvemb.stores.markers import MARKER_KEY, Marker, diagnose
from kvemb.stores.topology import NodeMap


@dataclass
class MemoryNode:
    """One node: its values with their compare-and-swap tokens. Tests may change anything here."""

    values: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    next_token: int = 1
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
    """Nodes of this process. `role` is accepted as by every store and has no meaning here: nobody can be fenced."""

    def __init__(self, config: StorageConfig, role: str) -> None:
        self._map = NodeMap(config.nodes)
        self._nodes = [memory_node(address) for address in config.nodes]
        self._markers: list[Marker] | None = None
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(cas=True, max_record_bytes=1 << 20)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._map.addresses

    def open(self, deadline: Deadline) -> list[Marker]:
        raw = [self._alive(i).values.get(MARKER_KEY) for i in range(len(self._nodes))]
        if not any(raw):
            raise NotProvisionedError("memory storage holds no markers")
        markers = []
        for index, value in enumerate(raw):
            first = Marker.decode(next(v for v in raw if v)[0], self.addresses[index])
            wanted = Marker(first.cluster_id, index, first.generation, self._map.digest, self._map.epoch, "")
            if value is None or value[0] != wanted.encode():
                raise diagnose(self.addresses[index], wanted, value and value[0])
            markers.append(wanted)
        self._markers = markers
        return markers

    def provision(self, cluster_id: bytes, generation: bytes, deadline: Deadline) -> None:
        wanted = [Marker(cluster_id, i, generation, self._map.digest, self._map.epoch, "").encode() for i in range(len(self._nodes))]
        for index, marker in enumerate(wanted):
            values = {key: value for key, (value, _) in self._alive(index).values.items()}
            if values and values != {MARKER_KEY: marker}:
                raise WrongNodeError(f"node {self.addresses[index]}: not empty; provisioning writes on empty nodes only")
        for node, marker in zip(self._nodes, wanted, strict=True):
            node.put(MARKER_KEY, marker)

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        results = []
        for part in parts:
            keys, nodes = part.keys.encode(), self._route(part.keys.slots())
            records = np.zeros((len(keys), part.prefix_bytes), dtype=np.uint8)
            found, tokens = np.zeros(len(keys), dtype=bool), np.zeros(len(keys), dtype=np.uint64)
            for row, (key, node) in enumerate(zip(keys, nodes, strict=True)):
                value, token = self._alive(node).values.get(bytes(key), (b"", 0))
                if token and len(value) != part.record_bytes:
                    raise RecordError(
                        f"node {self.addresses[node]}, id {part.keys.ids[row]}: value of {len(value)} bytes, expected {part.record_bytes}"
                    )
                if token:
                    found[row], tokens[row] = True, token
                    records[row] = np.frombuffer(value[: part.prefix_bytes], dtype=np.uint8)
            order = np.argsort(nodes, kind="stable")
            results.append(ReadResult(records[order], found[order], order, tokens[order] if part.tokens else None))
        self._check_markers()
        return results

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        results = []
        for part in parts:
            tokens = part.tokens.copy() if part.tokens is not None else np.zeros(len(part.keys), dtype=np.uint64)
            stored = np.zeros(len(part.keys), dtype=bool)
            nodes = self._route(part.keys.slots())
            for row, key in enumerate(part.keys.encode()):
                token = self._alive(nodes[row]).put_if(bytes(key), bytes(part.records[row]), int(tokens[row]))
                stored[row], tokens[row] = token != 0, token
            results.append(WriteResult(stored, tokens))
        self._check_markers()
        return results

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> None:
        for part in parts:
            for key, node in zip(part.keys.encode(), self._route(part.keys.slots()), strict=True):
                self._alive(node).values.pop(bytes(key), None)
        self._check_markers()

    def get_meta(self, name: str, deadline: Deadline) -> list[bytes | None]:
        values = [self._alive(i).values.get(name.encode()) for i in range(len(self._nodes))]
        return [value and value[0] for value in values]

    def put_meta(self, name: str, value: bytes, deadline: Deadline) -> None:
        for index in range(len(self._nodes)):
            self._alive(index).put(name.encode(), value)

    def stats(self, deadline: Deadline) -> list[NodeStats]:
        nodes = [self._alive(index) for index in range(len(self._nodes))]
        return [NodeStats(a, "memory", len(n.values), n.used_bytes, 0, 0) for a, n in zip(self.addresses, nodes, strict=True)]

    def close(self) -> None:
        self._closed = True

    def _route(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._map.slot_nodes[slots]

    def _alive(self, index: int) -> MemoryNode:
        if self._closed:
            raise ClosedError("this store was closed")
        if self._nodes[index].down:
            raise NodeUnavailableError(f"node {self.addresses[index]}: connection refused")
        return self._nodes[index]

    def _check_markers(self) -> None:
        for index, marker in enumerate(self._markers or []):
            value = self._alive(index).values.get(MARKER_KEY)
            if value is None or value[0] != marker.encode():
                raise diagnose(self.addresses[index], marker, value and value[0])
