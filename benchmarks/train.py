"""The question `train`: how many rows per second are trained, pull + push + applied, beside TFRA on the same Redis? Loops: train_loop."""

import argparse
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import mean

import numpy as np
from numpy.typing import NDArray

import kvemb
from benchmarks import peers
from benchmarks.ids import row_ids, sampler
from benchmarks.measure import Spread
from benchmarks.options import positive, whole
from benchmarks.report import Line, Report, Section
from benchmarks.tfra.peer import Tfra, started
from benchmarks.train_loop import CommandCounter, Ours, Stretch, check_first_steps, check_trained, stretch
from kvemb.local_cluster import LocalCluster

STORES = ("redis", "valkey")
BATCH_IDS = 26 * 4096
N_SHARDS = 2
LEARNING_RATE = 0.01
TARGETS = {16: 1.5, 64: 1.4}
_N_BATCHES = 16
_SEED = 3
_OVERHEAD_BYTES = 160
_TFRA_OPERATIONS = 6.0


def train(options: argparse.Namespace) -> Report:
    """How many unique rows per second are trained, pull + push + applied, beside TFRA on the same server?

    One trainer trains Zipf(1.05) batches of 26 x 4096 ids (about 32,000 distinct rows of 1,000,000) with Adam. A step: dedupe the ids,
    pull the distinct rows with their versions, take the gradient of their sum times a constant (so that the model costs nothing),
    push; the shards (two) apply. At most --unapplied pushes are under way, and a turn ends with a flush: everything counted is in
    storage. TFRA does the same in its own process: tf.unique, shadow_ops.embedding_lookup, DynamicEmbeddingOptimizer(Adam), in a
    database of its own on the same server. They take turns in every round. Read: rows are distinct rows per step, summed; ratio is
    ours divided by this line's rows/s, within a round; operations/row are reads and writes of one value per trained row (TFRA's are
    those of its design: W, m and v read and written, as INFO counts its commands of many fields each, not the fields; ours are GETs,
    keys of MGETs, and SETs, from INFO), calls/row are commands as INFO counts them; µs/row is CPU time of the storage server, the
    shards and the trainer's process; changed and elapsed are the staleness of ours: the fraction of pushed rows that had changed
    since their pull, and how many batches ago at most (mean over pushes). Values are medians of the rounds with (smallest..largest).
    Before: the first steps, one by one, must give what Adam in NumPy gives, both for ours and for TFRA. After: every row that was
    pushed exists, has moved the right way, and no other row exists.
    """
    sections = []
    versions: dict[str, str] = {}
    for store in options.store:
        for dim in options.dim:
            sections.append(_measure(store, dim, options, versions))
    return Report("train", sections, versions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `train` can be asked."""
    parser.add_argument("--store", nargs="+", choices=STORES, default=["redis"], help="storage kinds, in turn (redis)")
    parser.add_argument("--dim", nargs="+", type=whole(1), default=[16, 64], metavar="N", help="weights per row (16 64)")
    parser.add_argument("--rows", type=whole(1), default=1_000_000, metavar="N", help="ids that batches are drawn from (1000000)")
    parser.add_argument("--unapplied", type=whole(0), default=2, metavar="N", help="pushes that may be under way at the next pull (2)")
    parser.add_argument("--seconds", type=positive, default=2.0, metavar="S", help="length of one turn (2)")
    parser.add_argument("--repeats", type=whole(1), default=5, metavar="N", help="rounds, after one to warm up (5)")


def lines_of(ours: Sequence[Stretch], others: Sequence[Stretch], *, dim: int) -> list[Line]:
    """Lay the rounds out.

    Args:
        ours: of each round.
        others: TFRA's, or none.
        dim: decides the target.
    """
    target = f"ratio >= {TARGETS[dim]}" if dim in TARGETS else "–"
    staleness = {
        "changed": Spread.of([mean(push.changed_fraction for push in one.staleness) for one in ours]),
        "elapsed": Spread.of([mean(push.batches_elapsed for push in one.staleness) for one in ours]),
    }
    lines = [Line("pull + push + applied", _figures(ours) | staleness | {"target": "–"})]
    if others:
        ratio = Spread.of([mine.rows_per_s / theirs.rows_per_s for mine, theirs in zip(ours, others, strict=True)])
        figures = _figures(others) | {"ratio": ratio, "operations/row": _TFRA_OPERATIONS, "PS µs/row": "–", "target": target}
        lines.append(Line("TFRA lookup + Adam", figures))
    return lines


def _figures(rounds: Sequence[Stretch]) -> dict[str, Spread | float | str]:
    return {
        "k rows/s": Spread.of([one.rows_per_s / 1e3 for one in rounds]),
        "ratio": "–",
        "operations/row": Spread.of([one.per_row(one.n_operations) for one in rounds]),
        "calls/row": Spread.of([one.per_row(one.n_calls) for one in rounds]),
        "server µs/row": Spread.of([one.per_row(one.server_cpu_s * 1e6) for one in rounds]),
        "PS µs/row": Spread.of([one.per_row(one.ps_cpu_s * 1e6) for one in rounds]),
        "trainer µs/row": Spread.of([one.per_row(one.turn.client_cpu_s * 1e6) for one in rounds]),
    }


def _measure(store: str, dim: int, options: argparse.Namespace, versions: dict[str, str]) -> Section:
    draw = sampler("zipf", options.rows, _SEED)
    batches = [row_ids(draw(BATCH_IDS)) for _ in range(_N_BATCHES)]
    spec = kvemb.optim.adam(lr=LEARNING_RATE)
    record_bytes = 12 + 12 * dim
    memory_mb = max(1024, math.ceil(2.5 * options.rows * (record_bytes + 3 * _OVERHEAD_BYTES) / (1 << 20)))
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(store, shards=N_SHARDS, memory_mb=memory_mb))
        opened = stack.enter_context(kvemb.connect(cluster.url))
        versions[f"{store} server"] = opened.status().nodes[0].server
        ours = Ours(opened.create_table("bench", dim=dim, optimizer=spec, initializer=kvemb.init.zeros(), id_dtype="uint64"), batches)
        other, notes = _tfra(stack, cluster.servers[0].port, dim, batches, versions)
        check_first_steps(ours, other, LEARNING_RATE)
        counter = stack.enter_context(CommandCounter.on(cluster.servers[0].port))
        mine, theirs = _rounds(ours, other, cluster, counter, options)
        check_trained(ours)
    settings = {
        "store": store,
        "dim": dim,
        "optimizer": "adam",
        "record_bytes": record_bytes,
        "shards": N_SHARDS,
        "rows": options.rows,
        "rows/step": round(float(np.mean([len(np.unique(ids)) for ids in batches]))),
        "unapplied": options.unapplied,
        "seconds": options.seconds,
        "repeats": options.repeats,
    }
    return Section(settings, notes=notes, lines=lines_of(mine, theirs, dim=dim))


def _tfra(
    stack: ExitStack, port: int, dim: int, batches: Sequence[NDArray[np.uint64]], versions: dict[str, str]
) -> tuple[Tfra | None, list[str]]:
    try:
        other = stack.enter_context(started())
    except peers.PeerAbsentError as absent:
        return None, [f"Peer skipped: {absent}"]
    other.open(port, dim, LEARNING_RATE)
    other.batches(batches)
    versions.update(other.versions)
    return other, []


def _rounds(
    ours: Ours, other: Tfra | None, cluster: LocalCluster, counter: CommandCounter, options: argparse.Namespace
) -> tuple[list[Stretch], list[Stretch]]:
    """Let both take turns; the first round creates rows and fills caches, and does not count."""
    server, shards = [cluster.servers[0].process.pid], [shard.pid for shard in cluster.shards]
    mine, theirs = [], []
    for _ in range(options.repeats + 1):
        one = stretch(lambda: ours.run(options.seconds, options.unapplied), server, shards, counter)
        mine.append(replace(one, staleness=ours.staleness))
        if other is not None:
            theirs.append(stretch(lambda: other.turn("train", options.seconds), server, shards, counter))
    return mine[1:], theirs[1:]
