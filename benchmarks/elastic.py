"""The question `elastic`: what does training notice while storage nodes come and go? Load and its times: elastic_load."""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

import kvemb
from benchmarks.apply_load import TIMEOUT_S
from benchmarks.deepfm import example, steps_of
from benchmarks.elastic_load import Trainers, Window, check_counts, fill
from benchmarks.measure import Spread
from benchmarks.options import positive, whole
from benchmarks.recovery_steps import watch_repair
from benchmarks.report import Line, Report, Section
from kvemb.client.resizing.node_moves import NodePlan
from kvemb.client.resizing.slot_moves import MoveState
from kvemb.cluster import Cluster
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.processes import free_ports
from kvemb.local_cluster.storage_servers import StorageServer, start_servers
from kvemb.net.deadline import Deadline
from kvemb.stores.storage_kinds import open_store

STORES = ("redis", "valkey", "memcached")
N_NODES, N_SHARDS = 2, 2
LONGEST_WAIT_MS, LEAST_THROUGHPUT, MOST_ROWS, LEAST_SPEED = 1000, 0.7, 1.05, 0.5
JOINS, LEAVES = "2 -> 3 nodes", "3 -> 2 nodes"
_OPEN_S = 20.0
_LINES, _LINES_OF_STEP = 20_000, 256


class OtherLossError(AssertionError):
    """A job whose nodes changed did not compute what the same job computes whose nodes did not."""


@dataclass(frozen=True)
class Change:
    """One move under load.

    Args:
        before, meanwhile: windows of the same length at least, the second from the command until the move is done.
        rows_ratio: rows that the plan moved / the third of all rows that a third node is to have.
    """

    before: Window
    meanwhile: Window
    rows_ratio: float

    @property
    def wait_ms(self) -> float:
        """Of the longest step while slots moved, what is above the median before."""
        return (self.meanwhile.longest_s - self.before.step_s) * 1e3

    @property
    def quiet_ms(self) -> float:
        """The same of the longest step before: what the machine does to a step by itself."""
        return (self.before.longest_s - self.before.step_s) * 1e3


