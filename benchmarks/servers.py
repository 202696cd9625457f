"""Real servers with a table full of real records: the start of every benchmark."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvemb
from benchmarks.ids import row_ids
from kvemb.api import Cluster
from kvemb.api.table import Table
from kvemb.arrays.rounding import opaque_bytes
from kvemb.errors import KvembError
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.optim import OptimizerSpec
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import WritePart
from kvemb.stores.storage_kinds import open_store
from kvemb.stores.store import Store
from kvemb.stores.store_nodes import NodeStats

_FILL_ROWS = 100_000
_FILL_TIMEOUT_S = 60.0
# Key, entry and allocator overhead of one record: at most this on any of the servers; and everything twice, for the peers' copies.
_OVERHEAD_BYTES = 160
_LEAST_MEMORY_MB = 1024
OPTIMIZERS: dict[str, Callable[[], OptimizerSpec]] = {"sgd": lambda: kvemb.optim.sgd(lr=1.0), "adam": lambda: kvemb.optim.adam(lr=0.01)}


@dataclass(frozen=True, eq=False)
class Filled:
    """A running cluster whose table holds `weights[i]` under `ids_of(definition, i)`, and nothing else.

    Args:
        cluster: its servers are `cluster.servers`.
        opened: the connection that `table` belongs to.
        table: for pulling.
        weights: [n, dim] of the table's `row_dtype`.
    """

    cluster: LocalCluster
    opened: Cluster
    table: Table
    weights: NDArray[Any]

    @property
    def n_rows(self) -> int:
        """How many rows exist."""
        return len(self.weights)

    @property
    def ports(self) -> list[int]:
        """The storage servers' loopback ports."""
        return [server.port for server in self.cluster.servers]

    @property
    def pids(self) -> list[int]:
        """The storage servers' process ids."""
        return [server.process.pid for server in self.cluster.servers]

    def stats(self) -> tuple[NodeStats, ...]:
        """What the storage servers say of themselves."""
        return self.opened.status().nodes


@contextmanager
def filled(
    store: str, *, nodes: int, dim: int, n_rows: int, optimizer: str = "sgd", paged: bool = False, dtype: str = "float32"
) -> Iterator[Filled]:
    """Start storage servers and one shard, and write n rows as a shard writes them.

    The shard's index does not know these rows: for benchmarks that pull only.

    Args:
        store, nodes: the servers.
        dim: weights per row.
        n_rows: of the table.
        optimizer: "sgd" (a record is header + W) or "adam" (and two moments).
        paged: the table is dense (num_ids), and its ids are 0 to n_rows - 1.
        dtype: "float32", or "bytes:N" for opaque rows, of which N is the dim, and which have no optimizer.
    """
    n_bytes = opaque_bytes(dtype)
    spec = OPTIMIZERS[optimizer]()
    record_bytes = 4 * (dim + spec.state_size(dim)) + _OVERHEAD_BYTES
    memory_mb = max(_LEAST_MEMORY_MB, math.ceil(4 * n_rows * record_bytes / nodes / (1 << 20)))
    with LocalCluster(store, nodes, memory_mb=memory_mb) as cluster, kvemb.connect(cluster.url) as opened:
        kind: dict[str, Any] = {"dim": dim, "optimizer": spec} if n_bytes is None else {"dtype": dtype}
        table = opened.create_table("bench", id_dtype="uint64", num_ids=n_rows if paged else None, **kind)
        weights = written_weights(dim, n_rows) if n_bytes is None else written_bytes(n_bytes, n_rows)
        with open_store(opened.config.storage, role="shard:bench") as writer:
            writer.open(Deadline.after(_FILL_TIMEOUT_S))
            _fill(writer, table.definition, weights)
        yield Filled(cluster, opened, table, weights)


def written_weights(dim: int, n_rows: int) -> NDArray[np.float32]:
    """Return the rows that `filled` writes, float32 [n, dim]: other processes compare pulled rows with them."""
    return np.random.default_rng(dim).standard_normal((n_rows, dim), dtype=np.float32)


def written_bytes(n_bytes: int, n_rows: int) -> NDArray[np.uint8]:
    """Return opaque rows, uint8 [n, n_bytes]."""
    return np.frombuffer(np.random.default_rng(n_bytes).bytes(n_rows * n_bytes), np.uint8).reshape(n_rows, n_bytes)


def ids_of(definition: TableDef, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the ids of rows by position: scattered over 64 bits, or of a dense table the positions themselves."""
    return row_ids(positions) if definition.num_ids is None else positions.astype(np.uint64)


def _fill(writer: Store, definition: TableDef, weights: NDArray[Any]) -> None:
    state = np.zeros((_FILL_ROWS, definition.record.state_size), np.float32)
    for start in range(0, len(weights), _FILL_ROWS):
        rows = weights[start : start + _FILL_ROWS]
        ids = ids_of(definition, np.arange(start, start + len(rows)))
        records = definition.record.encode(ids, make_version(1, 1), rows, state[: len(rows)])
        part = WritePart(definition.keys(ids, pages=writer.capabilities.pages), records, np.zeros(len(ids), np.uint64))
        (result,) = writer.rows.write([part], Deadline.after(_FILL_TIMEOUT_S))
        if not result.stored.all():
            raise KvembError(f"filling the table: {int((~result.stored).sum())} rows from {start} on were not stored")
