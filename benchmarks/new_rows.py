"""The question `new_rows`: what does a row cost that is seen for the first time? Drawing its first value, and a first epoch beside TFRA."""

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

import kvemb
from benchmarks import peers
from benchmarks.ids import row_ids, sampler
from benchmarks.measure import Spread, Turn
from benchmarks.options import positive, whole
from benchmarks.report import Line, Report, Section
from benchmarks.tfra.peer import Tfra, started
from benchmarks.train import BATCH_IDS, LEARNING_RATE, STORES, lines_of
from benchmarks.train_loop import TIMEOUT_S, CommandCounter, Ours, WrongTrainingError, after_steps, require_close, stretch
from kvemb.init import Initializer
from kvemb.init.first_draws import ALGORITHMS
from kvemb.local_cluster import LocalCluster

TARGETS = {16: 1.5, 64: 1.3}
DRAW_TARGETS = {16: 0.1, 64: 0.35}
_STD = 0.01
_DRAWN = (kvemb.init.normal(std=_STD), kvemb.init.uniform(), kvemb.init.truncated_normal())
_SEED = 3
_CHECKED_STEPS = 2
_TFRA_TOLERANCE = 0.03


def new_rows(options: argparse.Namespace) -> Report:
    """What does a row cost that is seen for the first time?

    Initial rows: CPU time, µs per row, to draw up to 26 x 4096 rows of random ids in one thread. By the algorithm of new tables, and by
    that of tables that were made before it; rounds take turns. Then training in which every row is new, as in a first epoch: one
    trainer, one shard, Adam, each step applied before the next pull, which is how TFRA trains. A batch has 26 x 4096 ids, drawn by
    Zipf(1.05) from --rows rows that no other batch has: about 32,000 of them. Otherwise a step is that of `train`. Rows begin as normal
    draws on both sides, and TFRA has a database of its own on the same server. A turn has --steps steps and ends with a flush. Read as
    in `train`: / TFRA is taken within a round, and the first round does not count. Before: after the first steps every row must be its
    first value and what Adam in NumPy adds; TFRA's, whose first values are its own, must be so in mean and deviation. After: every row
    that was pushed exists, and no other.
    """
    versions: dict[str, str] = {}
    sections = [_drawing(options)]
    for store in options.store:
        sections.extend(_training(store, dim, options, versions) for dim in options.dim)
    return Report("new_rows", sections, versions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `new_rows` can be asked."""
    parser.add_argument("--store", nargs="+", choices=STORES, default=["redis"], help="storage kinds, in turn (redis)")
    parser.add_argument("--dim", nargs="+", type=whole(1), default=[16, 64], metavar="N", help="weights per row (16 64)")
    parser.add_argument("--rows", type=whole(1), default=1_000_000, metavar="N", help="rows that a batch's ids are drawn from (1000000)")
    parser.add_argument("--steps", type=whole(1), default=6, metavar="N", help="length of a turn (6)")
    parser.add_argument("--seconds", type=positive, default=0.25, metavar="S", help="length of a turn of drawing (0.25)")
    parser.add_argument("--repeats", type=whole(1), default=3, metavar="N", help="rounds, after one to warm up (3)")


def _drawing(options: argparse.Namespace) -> Section:
    ids = row_ids(np.arange(min(options.rows, BATCH_IDS)))
    lines = []
    for dim in options.dim:
        for each in _DRAWN:
            rounds = [[_us_per_row(each, ids, dim, one, options.seconds) for one in ALGORITHMS] for _ in range(options.repeats + 1)][1:]
            figures: dict[str, Spread | float | str] = {"dim": str(dim)}
            figures |= {f"algorithm {one}: µs/row": Spread.of([each[at] for each in rounds]) for at, one in enumerate(ALGORITHMS)}
            figures["first / last"] = Spread.of([each[0] / each[-1] for each in rounds])
            figures["target"] = f"<= {DRAW_TARGETS[dim]}" if each.kind == "normal" and dim in DRAW_TARGETS else "–"
            lines.append(Line(f"initial rows, {each.kind}", figures))
    return Section({"rows": len(ids), "seconds": options.seconds, "repeats": options.repeats}, lines=lines)


def _us_per_row(initializer: Initializer, ids: NDArray[np.uint64], dim: int, algorithm: int, seconds: float) -> float:
    start_s, n = time.thread_time(), 0
    while time.thread_time() - start_s < seconds:
        initializer.rows(ids, dim, table="bench", seed=n, algorithm=algorithm)
        n += 1
    return (time.thread_time() - start_s) * 1e6 / (n * len(ids))


def _training(store: str, dim: int, options: argparse.Namespace, versions: dict[str, str]) -> Section:
    n_batches = _CHECKED_STEPS + (options.repeats + 1) * options.steps
    batches = batches_of_new_rows(n_batches, options.rows)
    record_bytes, mean_rows = 12 + 12 * dim, float(np.mean([len(np.unique(ids)) for ids in batches[:8]]))
    memory_mb = max(1024, round(2.5 * n_batches * mean_rows * (record_bytes + 500) / (1 << 20)))
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(store, shards=1, memory_mb=memory_mb, durability="os"))
        opened = stack.enter_context(kvemb.connect(cluster.url))
        versions[f"{store} server"] = opened.status().nodes[0].server
        spec, first = kvemb.optim.adam(lr=LEARNING_RATE), kvemb.init.normal(std=_STD)
        ours = Ours(opened.create_table("bench", dim=dim, optimizer=spec, initializer=first, id_dtype="uint64"), batches)
        other, notes = _tfra(stack, cluster.servers[0].port, dim, batches, versions)
        pids = [cluster.servers[0].process.pid], [shard.pid for shard in cluster.shards]
        counter = stack.enter_context(CommandCounter.on(cluster.servers[0].port))
        _check_first_steps(ours, other)
        mine, theirs = [], []
        for begin in range(_CHECKED_STEPS, n_batches, options.steps):
            one = stretch(partial(_turn, ours, range(begin, begin + options.steps)), *pids, counter)
            mine.append(replace(one, staleness=ours.staleness))
            if other is not None:
                theirs.append(stretch(partial(other.turn, "train", steps=options.steps), *pids, counter))
        check_created(ours)
    settings = {"store": store, "dim": dim, "optimizer": "adam", "record_bytes": record_bytes, "shards": 1, "rows/step": round(mean_rows)}
    settings |= {"unapplied": 0, "steps": options.steps, "repeats": options.repeats}
    return Section(settings, notes=notes, lines=lines_of({"ours, every row new": mine[1:]}, theirs[1:], dim=dim, targets=TARGETS))


def batches_of_new_rows(n: int, n_rows: int) -> list[NDArray[np.uint64]]:
    """Draw batches of BATCH_IDS ids: each from n_rows rows of its own."""
    draw = sampler("zipf", n_rows, _SEED)
    return [row_ids(draw(BATCH_IDS) + index * n_rows) for index in range(n)]


def _turn(ours: Ours, indices: Sequence[int]) -> Turn:
    ours.staleness = []
    start_s, start_cpu_s, n_rows = time.perf_counter(), time.process_time(), 0
    for index in indices:
        n, ack = ours.step(index)
        ours.wait_applied(ack)
        n_rows += n
    ours.table.flush(TIMEOUT_S)
    return Turn(n_rows, time.perf_counter() - start_s, time.process_time() - start_cpu_s)


def _tfra(
    stack: ExitStack, port: int, dim: int, batches: Sequence[NDArray[np.uint64]], versions: dict[str, str]
) -> tuple[Tfra | None, list[str]]:
    try:
        other = stack.enter_context(started())
    except peers.PeerAbsentError as absent:
        return None, [f"Peer skipped: {absent}"]
    other.open(port, dim, LEARNING_RATE, std=_STD)
    other.batches(batches, first=_CHECKED_STEPS)
    versions.update(other.versions)
    return other, []


def _check_first_steps(ours: Ours, other: Tfra | None) -> None:
    """Train the first batches, and compare rows with their first values and Adam in NumPy."""
    for index in range(_CHECKED_STEPS):
        ours.wait_applied(ours.step(index)[1])
        if other is not None:
            other.step(index)
    ours.table.flush(TIMEOUT_S)
    ids, added = after_steps(ours.batches[:_CHECKED_STEPS], LEARNING_RATE)
    require_close("ours", ours.table.pull(ids, timeout_s=TIMEOUT_S) - ours.table.definition.initial_rows(ids), added)
    if other is not None:
        require_drawn("TFRA", other.rows(ids), added, _STD)


def require_drawn(name: str, rows: NDArray[np.float32], added: NDArray[np.float64], std: float) -> None:
    """Refuse rows that are not normal draws plus the values added to them, by mean and deviation.

    Raises:
        WrongTrainingError: with both.
    """
    first = rows - added[:, None]
    mean, deviation = float(first.mean()) / std, float(first.std()) / std
    if not (abs(mean) < _TFRA_TOLERANCE and abs(deviation - 1) < _TFRA_TOLERANCE):
        raise WrongTrainingError(f"{name}: rows began at a mean of {mean:.3f} and a deviation of {deviation:.3f} std, expected 0 and 1")


def check_created(ours: Ours) -> None:
    """Every row pushed exists and has left its first value; no other row exists.

    Raises:
        WrongTrainingError: with the numbers.
    """
    ids = np.unique(np.concatenate([ours.batches[index] for index in ours.used]))
    rows, versions = ours.table.pull(ids, return_versions=True, timeout_s=TIMEOUT_S)
    n_missing, n_known = int((versions == 0).sum()), len(ours.table)
    n_unmoved = int((rows >= ours.table.definition.initial_rows(ids)).any(axis=1).sum())
    if n_missing or n_unmoved or n_known != len(ids):
        raise WrongTrainingError(
            f"{len(ids)} rows were pushed; {n_missing} do not exist, {n_unmoved} did not go down, the shards know {n_known}"
        )
