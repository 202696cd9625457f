"""How many nodes and shards a table will need, and their load: arithmetic on measured costs. Pure; nothing here asks a server.

The costs of rows are the measured figures of benchmarks/RESULTS.md. They depend on the machine (2 cores of an AMD EPYC, shared by servers,
shards and trainers, loopback, Redis 7.0, Valkey 9.1, memcached 1.6), and hold for tables of 300,000 to 2,000,000 rows.
tests/unit/test_capacity.py holds each of them equal to the page.

Three shares are assumed and were not measured: how full memory may be, how busy a core may be, and how much of a shard's disk a merge of
its snapshot takes for a while.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvemb.errors import InvalidInputError
from kvemb.schema.buckets import LAYOUTS, MOST_COMPACT_BYTES, buckets_for
from kvemb.schema.record import HEADER_SIZE
from kvemb.schema.slots import N_SLOTS
from kvemb.schema.table_def import TableDef

Layout = tuple[str, str]
"""A kind of storage and a layout of rows there."""

BYTES_PER_ROW: Mapping[Layout, Mapping[int, float]] = {
    ("redis", "fast"): {44: 110.41, 76: 142.29, 108: 174.32, 204: 286.32, 268: 382.32, 780: 958.32},
    ("redis", "compact"): {44: 64.36, 76: 99.30, 108: 136.60, 204: 243.83, 268: 310.08, 780: 868.70},
    ("redis", "pages"): {44: 45.72, 76: 79.24, 108: 111.07, 204: 209.45, 268: 279.49, 780: 807.31},
    ("valkey", "fast"): {44: 87.84, 76: 119.77, 108: 151.77, 204: 256.38, 268: 320.46, 780: 832.56},
    ("valkey", "compact"): {44: 58.11, 76: 91.18, 108: 123.19, 204: 220.26, 268: 284.25, 780: 796.18},
    ("valkey", "pages"): {44: 44.89, 76: 77.49, 108: 109.79, 204: 207.56, 268: 273.26, 780: 787.85},
    ("memcached", "keys"): {44: 132.82, 76: 160.78, 108: 202.72, 204: 321.56, 268: 398.46, 780: 961.19},
}
"""Memory by the bytes of a record (section "memory"); of memcached the memory that its -m counts, "claimed"."""

PULL_ROWS_S: Mapping[Layout, Mapping[int, float]] = {
    ("redis", "fast"): {76: 1.41e6, 204: 1.22e6, 268: 1.00e6},
    ("redis", "pages"): {76: 1.18e6},
    ("valkey", "fast"): {76: 1.72e6, 268: 0.92e6},
    ("memcached", "keys"): {76: 1.16e6, 268: 0.84e6},
}
"""Rows a second of one node that one trainer pulls (section "pull": a million rows, uniform ids, 106,496 a pull), by bytes of a record."""

PULL_SERVER_US: Mapping[Layout, float] = {
    ("redis", "fast"): 0.63,
    ("redis", "pages"): 0.76,
    ("valkey", "fast"): 0.50,
    ("memcached", "keys"): 0.84,
}
"""µs of the server per row of such a pull, records of 76 bytes."""

TRAINED_US: Mapping[str, Mapping[int, float]] = {
    "server": {204: 2.04, 780: 3.92},
    "shard": {204: 1.55, 780: 4.18},
    "trainer": {204: 0.84, 780: 2.29},
}
"""µs of CPU per row that is pulled, pushed and written (section "train": Redis, fast, Adam, two shards), by bytes of a record."""

ONE_ROW_A_COMMAND = 0.76
"""Share of the speed that remains where a batch has about one row of a bucket ("How much memory": `train --layout compact`)."""

REPAIR_ROWS_S = 352.73e3
"""Rows a second that one shard restores on one node from its snapshot and journal (section "recovery", Redis, records of 204)."""

SAVE_ROWS_S = 545.08e3
"""Rows a second of a full save by one shard (section "checkpoint", records of 204)."""

INDEX_BYTES_PER_ROW = 24
"""Memory of a shard's index: 20 to 23.7 bytes (`kvemb.arrays.row_index`)."""

PROCESS_BYTES = 250e6
"""Memory of a shard's process beside its index and cache (section "Memory of a shard in training"): at most, with pushes of 50,000 rows."""

CUT_BYTES_PER_ROW = 16
"""Bytes of the index, per row, that a save copies at its cut and holds until it has ended (docs/adr/0012)."""


