"""The demo: trains skip-gram embeddings on a cluster with several trainer processes, and the same in one process, and compares.

`kvemb demo` starts a local cluster (or uses the one of a kvemb.yaml), shows progress while it trains, and ends with results that a person
can judge: held-out loss per pass beside the local run's, and a few words with their nearest neighbours.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

import kvemb
from kvemb.demo.corpus import Corpus, load
from kvemb.demo.skipgram import PassText, TrainingProgress, held_out_loss, train_pass
from kvemb.demo.trainer_process import Trainers
from kvemb.demo.word_rows import WORD_IN, ClusterRows, LocalRows, Rows
from kvemb.errors import n_of
from kvemb.local_cluster.launcher import LocalCluster
from kvemb.process import ProgressLine

N_PASSES = 3
# Asynchronous trainers learn from rows that are a little old; more than this would be a fault and not staleness.
TOLERANCE = 0.15
PROBES = ("socket", "Lock", "TypeError", "mkdir", "encode", "decimal", "thread", "if")


@dataclass(frozen=True)
class DemoOptions:
    """The options of `kvemb demo`."""

    # store, nodes, shards: the local cluster; not used with a config
    store: str = "valkey"
    nodes: int = 2
    shards: int = 2
    trainers: int = 2  # trainer processes
    seed: int = 0  # of corpus sampling, initial rows and negatives
    config: str = ""  # kvemb.yaml of a running cluster, "" to start a local one
    metrics_port: int = 0  # where the first trainer serves its figures, the next ones on the ports behind it; 0: nowhere


@dataclass
class _Learnt:
    """Held-out losses before training and after each pass, seconds in training, rows pulled (and pushed)."""

    losses: list[float]
    seconds: float = 0.0
    n_rows: int = 0


def run_demo(options: DemoOptions, line: ProgressLine) -> bool:
    """Run the demo; return whether the cluster learnt as well as the local run (within TOLERANCE of its held-out loss)."""
    started = time.monotonic()
    line.say("Skip-gram embeddings of the identifiers in Python's own standard library, learnt on rows in key-value storage.")
    # The cluster first: its faults should not appear after seconds of reading text.
    with _cluster(options, line) as url, kvemb.connect(url) as cluster:
        corpus = load()
        line.say(f"  text: {len(corpus.tokens):,} words, {len(corpus.ids):,} distinct, of {corpus.n_files:,} source files")
        held_out = PassText(corpus, seed=options.seed, held_out=True)
        rows = ClusterRows(cluster, options.seed)
        ours = _train(cluster, url, rows, held_out, options, line)
        found = neighbours(rows, corpus)
    theirs = _train_here(corpus, held_out, options.seed, line)
    _show_result(line, ours, theirs, found)
    difference = ours.losses[-1] - theirs.losses[-1]
    good = difference <= TOLERANCE
    line.say(
        f"  {'the cluster learns as well' if good else 'THE CLUSTER LEARNT WORSE'}: held-out loss {ours.losses[-1]:.3f} with "
        f"{n_of(options.trainers, 'trainer')} on the cluster, {theirs.losses[-1]:.3f} in one process (difference {difference:+.3f}, "
        f"{TOLERANCE} allowed for asynchrony)"
    )
    line.say(
        f"  cluster: {ours.seconds:.1f} s for {N_PASSES} passes, {ours.n_rows / ours.seconds / 1e3:.0f}k rows pulled and pushed per "
        f"second; one process: {theirs.seconds:.1f} s; all in all {time.monotonic() - started:.0f} s"
    )
    if not options.config:
        n_processes, cores = options.nodes + options.shards + options.trainers, n_of(os.cpu_count() or 1, "core")
        line.say(
            f"  The cluster's {n_processes} processes share the {cores} here, and each row crosses two sockets: a table that fits "
            "one machine is faster there. The losses differ by asynchrony: trainers do not wait for each other (`mode: sync` does)."
        )
    line.say("Next: ten minutes in docs/tutorials/torch.ipynb or keras.ipynb; a model of yours, in one line: docs/conversion.md")
    return good


@contextmanager
def _cluster(options: DemoOptions, line: ProgressLine) -> Iterator[str]:
    if options.config:
        line.say(f"  cluster: {options.config}")
        yield options.config
        return
    local = LocalCluster(options.store, options.nodes, shards=options.shards)
    line.say(
        f"  cluster: {n_of(options.nodes, f'{options.store} node')}, {n_of(options.shards, 'parameter-server shard')} and "
        f"{n_of(options.trainers, 'trainer')}, each a process on this machine"
    )
    with local as cluster:
        yield cluster.url
        line.say("  ending the cluster's processes")


def _train(cluster: kvemb.Cluster, url: str, rows: Rows, held_out: PassText, options: DemoOptions, line: ProgressLine) -> _Learnt:
    """Run all passes on the cluster."""
    learnt = _Learnt([held_out_loss(rows, held_out)])
    with Trainers(url, options.trainers, options.seed, options.metrics_port) as trainers:
        for _ in trainers.until_idle():
            pass
        for pass_index in range(N_PASSES):
            latest: dict[int, TrainingProgress] = {}
            n_rows, begun = 0, time.monotonic()
            trainers.start_pass()
            for trainer, progress in trainers.until_idle():
                latest[trainer] = progress
                n_rows += progress.n_rows
                if line.due:
                    speed = f"{n_rows / (time.monotonic() - begun) / 1e3:.0f}k rows/s"
                    line.show(f"{_how_far(pass_index, [*latest.values()])}  {speed}  {_stored(cluster)}")
            cluster.flush()
            learnt.seconds += time.monotonic() - begun
            learnt.n_rows += n_rows
            learnt.losses.append(held_out_loss(rows, held_out))
            line.say(f"  pass {pass_index + 1}/{N_PASSES}: held-out loss {learnt.losses[-2]:.3f} -> {learnt.losses[-1]:.3f}")
    return learnt


def _train_here(corpus: Corpus, held_out: PassText, seed: int, line: ProgressLine) -> _Learnt:
    """Run all passes in this process, on a NumPy array per table: some 4 s each on one core."""
    line.say("The same training in one process, on local NumPy arrays:")
    rows = LocalRows(corpus.ids, seed=seed)
    learnt = _Learnt([held_out_loss(rows, held_out)])
    for pass_index in range(N_PASSES):
        begun = time.monotonic()
        for progress in train_pass(rows, PassText(corpus, seed=seed, pass_index=pass_index)):
            if line.due:
                line.show(_how_far(pass_index, [progress]))
        learnt.seconds += time.monotonic() - begun
        learnt.losses.append(held_out_loss(rows, held_out))
    line.clear()
    return learnt


def _how_far(pass_index: int, latest: Sequence[TrainingProgress]) -> str:
    step, n_steps = sum(p.step for p in latest), sum(p.n_steps for p in latest)
    loss = sum(p.loss for p in latest) / len(latest)
    return f"  pass {pass_index + 1}/{N_PASSES} {step:4}/{n_steps} steps  loss {loss:.3f}"


def _stored(cluster: kvemb.Cluster) -> str:
    status = cluster.status()
    n_rows = sum(shard.reply.n_rows for shard in status.shards if shard.reply is not None)
    return f"{n_rows:,} rows on nodes of " + ", ".join(f"{node.used_bytes / 1e6:.0f} MB" for node in status.nodes)


def neighbours(rows: Rows, corpus: Corpus, probes: Sequence[str] = PROBES, *, n_nearest: int = 5) -> dict[str, list[tuple[str, float]]]:
    """Return (word, cosine) pairs per probe, nearest first, of the rows of "word_in"; words seen less than 50 times are left out."""
    often = np.flatnonzero(corpus.counts >= 50)
    words = [corpus.words[i] for i in often.tolist()]
    if not (known := [probe for probe in probes if probe in words]):
        return {}
    table = rows.pull({WORD_IN: corpus.ids[often]})[WORD_IN]
    unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), np.float32(1e-12))
    at = np.array([words.index(probe) for probe in known])
    cosines = unit[at] @ unit.T
    best = np.argsort(-cosines, axis=1, kind="stable")[:, : n_nearest + 1].tolist()
    return {probe: [(words[j], float(cosines[i, j])) for j in best[i] if words[j] != probe][:n_nearest] for i, probe in enumerate(known)}


def _show_result(line: ProgressLine, ours: _Learnt, theirs: _Learnt, found: dict[str, list[tuple[str, float]]]) -> None:
    line.say()
    line.say("Held-out loss        cluster    one process")
    for index, (loss, local_loss) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        name = "before training" if index == 0 else f"after pass {index}"
        line.say(f"  {name:<17} {loss:8.3f}    {local_loss:8.3f}")
    line.say("Nearest neighbours, as the cluster learnt them")
    for word, near in found.items():
        line.say(f"  {word:<17} " + "  ".join(f"{other} {cosine:.2f}" for other, cosine in near))
    line.say("Result")
