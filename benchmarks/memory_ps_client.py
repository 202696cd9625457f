"""The trainer's side of the classic parameter server (memory_ps): starts its shards, and offers what trainer.torch needs of a cluster."""

import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.memory_ps import PulledRows, PullRows, PushRows
from kvemb.arrays.ids import normalize
from kvemb.client.shard_channel import PendingCall, ShardChannel
from kvemb.init import Initializer
from kvemb.net.deadline import Deadline
from kvemb.optim import OptimizerSpec
from kvemb.protocol.message_format import TableRows
from kvemb.protocol.messages import CreateTableRequest, Empty
from kvemb.protocol.shard_routing import route
from kvemb.protocol.verb import EVERYBODY, Verb
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.table_def import TableDef
from trainer.lookahead.cluster_ports import Prefetched

if TYPE_CHECKING:
    from trainer.lookahead.cluster_ports import ClusterPort, TablePort

TIMEOUT_S = 120.0
_CREATE = Verb("CreateTable", CreateTableRequest, Empty, EVERYBODY)
_PULL, _PUSH = Verb("Pull", PullRows, PulledRows, EVERYBODY), Verb("Push", PushRows, Empty, EVERYBODY)


class MemoryAck:
    """The answers to a push's parts, which come when they are applied; `trainer.lookahead.cluster_ports.AckPort`."""

    staleness = None
    failure_seen = False
    changed_rows = None

    def __init__(self, parts: Sequence[PendingCall[Empty]]) -> None:
        self._parts: deque[PendingCall[Empty]] = deque(parts)

    def wait_applied(self, timeout_s: float | None = None) -> None:
        """Wait for the answers; the deadline is the one that the push was sent with."""
        while self._parts:
            self._parts.popleft().result()

    def wait_released(self, timeout_s: float | None = None) -> None:
        """The same."""
        self.wait_applied(timeout_s)


class MemoryPsTable:
    """One table; `trainer.lookahead.cluster_ports.TablePort`."""

    def __init__(self, cluster: "MemoryPsCluster", definition: TableDef) -> None:
        self.cluster, self.definition = cluster, definition
        self.name, self.dim, self.hyper = definition.name, definition.dim, definition.optimizer.defaults()
        self.minus_one_allowed = False

    def steps(self) -> int:
        """Steps are not counted; 0."""
        return 0

    def allow_minus_one(self) -> None:
        """Take -1 for an id like any other, see `Table.allow_minus_one`."""
        self.minus_one_allowed = True

    def pull(self, ids: NDArray[Any], *, return_versions: Literal[True]) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
        """Fetch rows [n, dim] of distinct ids; versions are all 0: there are none."""
        return self.cluster.pull_versions({self.name: ids})[self.name]


class MemoryPsCluster:
    """Some shards; `trainer.lookahead.cluster_ports.ClusterPort`.

    Args:
        addresses: of the shards.
        mode: "sync" or "async": whether a step waits for its push.
        pids: of their processes.
    """

    def __init__(self, addresses: Sequence[str], mode: str, pids: Sequence[int]) -> None:
        self.mode, self.pids = mode, pids
        self._map = ClusterMap.first(0, len(addresses))
        self._channels = [ShardChannel(shard, address) for shard, address in enumerate(addresses)]
        self._tables: dict[str, MemoryPsTable] = {}
        self._last = MemoryAck([])
        self.changes = 0
        self.all_stored = True

    def create_table(
        self, name: str, *, dim: int, optimizer: OptimizerSpec, initializer: Initializer, seed: int, reduce: str, exist_ok: bool
    ) -> MemoryPsTable:
        """Make a table on every shard; arguments as `kvemb.Cluster.create_table`."""
        assert exist_ok
        definition = TableDef(name, dim, optimizer, initializer, seed=seed, reduce=reduce)
        request = CreateTableRequest(definition.to_dict(), exist_ok)
        for channel in self._channels:
            channel.call(_CREATE, request, Deadline.after(TIMEOUT_S))
        return self._tables.setdefault(name, MemoryPsTable(self, definition))

    def pull_versions(
        self, ids: Mapping[str, NDArray[Any]], *, stored: bool = True
    ) -> dict[str, tuple[NDArray[np.float32], NDArray[np.uint64]]]:
        """Fetch rows of several tables, one request to each shard; every row is stored."""
        deadline = Deadline.after(TIMEOUT_S)
        wanted = {name: self._bits(name, some) for name, some in ids.items()}
        owners = {name: self._map.shards_of(self._tables[name].definition.placement.slots(some)) for name, some in wanted.items()}
        rows = {name: np.empty((len(some), self._tables[name].dim), np.float32) for name, some in wanted.items()}
        calls = []
        for channel in self._channels:
            places = {name: np.flatnonzero(owners[name] == channel.shard) for name in wanted}
            asked = [self._rows(name, wanted[name].take(at), np.empty((len(at), 0), np.float32)) for name, at in places.items()]
            calls.append((places, channel.start(_PULL, PullRows(asked), deadline)))
        for places, call in calls:
            for name, got in zip(places, call.result().tables, strict=True):
                rows[name][places[name]] = got.rows
        return {name: (some, np.zeros(len(some), np.uint64)) for name, some in rows.items()}

    def push(
        self,
        tables: Mapping[str, tuple[NDArray[Any], NDArray[np.float32]]],
        *,
        versions: Mapping[str, NDArray[np.uint64]] | None = None,
        hyper: Mapping[str, Mapping[str, float]] | None = None,
        prefetched: Prefetched | None = None,
    ) -> MemoryAck:
        """Send gradients of distinct ids, one request to each shard. No rows can be registered as prefetched."""
        assert not prefetched
        self.changes += 1
        deadline = Deadline.after(TIMEOUT_S)
        rows = [self._rows(name, self._bits(name, ids), grads, dict((hyper or {}).get(name, {}))) for name, (ids, grads) in tables.items()]
        routed = [route(one, self._map) for one in rows]
        parts = [channel.start(_PUSH, PushRows([shares[channel.shard] for shares in routed]), deadline) for channel in self._channels]
        self._last = MemoryAck(parts)
        return self._last

    def flush(self) -> None:
        """Wait for the last push; a shard works on one at a time, and in order on each connection."""
        self._last.wait_applied()

    def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            channel.close()

    def _bits(self, name: str, ids: NDArray[Any]) -> NDArray[np.uint64]:
        return normalize(ids, self._tables[name].definition.id_dtype, name)[0]

    def _rows(self, name: str, ids: NDArray[np.uint64], rows: NDArray[np.float32], hyper: dict[str, float] | None = None) -> TableRows:
        return TableRows(
            name, self._tables[name].definition.schema, ids, rows, hyper=hyper or {}, placement=self._tables[name].definition.placement
        )


if TYPE_CHECKING:

    def _is_a_cluster(cluster: MemoryPsCluster, table: MemoryPsTable) -> tuple[ClusterPort, TablePort]:
        return cluster, table


@contextmanager
def started(n_shards: int, mode: str) -> Iterator[MemoryPsCluster]:
    """Start shards in processes of their own; they end with the block."""
    command = [sys.executable, "-m", "benchmarks.memory_ps"]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(n_shards)]
    try:
        ports = [process.stdout.readline().strip() for process in processes if process.stdout is not None]
        cluster = MemoryPsCluster([f"127.0.0.1:{port}" for port in ports], mode, [process.pid for process in processes])
        try:
            yield cluster
        finally:
            cluster.close()
    finally:
        for process in processes:
            process.communicate()  # closes its standard input, and waits
