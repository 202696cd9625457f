"""What a table will need: nodes and shards, their memory, disk, network and times, and what breaks first. Pure; no server is asked.

Times are sums of what a row costs (`kvemb.operate.row_costs`). Memory is what benchmarks/RESULTS.md says, of the same machine;
tests/unit/test_capacity.py holds every figure equal to the page. Assumed and not measured: how full memory may be, how busy a core, how
long a load, and that no row is likelier to be trained than another.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvemb.config import ServersConfig
from kvemb.errors import InvalidInputError
from kvemb.operate.row_costs import JOBS, LOAD, MEASURED, NETWORK, SERVER, SHARD, START, TRAIN, TRAINED_BYTES, TRAINER, Scale, cost, seconds
from kvemb.schema.buckets import LAYOUTS, MOST_COMPACT_BYTES, buckets_for
from kvemb.schema.pages import page_layout
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


VERSION_BYTES, FENCE_BYTES = 24, 0.14
"""Of a shard's memory: for a row whose version is there (20 to 23.7, `kvemb.arrays.row_index`); for each row, to find it in the row log."""
LOOKUP_US, COLD_ROWS_S = 0.53, 50_000
"""To find a row's version there, in the system's cache; how many a second where each is a page of the disk (section "Versions on disk")."""
LOG_BYTES, LOG_COPIES = 17, 2.5
"""Of disk, beside a row's record; and how often all rows lie there at most: new runs grow to half of an old one, then all are merged."""
INDEX_BYTES = ServersConfig.index_mb << 20
JOURNAL_BYTES = ServersConfig.journal_max_mb << 20

PROCESS_BYTES = 250e6
"""Memory of a shard's process beside its index and cache (section "Memory of a shard in training"): at most, with pushes of 50,000 rows."""

CONNECTIONS = 10_000
"""That a node takes unless it is told otherwise (Redis' maxclients); a shard has two, a trainer one."""


def bytes_per_row(layout: Layout, record_bytes: int) -> float:
    """Return the memory of a row: its overhead is interpolated; beyond the largest measured record, that one's share of it holds."""
    measured = BYTES_PER_ROW[layout]
    largest = max(measured)
    if record_bytes > largest:
        return record_bytes * measured[largest] / largest
    return record_bytes + interpolated({size: taken - size for size, taken in measured.items()}, record_bytes)


def pull_rows_s(kind: str, layout: str, record_bytes: int) -> float | None:
    """Return how many rows a second one node gave one trainer; None where that was not measured."""
    measured = PULL_ROWS_S.get(("redis" if kind == "redis-cluster" else kind, layout))
    return None if measured is None else interpolated(measured, record_bytes)


def interpolated(measured: Mapping[int, float], record_bytes: int) -> float:
    """Return a figure for another size of record: between two measured ones on a line, outside them the nearest one's."""
    sizes = sorted(measured)
    return float(np.interp(record_bytes, sizes, [measured[size] for size in sizes]))


LOAD_S = 4 * 3600
"""That a full load may take shards: the longest of the jobs here."""
FULL = 0.8
"""Of the memory of a node or a shard: alerts and `kvemb doctor` speak up at 0.9."""
BUSY = 0.5
"""Of one core: a Redis or Valkey server, and a shard's apply thread, have one each."""
_ID_BYTES = 8
_FLOAT_BYTES = 4
_ROUNDS = 50  # of finding numbers of nodes and shards that fit each other


@dataclass(frozen=True)
class Workload:
    """A table, its training, and the machines it is to have."""

    table: TableDef  # its definition; the number of buckets is chosen here
    n_rows: int  # that will exist
    step_rows: int  # distinct ids of one step, of all trainers together
    steps_per_s: float  # how many such steps
    trainers: int  # processes
    # node_bytes, shard_bytes: memory of a node and of a shard's host
    node_bytes: float
    shard_bytes: float
    cache_bytes: float  # of records, of each shard

    @property
    def rows_per_s(self) -> float:
        return self.step_rows * self.steps_per_s


@dataclass(frozen=True)
class Counted:
    """How many servers are needed: the largest of these numbers; `for_cpu` 0: no number is enough."""

    for_memory: int
    for_cpu: int = 0
    for_load: int = 1
    for_log: int = 1

    @property
    def n(self) -> int:
        return max(self.for_memory, self.for_cpu, self.for_load, self.for_log)


