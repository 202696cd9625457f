"""How many nodes and shards a table will need, and what each of them holds: arithmetic on measured costs. Pure.

What is assumed and was not measured are three shares: how full memory and how busy a core may be, and how much of a shard's disk a merge of
its snapshot takes for a while.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvemb.capacity import measured_costs as costs
from kvemb.errors import InvalidInputError
from kvemb.schema.buckets import LAYOUTS, MOST_COMPACT_BYTES, buckets_for
from kvemb.schema.record import HEADER_SIZE
from kvemb.schema.slots import N_SLOTS
from kvemb.schema.table_def import TableDef

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
    """What is to be held and trained.

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
    """How many servers it takes: the larger of what memory and what time want."""

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
        repair_s: to bring one lost node's rows back, if a single shard did it.
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
    """Return what each kind and layout takes on nodes of so much memory; a layout that refuses such records or so many rows is left out."""
    plans = (_storage(work, layout, node_bytes) for layout in costs.BYTES_PER_ROW)
    return [plan for plan in plans if plan is not None]


def _storage(work: Workload, where: costs.Layout, node_bytes: float) -> StoragePlan | None:
    kind, layout = where
    record = work.table.record
    try:
        n_buckets = buckets_for(work.n_rows, record.size_bytes, layout) if layout in LAYOUTS else 0
    except InvalidInputError:
        return None
    row_bytes = costs.bytes_per_row(where, record.size_bytes)
    server_us = _server_us(work, where, n_buckets)
    nodes = Counted(_times(work.n_rows * row_bytes, FULL * node_bytes), _times(work.rows_per_s * server_us, BUSY * 1e6))
    pull_bytes = record.prefix_bytes if layout == "pages" else record.size_bytes
    repair_s = work.n_rows / nodes.n / costs.REPAIR_ROWS_S
    return StoragePlan(kind, layout, n_buckets, row_bytes, work.n_rows * row_bytes, nodes, server_us, pull_bytes, repair_s)


def _server_us(work: Workload, where: costs.Layout, n_buckets: int) -> float:
    """What was measured on Redis with fast buckets, times what this kind and layout costs beside it where rows are pulled."""
    us = costs.interpolated(costs.TRAINED_US["server"], work.table.record.size_bytes)
    alike = where if where in costs.PULL_SERVER_US else (where[0], "fast")
    us *= costs.PULL_SERVER_US[alike] / costs.PULL_SERVER_US["redis", "fast"]
    return us / costs.ONE_ROW_A_COMMAND if n_buckets and work.step_rows / n_buckets < _FEW_ROWS else us


def plan_shards(work: Workload, shard_bytes: float, cache_bytes: int) -> ShardPlan:
    """Return what the shards take, on hosts of so much memory."""
    record, dim = work.table.record, work.table.dim
    index_bytes, cut_bytes = float(work.n_rows * costs.INDEX_BYTES_PER_ROW), float(work.n_rows * costs.CUT_BYTES_PER_ROW)
    room = FULL * shard_bytes - cache_bytes - costs.PROCESS_BYTES
    if room <= 0:
        raise InvalidInputError(
            f"a shard's cache of {cache_bytes:,} bytes and its process leave no room for its index in {shard_bytes:,.0f} bytes"
        )
    shard_us, trainer_us = (costs.interpolated(costs.TRAINED_US[part], record.size_bytes) for part in ("shard", "trainer"))
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
        save_s=work.n_rows / shards.n / costs.SAVE_ROWS_S,
    )


def cautions(work: Workload, storage: list[StoragePlan], shards: ShardPlan) -> list[str]:
    """Say what of a plan lies outside of what was measured, or cannot be."""
    sizes = sorted(next(iter(costs.BYTES_PER_ROW.values())))
    size = work.table.record.size_bytes
    said = []
    if not sizes[0] <= size <= sizes[-1]:
        said.append(f"Memory was measured for records of {sizes[0]} to {sizes[-1]} bytes; these have {size}.")
    trained = sorted(costs.TRAINED_US["server"])
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
    """Return the bytes of a record by what they are for.

    Example: see tests/unit/test_capacity.py.
    """
    record = table.record
    return {"header": HEADER_SIZE, "weights": record.prefix_bytes - HEADER_SIZE, "state": record.size_bytes - record.prefix_bytes}
