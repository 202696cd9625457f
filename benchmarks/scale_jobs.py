"""Real runs for `scale --simulate`: what every job of a cluster cost each kind of process. Nothing about the model."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np

import kvemb
from benchmarks.apply_load import TIMEOUT_S
from benchmarks.ids import row_ids
from benchmarks.measure import cpu_s
from benchmarks.recovery_steps import watch_repair
from benchmarks.servers import OPTIMIZERS
from benchmarks.train_loop import Ours
from kvemb.api import Cluster
from kvemb.api.table import Table
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.operate.row_costs import JOIN, LOAD, NETWORK, REPAIR, SAVE, SERVER, SHARD, START, TRAIN, TRAINER, Scale, rows_of
from kvemb.stores.storage_kinds import open_store

_BLOCK_ROWS = 100_000
_UNAPPLIED = 2
_MOST_BATCHES = 64
_OPEN_S = 20.0


@dataclass(frozen=True)
class Kind:
    """A kind of table; it is made for `expected_rows` (0: for those that it has)."""

    optimizer: str
    dim: int
    layout: Literal["fast", "compact"]
    expected_rows: int = 0


@dataclass(frozen=True)
class Sample:
    """What one job cost, per row: µs of CPU by role, and bytes of network where they were counted.

    Args:
        job, at: what was done, and in what cluster.
        costs: by role.
        rows_per_s: by wall clock.
    """

    job: str
    at: Scale
    costs: dict[str, float]
    rows_per_s: float

    @staticmethod
    def of(samples: Sequence["Sample"]) -> "Sample":
        """The medians of samples of one job."""
        first = samples[0]
        costs = {role: median(one.costs[role] for one in samples) for role in first.costs}
        return Sample(first.job, first.at, costs, median(one.rows_per_s for one in samples))


class JobRuns:
    """The jobs of one cluster, whose shards keep no rows (no cache).

    Args:
        cluster: running.
        opened: a connection.
        kind, n_rows: of the only table, which is filled here.
    """

    def __init__(self, cluster: LocalCluster, opened: Cluster, kind: Kind, n_rows: int) -> None:
        self._cluster, self._opened = cluster, opened
        empty_bytes = self._used_bytes()
        self._table = _filled(opened, kind, n_rows)
        self.node_bytes_per_row = (self._used_bytes() - empty_bytes) / n_rows
        made = self._table.definition
        assert made.n_buckets is not None
        self.at = Scale(len(cluster.servers), len(cluster.shards), 1, n_rows, made.record.size_bytes, kind.layout, made.n_buckets, n_rows)

    def train(self, step_rows: int, seconds: float) -> Sample:
        """Train steps of distinct rows, drawn at random, by one trainer."""
        order = np.random.default_rng(step_rows).permutation(self.at.n_rows)
        batches = np.split(order, range(step_rows, self.at.n_rows, step_rows))[: min(_MOST_BATCHES, self.at.n_rows // step_rows)]
        ours = Ours(self._table, [row_ids(batch) for batch in batches])
        ours.run(seconds / 3, _UNAPPLIED)
        before = self._traffic_bytes()
        one = self._measured(TRAIN, replace(self.at, step_rows=step_rows), lambda: ours.run(seconds, _UNAPPLIED).n_rows)
        one.costs[NETWORK] = (self._traffic_bytes() - before) / self._n_done
        return one

    def save_and_load(self) -> list[Sample]:
        """Save rows that are in the row log, and load what was saved."""
        with TemporaryDirectory(prefix="kvemb-bench-") as folder:
            url = str(Path(folder) / "checkpoint")
            self._opened.save(f"{url}-before")  # has rows flushed
            saved = self._measured(SAVE, self.at, lambda: self._opened.save(url))
            return [saved, self._measured(LOAD, self.at, lambda: self._opened.load(url))]

    def repair(self) -> Sample:
        """Restart a node empty, and wait until its rows are back."""
        server = self._cluster.servers[0]
        with open_store(self._opened.config.storage, role="shard:bench") as store:
            store.open(Deadline.after(_OPEN_S))

            def act() -> None:
                server.restart()
                watch_repair(store.repair, Deadline.after(TIMEOUT_S))

            return self._measured(REPAIR, self.at, act, lambda: [server.process.pid], fresh=SERVER)

    def start(self) -> Sample:
        """Kill a shard, and start it again: it replays its journal."""
        self._cluster.shards[0].kill()

        def act() -> int:
            self._cluster.start_shard(0)
            reply = self._opened.status().shards[0].reply
            assert reply is not None
            return reply.recovered_rows

        one = self._measured(START, self.at, act, shards=lambda: [self._cluster.shards[0].pid], fresh=SHARD)
        return replace(one, at=replace(self.at, n_rows=self._n_done * self.at.shards))

    def join(self) -> Sample:
        """Let a node join; it leaves again."""
        server, nodes = self._cluster.start_node(), self._opened.nodes

        def act() -> None:
            nodes.begin(nodes.add(server.address))
            nodes.wait(timeout_s=TIMEOUT_S)

        one = self._measured(JOIN, self.at, act, lambda: [server.process.pid])
        nodes.begin(nodes.remove(server.address))
        nodes.wait(timeout_s=TIMEOUT_S)
        self._cluster.servers.remove(server)
        server.process.kill()
        return one

    def _measured(
        self,
        job: str,
        at: Scale,
        act: Callable[[], object],
        servers: Callable[[], Sequence[int]] | None = None,
        shards: Callable[[], Sequence[int]] | None = None,
        fresh: str = "",
    ) -> Sample:
        """Take the CPU time of a job.

        Args:
            job, at: what it is.
            act: does it; may return of how many rows.
            servers, shards: give the processes that count, if not all do.
            fresh: the role whose process `act` starts.
        """
        pids = {
            SERVER: servers or (lambda: [server.process.pid for server in self._cluster.servers]),
            SHARD: shards or (lambda: [shard.pid for shard in self._cluster.shards]),
        }
        before_s = {role: 0.0 if role == fresh else cpu_s(of()) for role, of in pids.items()}
        own_s, start_s = time.process_time(), time.perf_counter()
        done = act()
        wall_s = time.perf_counter() - start_s
        cpu = {role: cpu_s(of()) - before_s[role] for role, of in pids.items()}
        if job == TRAIN:
            cpu[TRAINER] = time.process_time() - own_s
        self._n_done = done if isinstance(done, int) else round(rows_of(job, at))
        return Sample(job, at, {role: 1e6 * taken / self._n_done for role, taken in cpu.items()}, self._n_done / wall_s)

    def _used_bytes(self) -> int:
        return sum(node.used_bytes for node in self._opened.status().nodes)

    def _traffic_bytes(self) -> int:
        return sum(node.traffic_bytes for node in self._opened.status().nodes)


def _filled(opened: Cluster, kind: Kind, n_rows: int) -> Table:
    table = opened.create_table(
        "scale",
        dim=kind.dim,
        optimizer=OPTIMIZERS[kind.optimizer](),
        initializer=kvemb.init.zeros(),
        id_dtype="uint64",
        expected_rows=kind.expected_rows or n_rows,
        layout=kind.layout,
    )
    for start in range(0, n_rows, _BLOCK_ROWS):
        ids = row_ids(np.arange(start, min(n_rows, start + _BLOCK_ROWS)))
        table.push(ids, np.ones((len(ids), kind.dim), np.float32), timeout_s=TIMEOUT_S)
    table.flush(TIMEOUT_S)
    return table
