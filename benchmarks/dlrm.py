"""The question `dlrm`: does a step with rows across a network take as long as one with rows in memory? Turns: dlrm_rounds."""

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import kvemb
from benchmarks import network
from benchmarks.dlrm_rounds import N_FILL, N_TAIL, Target, Trainer, lines_of, take_turns
from benchmarks.dlrm_trainers import DIM, N_TABLES, Job, import_torch, local, stored
from benchmarks.network import NetworkSpec
from benchmarks.network_cluster import NetworkedCluster
from benchmarks.options import positive, whole
from benchmarks.report import Report, Section
from kvemb.config import DURABILITIES

STORES = ("redis", "valkey", "memcached")
N_SHARDS = 1  # two took 1.5 times the CPU for the same rows, on a machine where the trainer shares two cores with them
_MEMORY_MB = 4096
_CACHE_MB = 1024  # has room for the rows of both contenders of a cluster: the first would leave the second none of the usual 256
LOCAL, IN_STEP, STALE, IN_SYNC_STEP, EXACT = "rows in memory", "in the step", "ahead, stale", "in the step, sync", "ahead, exact, sync"
TARGETS = (Target(IN_STEP, STALE, 1.19, at_least=True), Target(STALE, LOCAL, 1.05), Target(EXACT, STALE, 1.10))
# By batch size: steps of a turn that count, rounds that count, batches in all: what takes about five minutes in all, most of it
# where the targets are.
_PLANS = {512: (8, 2, 28), 2048: (6, 6, 56), 8192: (3, 1, 9)}


def dlrm(options: argparse.Namespace) -> Report:
    """Does a DLRM step with rows in storage across a network take as long as one with rows in the trainer's memory?

    The example's model: perceptrons 13-512-256-64 and 415-512-256-1, 26 tables of dim 64, one Zipf(1.05) id per table and line, one
    thread of torch. Rows are trained with rowwise Adagrad, the usual choice for DLRM's tables (FBGEMM's EXACT_ROWWISE_ADAGRAD): one sum
    beside each row, next to no memory or traffic; dense weights with Adagrad. Every row exists from the start.

    A process carries what goes to and from storage over an emulated network: --rtt-ms, and --gbit for the link of each host, each
    direction: the trainer's, the shard's, the storage node's. Gradients go from trainer to shards directly. What the network does is
    measured first and printed. All "hosts" share this machine's processor.

    Contenders take turns on the same batches: rows in this process's memory behind the interface of a cluster, updated in the step by the
    shards' own rules ("local"); on a cluster in async mode, at most 2 pushes unapplied, rows pulled in the step, or ahead of it
    (kvemb.torch.prepare, consistency "stale", everything "auto"); on one in sync mode the same, with "exact". Read: ms/step is
    the mean of a turn's steps without the first 3, which fill the pipelines, and the last 3; "/ local" is taken within a round; rows and
    push are milliseconds in which a step waited for rows, and in which it handed over its push and waited for the one before the last
    (sync: until it was applied); cpu columns are milliseconds of CPU per step of each party, and "cpu / cores" all of them spread evenly
    over this machine's cores: no step can be shorter, where all "hosts" share them; drain is the wait for what was on its way at the end of
    a turn. Losses in sync mode must be those of rows in memory bit for bit, in async mode within 3 % in the last turn.
    """
    torch = import_torch()
    plain, raw = network.measure(NetworkSpec(options.rtt_ms, options.gbit)), network.measure(NetworkSpec(0, 0))
    notes = [f"network measured: {plain}. Without delay and limit its process carries {raw}."]
    versions = {"torch": str(torch.__version__)}
    sections = [_measure(batch_size, options, versions, notes) for batch_size in options.batch]
    return Report("dlrm", sections, versions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `dlrm` can be asked."""
    parser.add_argument("--store", choices=STORES, default="redis", help="storage kind (redis)")
    parser.add_argument("--batch", nargs="+", type=whole(1), default=sorted(_PLANS), metavar="N", help="lines per step (512 2048 8192)")
    parser.add_argument("--ids", type=whole(1), default=100_000, metavar="N", help="ids of each table (100000)")
    parser.add_argument("--rtt-ms", type=positive, default=1.0, metavar="MS", help="round trip between two hosts (1)")
    parser.add_argument("--gbit", type=positive, default=1.0, metavar="G", help="Gbit/s of each host's link, each direction (1)")
    parser.add_argument("--durability", choices=DURABILITIES, default="os", help="of the shards (os)")
    parser.add_argument("--steps", type=whole(1), metavar="N", help="steps of a turn that count (8, 6, 3)")
    parser.add_argument("--repeats", type=whole(1), metavar="N", help="rounds, after one to warm up (2, 6, 1)")


def _measure(batch_size: int, options: argparse.Namespace, versions: dict[str, str], notes: Sequence[str]) -> Section:
    nearest = min(_PLANS, key=lambda size: abs(size - batch_size))
    steps, repeats, n_batches = _PLANS[nearest]
    n_usual = (repeats + 1) * (N_FILL + steps + N_TAIL)
    steps, repeats = options.steps or steps, options.repeats or repeats
    # More turns need more batches: those that come again and again are learnt by heart, and then stale rows show in the loss.
    n_batches = max(n_batches, n_batches * (repeats + 1) * (N_FILL + steps + N_TAIL) // n_usual)
    job = Job.draw(batch_size, n_batches, options.ids)
    with ExitStack() as stack:
        trainers = [local(LOCAL, job)]
        for mode, names in (("async", {IN_STEP: None, STALE: "stale"}), ("sync", {IN_SYNC_STEP: None, EXACT: "exact"})):
            trainers += _stored(stack, mode, names, job, options, versions)
        rounds = take_turns(trainers, lambda number: _indices(number, N_FILL + steps + N_TAIL, n_batches), repeats)
    settings = {
        "store": options.store,
        "batch": batch_size,
        "tables": N_TABLES,
        "dim": DIM,
        "ids/table": options.ids,
        "distinct/step": round(job.distinct_per_step),
        "MB/step": round(job.distinct_per_step * (4 * DIM + 4 + 12) / 1e6, 1),
        "shards": N_SHARDS,
        "durability": options.durability,
        "steps": steps,
        "repeats": repeats,
    }
    targets = [target.line(rounds) for target in TARGETS]
    return Section(settings, lines=[*lines_of(rounds, LOCAL, len(os.sched_getaffinity(0))), *targets], notes=notes)


def _stored(
    stack: ExitStack, mode: str, names: Mapping[str, str | None], job: Job, options: argparse.Namespace, versions: dict[str, str]
) -> list[Trainer]:
    """Trainers on a cluster of a mode, each with tables of its own."""
    n_trainers = 1 if mode == "sync" else 0
    spec = NetworkSpec(options.rtt_ms, options.gbit)
    cluster = NetworkedCluster(
        spec,
        options.store,
        shards=N_SHARDS,
        mode=mode,
        trainers=n_trainers,
        durability=options.durability,
        memory_mb=_MEMORY_MB,
        cache_mb=_CACHE_MB,
    )
    stack.enter_context(cluster)
    opened = stack.enter_context(kvemb.connect(cluster.url))
    versions[f"{options.store} server"] = opened.status().nodes[0].server
    pids = {
        "shards": [shard.pid for shard in cluster.shards],
        "storage": [server.process.pid for server in cluster.servers],
        "network": [cluster.network_pid],
    }
    return [stored(name, job, opened, pids, ahead=ahead) for name, ahead in names.items()]


def _indices(number: int, n: int, n_batches: int) -> list[int]:
    return [(number * n + i) % n_batches for i in range(n)]
