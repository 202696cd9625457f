"""The demo: trains skip-gram embeddings on a cluster with several trainer processes, and the same in one process, and compares.

`kvemb demo` starts a local cluster (or uses the one of a kvemb.yaml), shows progress while it trains, and ends with what a person can
judge: held-out loss per pass beside the local run's, and a few words with their nearest neighbours.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import kvemb
from kvemb.demo.cluster_rows import ClusterRows, create_tables
from kvemb.demo.corpus import Corpus, load
from kvemb.demo.evaluate import HeldOut, held_out_loss, held_out_sample, neighbours
from kvemb.demo.local_run import LocalResult, run_local
from kvemb.demo.progress import Display, Rate, short
from kvemb.demo.skipgram import N_PASSES, TrainingProgress
from kvemb.demo.trainers import Trainers
from kvemb.local_cluster.launcher import LocalCluster

# Asynchronous trainers learn from rows that are a little old; more than this would be a fault and not staleness.
TOLERANCE = 0.15
_POLL_S = 0.25
_MB = 1e6


@dataclass(frozen=True)
class DemoOptions:
    """What `kvemb demo` was asked for.

    Args:
        store, nodes, shards: the local cluster; not used with a config.
        trainers: trainer processes.
        seed: of corpus sampling, initial rows and negatives.
        config: kvemb.yaml of a running cluster, "" to start a local one.
    """

    store: str = "valkey"
    nodes: int = 2
    shards: int = 2
    trainers: int = 2
    seed: int = 0
    config: str = ""


def run_demo(options: DemoOptions, display: Display) -> bool:
    """Run the demo; return whether the cluster learnt as well as the local run (within TOLERANCE of its held-out loss).

    Raises:
        KvembError: the cluster could not be started or reached, or a part of it failed; local processes are ended then.
    """
    started = time.monotonic()
    display.say("Skip-gram embeddings of the identifiers in Python's own standard library, learnt on rows in key-value storage.")
    # The cluster first: what is wrong with it should not be told after seconds of reading text.
    with _cluster(options, display) as url, kvemb.connect(url) as cluster:
        corpus = load()
        display.say(f"  text: {len(corpus.tokens):,} words, {len(corpus.ids):,} distinct, of {corpus.offsets.size - 1:,} source files")
        sample = held_out_sample(corpus, seed=options.seed)
        create_tables(cluster, options.seed)
        losses, seconds, n_rows = _train(cluster, url, corpus, sample, options, display)
        found = neighbours(ClusterRows(cluster), corpus)
    local = _run_local(corpus, options.seed, display)
    _show_result(display, losses, local.held_out_losses, found)
    difference = losses[-1] - local.held_out_losses[-1]
    good = difference <= TOLERANCE
    display.say(
        f"  {'the cluster learns as well' if good else 'THE CLUSTER LEARNT WORSE'}: held-out loss {losses[-1]:.3f} with "
        f"{options.trainers} trainers on the cluster, {local.held_out_losses[-1]:.3f} in one process (difference {difference:+.3f}, "
        f"{TOLERANCE} allowed for asynchrony)"
    )
    display.say(
        f"  cluster: {seconds:.1f} s for {N_PASSES} passes, {short(n_rows / seconds)} rows pulled and pushed per second; "
        f"one process: {local.seconds:.1f} s; all in all {time.monotonic() - started:.0f} s"
    )
    return good


@contextmanager
def _cluster(options: DemoOptions, display: Display) -> Iterator[str]:
    if options.config:
        display.say(f"  cluster: {options.config}")
        yield options.config
        return
    local = LocalCluster(options.store, options.nodes, shards=options.shards)
    display.say(
        f"  cluster: {options.nodes} {options.store} nodes, {options.shards} parameter-server shards and {options.trainers} trainers, "
        "each a process on this machine"
    )
    with local as cluster:
        yield cluster.url
        display.say("  ending the cluster's processes")


def _train(
    cluster: kvemb.Cluster, url: str, corpus: Corpus, sample: HeldOut, options: DemoOptions, display: Display
) -> tuple[list[float], float, int]:
    """Run all passes; return the held-out loss before and after each, the seconds spent training, and the rows trained."""
    watch = _Watch(cluster, options.trainers, display)
    losses = [held_out_loss(ClusterRows(cluster), sample)]
    seconds = 0.0
    with Trainers(url, options.trainers, options.seed) as trainers:
        for _ in trainers.events("ready", _POLL_S):
            pass
        for pass_index in range(N_PASSES):
            begun = time.monotonic()
            trainers.start_pass()
            for event in trainers.events("pass_done", _POLL_S):
                watch.take(event)
            cluster.flush()
            seconds += time.monotonic() - begun
            losses.append(held_out_loss(ClusterRows(cluster), sample))
            display.say(f"  pass {pass_index + 1}/{N_PASSES}: held-out loss {losses[-2]:.3f} -> {losses[-1]:.3f}")
    return losses, seconds, watch.n_rows


class _Watch:
    """Gathers the trainers' progress and the cluster's state into one line."""

    def __init__(self, cluster: kvemb.Cluster, n_trainers: int, display: Display) -> None:
        self._cluster, self._display = cluster, display
        self._latest: list[TrainingProgress | None] = [None] * n_trainers
        self._pulled, self._applied = Rate(), Rate()
        for rate in (self._pulled, self._applied):
            rate.update(0)
        self.n_rows = 0

    def take(self, event: tuple[int, dict[str, object]] | None) -> None:
        """Take a trainer's message, or the passing of time."""
        if event is not None and "progress" in event[1]:
            progress = TrainingProgress(**event[1]["progress"])  # type: ignore[arg-type]
            self._latest[event[0]] = progress
            self.n_rows += progress.n_rows
        if self._display.due():
            self._display.progress(self._line())

    def _line(self) -> str:
        known = [progress for progress in self._latest if progress is not None]
        if not known:
            return "  trainers are starting their pass"
        status = self._cluster.status()
        step, steps = sum(p.step for p in known), sum(p.n_steps for p in known)
        applied = sum(shard.reply.rows_applied for shard in status.shards if shard.reply is not None)
        nodes = ", ".join(f"{short(node.n_keys)} rows {node.used_bytes / _MB:.0f} MB" for node in status.nodes)
        loss = sum(p.loss for p in known) / len(known)
        return (
            f"  pass {known[0].pass_index + 1}/{N_PASSES} {step:4}/{steps} steps  loss {loss:.3f}  "
            f"pulled {short(self._pulled.update(self.n_rows)):>5} rows/s  applied {short(self._applied.update(applied)):>5} rows/s  "
            f"nodes: {nodes}"
        )


def _run_local(corpus: Corpus, seed: int, display: Display) -> LocalResult:
    display.say("The same training in one process, on local NumPy arrays:")

    def report(progress: TrainingProgress) -> None:
        if display.due():
            where = f"pass {progress.pass_index + 1}/{N_PASSES} {progress.step:4}/{progress.n_steps} steps"
            display.progress(f"  {where}  loss {progress.loss:.3f}")

    return run_local(corpus, seed=seed, report=report)


def _show_result(display: Display, losses: list[float], local: list[float], found: dict[str, list[tuple[str, float]]]) -> None:
    display.say()
    display.say("Held-out loss        cluster    one process")
    for index, (ours, theirs) in enumerate(zip(losses, local, strict=True)):
        name = "before training" if index == 0 else f"after pass {index}"
        display.say(f"  {name:<17} {ours:8.3f}    {theirs:8.3f}")
    display.say("Nearest neighbours, as the cluster learnt them")
    for word, near in found.items():
        display.say(f"  {word:<17} " + "  ".join(f"{other} {cosine:.2f}" for other, cosine in near))
    display.say("Result")