@dataclass(frozen=True)
class CapacityPlan:
    """A cluster for a workload on one kind and layout of storage."""

    work: Workload  # that it is for
    # kind, layout: of storage, and of rows there
    kind: str
    layout: str
    # nodes, shards: how many
    nodes: Counted
    shards: Counted
    at: Scale  # the same for the costs
    row_bytes: float  # of a node's memory, for one row
    us: Mapping[str, float]  # of CPU for a trained row, by role
    network_bytes: float  # that nodes receive and send for a trained row
    times: Mapping[str, tuple[float, str]]  # of each job, in seconds, and what it waits for

    @property
    def node_bytes(self) -> float:
        """Memory of one node."""
        return self.work.n_rows * self.row_bytes / self.at.nodes

    @property
    def shard_rows(self) -> float:
        """Rows of one shard."""
        return self.work.n_rows / self.at.shards

    @property
    def index_bytes(self) -> float:
        """Memory of one shard for what it knows of its rows."""
        return min(VERSION_BYTES * self.shard_rows, INDEX_BYTES) + FENCE_BYTES * self.shard_rows

    @property
    def shard_bytes(self) -> float:
        """Memory of one shard."""
        return self.index_bytes + self.work.cache_bytes + PROCESS_BYTES

    @property
    def shard_disk_bytes(self) -> float:
        """Disk of one shard at most: its row log and journal."""
        return LOG_COPIES * self.shard_rows * (LOG_BYTES + self.at.record_bytes) + JOURNAL_BYTES

    @property
    def cached_rows(self) -> float:
        """Rows of one shard's log whose keys and versions the system can cache, in the memory that the shard leaves free."""
        return max(0.0, self.work.shard_bytes - self.shard_bytes) / LOG_BYTES

    @property
    def journal_bytes_per_s(self) -> float:
        """Written by all shards together."""
        return self.work.rows_per_s * journal_bytes(self.work.table)

    @property
    def node_network(self) -> float:
        """Bytes a second that a node receives and sends."""
        return self.work.rows_per_s * self.network_bytes / self.at.nodes

    @property
    def shard_network(self) -> float:
        """Bytes a second that a shard receives and sends: pushes, and rows that it fetches and writes (two of a row's three ways)."""
        pushed = 2 * _ID_BYTES + _FLOAT_BYTES * self.work.table.dim
        return self.work.rows_per_s * (pushed + self.network_bytes * 2 / 3) / self.at.shards

    @property
    def trainer_cores(self) -> float:
        """Cores that trainers need for rows, all together."""
        return self.work.rows_per_s * self.us[TRAINER] / 1e6

    def shares(self) -> dict[str, float]:
        """Return how much of what it may use the cluster uses, by what is used; 1: as planned for."""
        rows_per_s, at, cached = self.work.rows_per_s, self.at, self.cached_rows / self.shard_rows
        return {
            "memory of a node": self.node_bytes / (FULL * self.work.node_bytes),
            "memory of a shard": self.shard_bytes / (FULL * self.work.shard_bytes),
            "CPU of a node": rows_per_s * self.us[SERVER] / at.nodes / (BUSY * 1e6),
            "CPU of a shard": rows_per_s * self.us[SHARD] / at.shards / (BUSY * 1e6),
            "row log of a shard": rows_per_s / at.shards * max(0.0, logged_share(self.shard_rows) - cached) / COLD_ROWS_S,
            "connections of a node": (2 * at.shards + at.trainers) / CONNECTIONS,
            "slots": max(at.nodes, at.shards) / N_SLOTS,
        }


def plans_for(work: Workload) -> list[CapacityPlan]:
    """Return a plan for each kind and layout, without layouts that refuse such records or so many rows."""
    plans = (_plan(work, where) for where in BYTES_PER_ROW)
    return [plan for plan in plans if plan is not None]


def smallest(plans: Sequence[CapacityPlan]) -> CapacityPlan:
    """Return the plan with the fewest machines, among those that take any ids (pages are for ids from 0 to N - 1)."""
    return min((plan for plan in plans if plan.layout != "pages"), key=lambda plan: plan.at.nodes + plan.at.shards)


def ten_times(plan: CapacityPlan) -> dict[str, CapacityPlan]:
    """Return what becomes of a plan at ten times the load: of rows/s on the same machines; of ids, with as many machines as they need."""
    work = plan.work
    faster = replace(work, steps_per_s=10 * work.steps_per_s)
    return {
        "10 x rows/s, same machines": _on(faster, (plan.kind, plan.layout), plan.nodes, plan.shards, plan.at.n_keys, plan.row_bytes),
        "10 x ids, machines for them": smallest(plans_for(replace(work, n_rows=10 * work.n_rows))),
    }