def bytes_per_row(layout: Layout, record_bytes: int) -> float:
    """Return the memory of a row: its overhead is interpolated; beyond the largest measured record, that one's share of it holds.

    Example:
        >>> round(bytes_per_row(("redis", "compact"), 204), 2), round(bytes_per_row(("redis", "compact"), 140), 1)
        (243.83, 172.3)
    """
    measured = BYTES_PER_ROW[layout]
    largest = max(measured)
    if record_bytes > largest:
        return record_bytes * measured[largest] / largest
    return record_bytes + interpolated({size: taken - size for size, taken in measured.items()}, record_bytes)


def pull_rows_s(kind: str, layout: str, record_bytes: int) -> float | None:
    """Return how many rows a second one node gave one trainer; None where that was not measured.

    Example:
        >>> pull_rows_s("redis-cluster", "fast", 76), pull_rows_s("redis", "compact", 76)
        (1410000.0, None)
    """
    measured = PULL_ROWS_S.get(("redis" if kind == "redis-cluster" else kind, layout))
    return None if measured is None else interpolated(measured, record_bytes)


def interpolated(measured: Mapping[int, float], record_bytes: int) -> float:
    """Return a figure for another size of record: between two measured ones on a line, outside them the nearest one's.

    Example:
        >>> interpolated({100: 1.0, 200: 2.0}, 150), interpolated({100: 1.0, 200: 2.0}, 999)
        (1.5, 2.0)
    """
    sizes = sorted(measured)
    return float(np.interp(record_bytes, sizes, [measured[size] for size in sizes]))


FULL = 0.8
"""Of the memory of a node or a shard: alerts and `kvemb doctor` speak up at 0.9."""
BUSY = 0.5
"""Of one core: a Redis or Valkey server, and a shard's apply thread, have one each."""
_FEW_ROWS = 2.0  # of a bucket in a step: about one in a command, whose cost was measured
_SNAPSHOTS = 2.5  # times the records: runs that wait for being merged, and the merged one
_IMAGES = 2 * 16  # bytes of disk a row: the image of the index, and the one that takes its place
_ID_BYTES = 8
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Workload:
    """A table and its training, to be planned for.

    Args:
        table: its definition; the number of buckets is chosen here.
        n_rows: that will exist.
        step_rows: distinct ids of one step, of all trainers together.
        steps_per_s: how many such steps.
    """

    table: TableDef
    n_rows: int
    step_rows: int
    steps_per_s: float

    @property
    def rows_per_s(self) -> float:
        return self.step_rows * self.steps_per_s


@dataclass(frozen=True)
class Counted:
    """How many servers are needed: the larger of the numbers for memory and for time."""

    for_memory: int
    for_cpu: int

    @property
    def n(self) -> int:
        return max(self.for_memory, self.for_cpu)


@dataclass(frozen=True)
class StoragePlan:
    """The nodes of one kind and layout.

    Args:
        kind, layout: of storage, and of rows there.
        n_buckets: of the table; 0 where rows lie under keys or in pages.
        row_bytes: of memory, for one row.
        total_bytes: of all rows.
        nodes: how many.
        server_us: of a node's time for a row that is pulled, and written once.
        pull_bytes: that travel to a trainer for one row.
        repair_s: to restore one lost node's rows, if a single shard did it.
    """

    kind: str
    layout: str
    n_buckets: int
    row_bytes: float
    total_bytes: float
    nodes: Counted
    server_us: float
    pull_bytes: int
    repair_s: float


@dataclass(frozen=True)
class ShardPlan:
    """The shards; they are the same for every kind of storage.

    Args:
        shards: how many.
        shard_us: of a shard's time for a row that is applied.
        trainer_us: of a trainer's time for a row that it pulls and pushes.
        index_bytes: of memory, of all of them together.
        cut_bytes: more, while a checkpoint is saved.
        cache_bytes: of records, of each.
        snapshot_bytes: of disk, of all of them together, at most.
        journal_bytes_per_s: written by all of them together.
        push_bytes: that travel from a trainer for one row.
        save_s: of a full checkpoint.
    """

    shards: Counted
    shard_us: float
    trainer_us: float
    index_bytes: float
    cut_bytes: float
    cache_bytes: int
    snapshot_bytes: float
    journal_bytes_per_s: float
    push_bytes: int
    save_s: float


def plan_storage(work: Workload, node_bytes: float) -> list[StoragePlan]:
    """Return the plan of each kind and layout on nodes of so much memory, without layouts that refuse such records or so many rows."""
    plans = (_storage(work, layout, node_bytes) for layout in BYTES_PER_ROW)
    return [plan for plan in plans if plan is not None]


