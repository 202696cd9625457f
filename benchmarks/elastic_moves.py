"""Moves of slots that `elastic` measures: a cluster whose nodes and shards come and go, under load and without."""

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

import kvemb
from benchmarks.apply_load import TIMEOUT_S
from benchmarks.elastic_load import Trainers, Window, check_counts, fill
from benchmarks.recovery_steps import watch_repair
from benchmarks.report import Series
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.processes import free_ports
from kvemb.net.deadline import Deadline
from kvemb.scaling.slot_moves import INDEX_BYTES
from kvemb.schema.move_plan import SHARDS
from kvemb.schema.slot_dealing import SlotPlan
from kvemb.stores.storage_kinds import open_store

N_NODES, N_SHARDS = 2, 2
TABLE = "elastic"
_OPEN_S = 20.0
_CLUSTER = "redis-cluster"
_POINT_S = 0.05  # of a picture: its longest step


@dataclass(frozen=True)
class Move:
    """One move without load.

    Args:
        n_rows: that the plan moved.
        seconds: from command to done.
    """

    n_rows: int
    seconds: float

    @property
    def rows_per_s(self) -> float:
        """Rows moved per second."""
        return self.n_rows / self.seconds

    @property
    def index_mb(self) -> float:
        """Index entries that a shard which takes rows is sent, in MB."""
        return self.n_rows * INDEX_BYTES / 1e6


@dataclass(frozen=True)
class Change:
    """One move under load.

    Args:
        before, meanwhile: windows of the same length at least, the second from the command until the move is done.
        move: its name.
        rows_ratio: rows that it moved / the part of all rows that one node or shard more is to have.
    """

    before: Window
    meanwhile: Window
    move: Move
    rows_ratio: float

    @property
    def wait_ms(self) -> float:
        """The longest step while slots moved, minus the median before."""
        return (self.meanwhile.longest_s - self.before.step_s) * 1e3

    @property
    def quiet_ms(self) -> float:
        """The same of the longest step before: the machine's own effect on a step."""
        return (self.before.longest_s - self.before.step_s) * 1e3

    @property
    def throughput(self) -> float:
        """Steps per second while slots moved / before."""
        return self.meanwhile.steps_per_s / self.before.steps_per_s


def longest_steps(changes: Mapping[str, Change]) -> Series:
    """The longest step of any trainer in every twentieth of a second, from before the first of some changes to the end of the last."""
    start_s = next(iter(changes.values())).before.start_s
    windows = [window for change in changes.values() for window in (change.before, change.meanwhile)]
    times = np.concatenate([steps for window in windows for steps in window.steps])
    longest_ms: dict[int, float] = {}
    for point, ms in zip(((times[:, 1] - start_s) // _POINT_S).astype(int).tolist(), (np.diff(times)[:, 0] * 1e3).tolist(), strict=True):
        longest_ms[point] = max(ms, longest_ms.get(point, 0.0))
    points = [(round(point * _POINT_S, 2), round(ms, 1)) for point, ms in sorted(longest_ms.items())]
    spans = [(name, round(one.meanwhile.start_s - start_s, 2), round(one.meanwhile.end_s - start_s, 2)) for name, one in changes.items()]
    return Series("longest step, ms", points, spans)


class ElasticCluster:
    """Two nodes (three of a Redis Cluster), two shards, a table whose rows are the numbers of their pushes; a context manager."""

    def __init__(self, store: str, options: argparse.Namespace) -> None:
        self._store, self._options = store, options
        self.n_nodes = N_NODES + (store == _CLUSTER)  # two of three can call the third failed
        self._counts = np.ones(options.rows, np.int64)

    def __enter__(self) -> "ElasticCluster":
        with ExitStack() as stack:
            self.cluster = stack.enter_context(LocalCluster(self._store, self.n_nodes, shards=N_SHARDS))
            self.opened = stack.enter_context(kvemb.connect(self.cluster.url))
            self.table = fill(self.opened, TABLE, self._options.rows, self._options.dim)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @contextmanager
    def load(self) -> Iterator[Trainers]:
        """Trainers that pull and push; at the end every row must be the number of pushes that it got."""
        options = self._options
        with Trainers(self.cluster.url, TABLE, options.rows, options.batch, options.trainers) as trainers:
            yield trainers
        self._counts += trainers.counts.sum(axis=0)
        self.check()

    def check(self) -> None:
        """Refuse a table whose rows are not the number of pushes that they got."""
        check_counts(self.table, self._counts)

    def under_load(self, trainers: Trainers, plan: SlotPlan) -> Change:
        """Let trainers train, and then the plan happen meanwhile."""
        with trainers.window() as before:
            time.sleep(self._options.seconds)
        with trainers.window() as meanwhile:
            move = self.alone(plan)
        n_after = 1 + (N_SHARDS if plan.kind == SHARDS else self.n_nodes)
        return Change(before[0], meanwhile[0], move, move.n_rows * n_after / self._options.rows)

    def alone(self, plan: SlotPlan) -> Move:
        """Let the plan happen."""
        start_s = time.perf_counter()
        if plan.kind == SHARDS:
            self.opened.shards.begin(plan)
        else:
            self.opened.nodes.begin(plan)
        self.opened.nodes.wait(timeout_s=TIMEOUT_S)
        return Move(plan.n_rows, time.perf_counter() - start_s)

    @contextmanager
    def further_node(self) -> Iterator[str]:
        """The address of a server that is none of the cluster's yet, nor afterwards."""
        server = self.cluster.start_node()
        yield server.address
        server.process.kill()

    @contextmanager
    def further_shard(self) -> Iterator[str]:
        """The address of a shard that is none of the cluster's yet, nor afterwards."""
        (number,) = self.opened.shards.state().map.free_shards(1)
        address = further_shard(self.cluster, number)
        yield address
        self.cluster.shards[number].kill()

    def repair(self) -> float:
        """Restart a node empty; rows per second of its repair."""
        state, sizes = self.opened.nodes.state(), self.opened.nodes.sizes()
        n_rows = int(sizes.rows[state.map.slot_nodes == 0].sum())
        store = open_store(self.opened.config.storage, role="shard:bench")
        try:
            store.open(Deadline.after(_OPEN_S))
            self.cluster.servers[0].restart()
            seconds, _ = watch_repair(store.repair, Deadline.after(TIMEOUT_S))
        finally:
            store.close()
        return n_rows / seconds


def further_shard(cluster: LocalCluster, number: int) -> str:
    """The address of a shard that runs, and is none of the cluster's yet."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    cluster.start_shard(number, "--listen", address)
    return address