def elastic(options: argparse.Namespace) -> Report:
    """What does training notice while storage nodes come and go: longest wait, throughput, rows moved, speed, loss?

    Two nodes, two shards; --trainers threads of this process pull and push batches of --batch distinct ids without a pause, at most 2
    pushes unapplied. In every round, under that load: --seconds as they are; a third node joins; --seconds as they are; it leaves. Then,
    without load, another third node joins and leaves, and a node is restarted empty and repaired. Read: wait ms is the longest step of
    any trainer from the command until the move is done, above the median step before; quiet ms the same of the time before, without a
    move; throughput is steps per second meanwhile / before; rows is what the plan moved / a third of all rows; s is from command to done;
    of a move without load, k rows/s is rows moved per second from command to done, and / repair that of a repair's (rows of the node per
    second of the repair) in the same round. Values are medians with (smallest..largest); the longest wait that counts is the largest.
    After all, every row must be the number of pushes that it got. At last, a DeepFM of one sync trainer is trained for --steps steps,
    twice: while a node joins, another leaves, one is exchanged, a shard joins and leaves, and with nothing of that; losses must be equal
    bit for bit.
    """
    sections = []
    versions: dict[str, str] = {}
    for store in options.store:
        sections.append(_measure(store, options, versions))
    return Report("elastic", sections, versions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `elastic` can be asked."""
    parser.add_argument("--store", nargs="+", choices=STORES, default=["redis", "memcached"], help="storage kinds (redis memcached)")
    parser.add_argument("--dim", type=whole(1), default=16, metavar="N", help="weights per row (16)")
    parser.add_argument("--rows", type=whole(1000), default=400_000, metavar="N", help="rows in the table (400000)")
    parser.add_argument("--batch", type=whole(1), default=4096, metavar="N", help="rows of a step (4096)")
    parser.add_argument("--trainers", type=whole(1), default=2, metavar="N", help="that pull and push (2)")
    parser.add_argument("--seconds", type=positive, default=4.0, metavar="S", help="of load before a move (4)")
    parser.add_argument("--repeats", type=whole(1), default=3, metavar="N", help="rounds (3)")
    parser.add_argument("--steps", type=whole(4), default=400, metavar="N", help="of the DeepFM, at least (400)")


def lines_of(changes: dict[str, list[Change]], moves: Sequence[float], repairs: Sequence[float]) -> list[Line]:
    """Lay the rounds out.

    Args:
        changes: under load, of each round, by name.
        moves, repairs: rows per second without load, of each round.
    """
    lines = []
    for name, rounds in changes.items():
        figures: dict[str, Spread | float | str] = {
            "wait ms": Spread.of([one.wait_ms for one in rounds]),
            "quiet ms": Spread.of([one.quiet_ms for one in rounds]),
            "throughput": Spread.of([one.meanwhile.steps_per_s / one.before.steps_per_s for one in rounds]),
            "rows": Spread.of([one.rows_ratio for one in rounds]),
            "s": Spread.of([one.meanwhile.end_s - one.meanwhile.start_s for one in rounds]),
            "target": f"wait < {LONGEST_WAIT_MS}, throughput >= {LEAST_THROUGHPUT}, rows <= {MOST_ROWS}",
        }
        lines.append(Line(name, figures))
    ratio = Spread.of([move / repair for move, repair in zip(moves, repairs, strict=True)])
    speeds: dict[str, Spread | float | str] = {"k rows/s": Spread.of([one / 1e3 for one in moves]), "/ repair": ratio}
    lines.append(Line("a node joins, no load", {**speeds, "target": f"/ repair >= {LEAST_SPEED}"}))
    lines.append(Line("a node is repaired, no load", {"k rows/s": Spread.of([one / 1e3 for one in repairs])}))
    return lines


def _measure(store: str, options: argparse.Namespace, versions: dict[str, str]) -> Section:
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(store, N_NODES, shards=N_SHARDS))
        opened = stack.enter_context(kvemb.connect(cluster.url))
        versions[f"{store} server"] = opened.status().nodes[0].server
        table = fill(opened, "elastic", options.rows, options.dim)
        counts = np.ones(options.rows, np.int64)
        changes: dict[str, list[Change]] = {JOINS: [], LEAVES: []}
        moves, repairs = [], []
        for _ in range(options.repeats):
            with Trainers(cluster.url, "elastic", options.rows, options.batch, options.trainers) as trainers:
                third = _further(stack, cluster)
                changes[JOINS].append(_changed(opened, trainers, opened.nodes.add(third.address), options))
                changes[LEAVES].append(_changed(opened, trainers, opened.nodes.remove(third.address), options))
            third.process.kill()
            counts += trainers.counts.sum(axis=0)
            check_counts(table, counts)
            third = _further(stack, cluster)
            moves.append(_speed(opened, opened.nodes.add(third.address)))
            _speed(opened, opened.nodes.remove(third.address))
            third.process.kill()
            repairs.append(_repair_speed(cluster, opened))
            check_counts(table, counts)
    n_steps = _check_losses(store, options)
    settings = {"store": store, "dim": options.dim, "record_bytes": table.definition.record.size_bytes, "rows": options.rows}
    settings |= {"batch": options.batch, "trainers": options.trainers, "shards": N_SHARDS, "repeats": options.repeats}
    note = f"DeepFM, sync, {n_steps} steps: losses with three changes of nodes and two of shards, and with none, are equal, bit for bit."
    return Section(settings, notes=[note], lines=lines_of(changes, moves, repairs))


def _changed(opened: Cluster, trainers: Trainers, plan: NodePlan, options: argparse.Namespace) -> Change:
    """Let trainers train, and then the plan happen meanwhile."""
    with trainers.window() as before:
        time.sleep(options.seconds)
    with trainers.window() as meanwhile:
        _move(opened, plan)
    return Change(before[0], meanwhile[0], plan.n_rows / (options.rows / (N_NODES + 1)))


def _move(opened: Cluster, plan: NodePlan) -> MoveState:
    opened.nodes.begin(plan)
    return opened.nodes.wait(timeout_s=TIMEOUT_S)


def _speed(opened: Cluster, plan: NodePlan) -> float:
    """Rows per second of a move from command to done."""
    start_s = time.perf_counter()
    _move(opened, plan)
    return plan.n_rows / (time.perf_counter() - start_s)


def _repair_speed(cluster: LocalCluster, opened: Cluster) -> float:
    """Restart a node empty; rows per second of its repair."""
    state, sizes = opened.nodes.state(), opened.nodes.sizes()
    n_rows = int(sizes.rows[state.map.slot_nodes == 0].sum())
    store = open_store(opened.config.storage, role="shard:bench")
    try:
        store.open(Deadline.after(_OPEN_S))
        cluster.servers[0].restart()
        seconds, _ = watch_repair(store, Deadline.after(TIMEOUT_S))
    finally:
        store.close()
    return n_rows / seconds


def _further(stack: ExitStack, cluster: LocalCluster) -> StorageServer:
    """A server that is none of the cluster's yet."""
    (server,) = start_servers(cluster.store, 1, cluster.folder, 1024)
    stack.callback(lambda: server.process.kill())
    return server


def _check_losses(store: str, options: argparse.Namespace) -> int:
    """Train a small sync job with three changes of nodes in the middle, and again without; return the number of steps.

    Raises:
        OtherLossError: a loss is not equal, bit for bit.
    """
    log, _ = example("synthetic").draw(_LINES, 0)
    batches = [log.take(np.arange(at, at + _LINES_OF_STEP)) for at in range(0, len(log) - _LINES_OF_STEP + 1, _LINES_OF_STEP)]
    changed = _losses(store, batches, options.steps, changed=True)
    plain = _losses(store, batches, len(changed), changed=False)
    for at, (wanted, got) in enumerate(zip(plain, changed, strict=True)):
        if wanted != got:
            raise OtherLossError(f"{store}: losses differ from step {at} on: {wanted!r}, and {got!r} with changes of nodes and shards")
    return len(plain)


def _train_until_done(opened: Cluster, train: Callable[[int], None], n_steps: int) -> None:
    """Train so many steps, and on until the move is over."""
    train(n_steps)
    while opened.nodes.state().map.plan is not None:
        train(1)


def _losses(store: str, batches: Sequence[object], n_steps: int, *, changed: bool) -> list[float]:
    """Losses of so many steps; with changes, of more when moves take longer than a quarter of them."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(store, N_NODES, shards=N_SHARDS, mode="sync", trainers=1))
        opened = stack.enter_context(kvemb.connect(cluster.url))
        step = steps_of(opened, batches, dim=8)
        losses: list[float] = []

        def train(n: int) -> None:
            for _ in range(n):
                losses.append(step(batches[len(losses) % len(batches)]))

        if not changed:
            train(n_steps)
            return losses
        train(n_steps // 4)
        nodes, shards, first = opened.nodes, opened.shards, cluster.servers[0].address
        third, fourth = (_further(stack, cluster).address for _ in range(2))
        shard = f"127.0.0.1:{free_ports(1)[0]}"
        for plan in (lambda: nodes.add(third), lambda: nodes.remove(first), lambda: nodes.exchange(third, fourth)):
            nodes.begin(plan())
            _train_until_done(opened, train, n_steps // 4)
        cluster.start_shard(N_SHARDS, "--listen", shard)
        for move, n_shards in ((lambda: shards.add(shard), N_SHARDS + 1), (lambda: shards.remove(shard), N_SHARDS)):
            shards.begin(move())
            _train_until_done(opened, train, n_steps // 4)
            if (there := shards.state().map.shard_numbers) != tuple(range(n_shards)):
                raise OtherLossError(f"{store}: a move of shards was taken back: there are {there}, expected {n_shards}")
    return losses