def _plan(work: Workload, where: Layout) -> CapacityPlan | None:
    size = work.table.record.size_bytes
    try:
        n_keys = _n_keys(work.n_rows, size, where)
    except InvalidInputError:
        return None
    row_bytes = bytes_per_row(where, size)
    room = FULL * work.shard_bytes - work.cache_bytes - PROCESS_BYTES - min(VERSION_BYTES * work.n_rows, INDEX_BYTES)
    if room <= 0:
        raise InvalidInputError(
            f"a shard's cache of {work.cache_bytes:,.0f} bytes and its process leave no room for its index in {work.shard_bytes:,.0f} bytes"
        )
    nodes = Counted(_times(work.n_rows * row_bytes, FULL * work.node_bytes))
    one = _on(work, where, nodes, Counted(1), n_keys, row_bytes)
    shards = Counted(_times(work.n_rows * FENCE_BYTES, room), for_load=_times(work.n_rows * cost(LOAD, SHARD, one.at), LOAD_S * 1e6))
    first = plan = _on(work, where, nodes, shards, n_keys, row_bytes)
    for _ in range(_ROUNDS):  # more of the one cost the other more: perhaps more than they bring
        before = nodes, shards
        nodes = replace(nodes, for_cpu=_times(work.rows_per_s * plan.us[SERVER], BUSY * 1e6))
        for_log = _times(work.rows_per_s * logged_share(plan.shard_rows), COLD_ROWS_S + work.rows_per_s * plan.cached_rows / work.n_rows)
        shards = replace(shards, for_cpu=_times(work.rows_per_s * plan.us[SHARD], BUSY * 1e6), for_log=for_log)
        if (nodes, shards) == before:
            return plan
        if max(nodes.n, shards.n) > N_SLOTS:
            break
        plan = _on(work, where, nodes, shards, n_keys, row_bytes)
    return first


def _on(work: Workload, where: Layout, nodes: Counted, shards: Counted, n_keys: int, row_bytes: float) -> CapacityPlan:
    """Return what the workload makes of these machines."""
    at = Scale(nodes.n, shards.n, work.trainers, work.n_rows, work.table.record.size_bytes, where[1], n_keys, work.step_rows)
    us = {role: cost(TRAIN, role, at) for role in (SERVER, SHARD, TRAINER)}
    us[SERVER] *= _pull_ratio(where)
    us[SHARD] += LOOKUP_US * logged_share(work.n_rows / at.shards)
    times = {job: seconds(job, at) for job in JOBS if job != TRAIN}
    full_journals = round(at.shards * JOURNAL_BYTES / journal_bytes(work.table))  # rows in those of all shards
    times[START] = seconds(START, replace(at, n_rows=full_journals))
    return CapacityPlan(work, *where, nodes, shards, at, row_bytes, us, cost(TRAIN, NETWORK, at), times)


def logged_share(n_rows: float) -> float:
    """Return the share of trained rows whose versions a shard of n rows has not in memory; each row is taken to be as likely as others."""
    return max(0.0, 1 - INDEX_BYTES / (VERSION_BYTES * n_rows))


def _pull_ratio(where: Layout) -> float:
    """Return what rows cost a server of this kind, of what they cost Redis with fast buckets, where they are pulled."""
    alike = where if where in PULL_SERVER_US else (where[0], "fast")
    return PULL_SERVER_US[alike] / PULL_SERVER_US["redis", "fast"]


def _n_keys(n_rows: int, record_bytes: int, where: Layout) -> int:
    """Return under how many keys the rows lie."""
    layout = where[1]
    if layout in LAYOUTS:
        return buckets_for(n_rows, record_bytes, layout)
    return -(-n_rows // page_layout(record_bytes).rows_per_page) if layout == "pages" else n_rows


def journal_bytes(table: TableDef) -> int:
    """Return the bytes of a shard's journal for one row that is pushed."""
    return _ID_BYTES + _FLOAT_BYTES * table.dim


def cautions(plans: Sequence[CapacityPlan]) -> list[str]:
    """Return the parts of plans that lie outside of the measurements, or cannot be, in words."""
    sizes = sorted(next(iter(BYTES_PER_ROW.values())))
    size = plans[0].at.record_bytes
    said = []
    if not sizes[0] <= size <= sizes[-1]:
        said.append(f"Memory was measured for records of {sizes[0]} to {sizes[-1]} bytes; these have {size}.")
    if not TRAINED_BYTES[0] <= size <= TRAINED_BYTES[1]:
        said.append(f"Times were measured for records of {TRAINED_BYTES[0]} and {TRAINED_BYTES[1]} bytes; these have {size}.")
    most_nodes, most_shards = max(plan.at.nodes for plan in plans), max(plan.at.shards for plan in plans)
    if max(most_nodes, most_shards) > N_SLOTS:
        said.append(f"There are {N_SLOTS:,} slots, and a node or a shard has at least one: take larger machines (--node-gb, --shard-gb).")
    if not all(plan.nodes.for_cpu and plan.shards.for_cpu for plan in plans):
        said.append("CPU 0: no number of machines is enough, since more of them cost more requests: take fewer, larger steps a second.")
    if most_nodes > MEASURED[0] or most_shards > MEASURED[1]:
        said.append(f"More than {MEASURED[0]} nodes, or more than {MEASURED[1]} shards, were never measured together.")
    if size > MOST_COMPACT_BYTES:
        said.append(f"The compact layout is refused for records beyond {MOST_COMPACT_BYTES} bytes.")
    return said


def _times(needed: float, each: float) -> int:
    return max(1, math.ceil(needed / each))


def parts_of(table: TableDef) -> Mapping[str, int]:
    """Return the bytes of a record by their use."""
    record = table.record
    return {"header": HEADER_SIZE, "weights": record.prefix_bytes - HEADER_SIZE, "state": record.size_bytes - record.prefix_bytes}