def _storage(work: Workload, where: Layout, node_bytes: float) -> StoragePlan | None:
    kind, layout = where
    record = work.table.record
    try:
        n_buckets = buckets_for(work.n_rows, record.size_bytes, layout) if layout in LAYOUTS else 0
    except InvalidInputError:
        return None
    row_bytes = bytes_per_row(where, record.size_bytes)
    server_us = _server_us(work, where, n_buckets)
    nodes = Counted(_times(work.n_rows * row_bytes, FULL * node_bytes), _times(work.rows_per_s * server_us, BUSY * 1e6))
    pull_bytes = record.prefix_bytes if layout == "pages" else record.size_bytes
    repair_s = work.n_rows / nodes.n / REPAIR_ROWS_S
    return StoragePlan(kind, layout, n_buckets, row_bytes, work.n_rows * row_bytes, nodes, server_us, pull_bytes, repair_s)


def _server_us(work: Workload, where: Layout, n_buckets: int) -> float:
    """Return the time measured on Redis with fast buckets, times the ratio of this kind and layout to it where rows are pulled."""
    us = interpolated(TRAINED_US["server"], work.table.record.size_bytes)
    alike = where if where in PULL_SERVER_US else (where[0], "fast")
    us *= PULL_SERVER_US[alike] / PULL_SERVER_US["redis", "fast"]
    return us / ONE_ROW_A_COMMAND if n_buckets and work.step_rows / n_buckets < _FEW_ROWS else us


def plan_shards(work: Workload, shard_bytes: float, cache_bytes: int) -> ShardPlan:
    """Return the plan of the shards on hosts of so much memory."""
    record, dim = work.table.record, work.table.dim
    index_bytes, cut_bytes = float(work.n_rows * INDEX_BYTES_PER_ROW), float(work.n_rows * CUT_BYTES_PER_ROW)
    room = FULL * shard_bytes - cache_bytes - PROCESS_BYTES
    if room <= 0:
        raise InvalidInputError(
            f"a shard's cache of {cache_bytes:,} bytes and its process leave no room for its index in {shard_bytes:,.0f} bytes"
        )
    shard_us, trainer_us = (interpolated(TRAINED_US[part], record.size_bytes) for part in ("shard", "trainer"))
    shards = Counted(_times(index_bytes + cut_bytes, room), _times(work.rows_per_s * shard_us, BUSY * 1e6))
    return ShardPlan(
        shards=shards,
        shard_us=shard_us,
        trainer_us=trainer_us,
        index_bytes=index_bytes,
        cut_bytes=cut_bytes,
        cache_bytes=cache_bytes,
        snapshot_bytes=work.n_rows * (_SNAPSHOTS * (_ID_BYTES + record.size_bytes) + _IMAGES),
        journal_bytes_per_s=work.rows_per_s * (_ID_BYTES + _FLOAT_BYTES * dim),
        push_bytes=2 * _ID_BYTES + _FLOAT_BYTES * dim,
        save_s=work.n_rows / shards.n / SAVE_ROWS_S,
    )


def cautions(work: Workload, storage: list[StoragePlan], shards: ShardPlan) -> list[str]:
    """Return the parts of a plan that lie outside of the measurements, or cannot be, in words."""
    sizes = sorted(next(iter(BYTES_PER_ROW.values())))
    size = work.table.record.size_bytes
    said = []
    if not sizes[0] <= size <= sizes[-1]:
        said.append(f"Memory was measured for records of {sizes[0]} to {sizes[-1]} bytes; these have {size}.")
    trained = sorted(TRAINED_US["server"])
    if not trained[0] <= size <= trained[-1]:
        near = trained[0] if size < trained[0] else trained[-1]
        said.append(
            f"Times of trained rows were measured for records of {trained[0]} and {trained[-1]} bytes; the figures are those of {near}."
        )
    most = max([shards.shards.n, *(plan.nodes.n for plan in storage)])
    if most > N_SLOTS:
        said.append(f"There are {N_SLOTS:,} slots, and a node or a shard has at least one: take larger ones (--node-gb, --shard-gb).")
    if most > 8:
        said.append(
            "More than 8 nodes, or more than 2 shards, were never measured together; per-row costs were within 15 % from 1 to 8 nodes."
        )
    if size > MOST_COMPACT_BYTES:
        said.append(f"The compact layout is refused for records beyond {MOST_COMPACT_BYTES} bytes.")
    return said


def _times(needed: float, each: float) -> int:
    return max(1, math.ceil(needed / each))


def parts_of(table: TableDef) -> Mapping[str, int]:
    """Return the bytes of a record by their use.

    Example: see tests/unit/test_capacity.py.
    """
    record = table.record
    return {"header": HEADER_SIZE, "weights": record.prefix_bytes - HEADER_SIZE, "state": record.size_bytes - record.prefix_bytes}
