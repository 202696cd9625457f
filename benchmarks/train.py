"""The question `train`: how many rows per second are trained, pull + push + applied, beside TFRA on the same Redis? Loops: train_loop."""

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np
from numpy.typing import NDArray

import kvemb
from benchmarks import peers
from benchmarks.ids import row_ids, sampler
from benchmarks.measure import Spread, Turn
from benchmarks.options import positive, whole
from benchmarks.report import Line, Report, Section
from benchmarks.tfra.peer import Tfra, started
from benchmarks.train_loop import CommandCounter, Ours, Stretch, check_first_steps, check_trained, stretch
from kvemb.api import Cluster
from kvemb.config import DURABILITIES
from kvemb.local_cluster import LocalCluster
from kvemb.schema.buckets import LAYOUTS

STORES = ("redis", "valkey")
WIRE_DTYPES = ("float32", "bfloat16", "float16")
BATCH_IDS = 26 * 4096
N_SHARDS = 2
LEARNING_RATE = 0.01
TARGETS = {16: 1.5, 64: 1.4}
_N_BATCHES = 96
_SEED = 3
_OVERHEAD_BYTES = 160
_TFRA_OPERATIONS = 6.0


@dataclass(frozen=True)
class Way:
    """How ours runs: durability, how gradients travel, whether with TLS, with a subscriber of the feed, with a save every so often."""

    name: str
    durability: str
    wire_dtype: str = "float32"
    tls: bool = False
    subscriber: bool = False
    save_every_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Runner:
    """Ours, running in one way on a cluster of its own."""

    name: str
    cluster: LocalCluster
    opened: Cluster
    ours: Ours
    counter: CommandCounter

    def turn(self, options: argparse.Namespace) -> Stretch:
        """Train for one turn."""
        one = self.stretch(lambda: self.ours.run(options.seconds, options.unapplied))
        return replace(one, staleness=self.ours.staleness)

    def stretch(self, run: Callable[[], Turn]) -> Stretch:
        """Take stock of a turn on this cluster's server."""
        server, shards = [self.cluster.servers[0].process.pid], [shard.pid for shard in self.cluster.shards]
        return stretch(run, server, shards, self.counter)


def train(options: argparse.Namespace) -> Report:
    """How many unique rows per second are trained, pull + push + applied, beside TFRA on the same server?

    One trainer trains Zipf(1.05) batches of 26 x 4096 ids (about 32,000 distinct rows of 1,000,000) with Adam. A step: dedupe the ids,
    pull the distinct rows with their versions, take the gradient of their sum times a constant (so that the model costs nothing),
    push; the shards (two) apply. At most --unapplied pushes are under way, and a turn ends with a flush: everything counted is in
    storage. Ours runs in several ways, each with a cluster of its own: with a journal that is not synced (TFRA has none), and with one
    that is; and with gradients sent in --wire-dtype. TFRA does the same in its own process: tf.unique, shadow_ops.embedding_lookup,
    DynamicEmbeddingOptimizer(Adam), in a database of its own on the first cluster's server. All take turns in every round. Read: rows
    are distinct rows per step, summed; / TFRA is this line's rows/s divided by TFRA's, within a round; operations/row are reads and
    writes of one value per trained row (TFRA's are those of its design: W, m and v read and written, as INFO counts its commands of
    many fields each, not the fields; ours are GETs, keys of MGETs, and SETs, from INFO), calls/row are commands as INFO counts them;
    µs/row is CPU time of the storage server, the shards and the trainer's process; changed and elapsed are the staleness of ours: the
    fraction of pushed rows that had changed since their pull, and how many batches ago at most (mean over pushes).
    There are 96 batches, taken in turn: later rounds meet rows again that earlier ones met. Values are medians of the rounds with
    (smallest..largest). Before: the first steps, one by one, must give what Adam in NumPy gives, in all cases and for TFRA. After: every
    row that was pushed exists, has moved the right way, and no other row exists.
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
    parser.add_argument("--layout", choices=LAYOUTS, default="fast", help="of the table (fast)")
    parser.add_argument("--unapplied", type=whole(0), default=2, metavar="N", help="pushes that may be under way at the next pull (2)")
    parser.add_argument("--durability", nargs="+", choices=DURABILITIES, default=["os", "fsync"], help="of the shards (os fsync)")
    parser.add_argument("--wire-dtype", choices=WIRE_DTYPES, default="bfloat16", help="of the last way's gradients (bfloat16)")
    parser.add_argument("--tls", action="store_true", help="also the first way with TLS between trainer, shards and storage (redis)")
    parser.add_argument("--subscriber", action="store_true", help="also the first way with a process that subscribes to the feed")
    parser.add_argument("--save-every", type=positive, metavar="S", help="also the first way while a log of checkpoints is written")
    parser.add_argument("--seconds", type=positive, default=2.0, metavar="S", help="length of one turn (2)")
    parser.add_argument("--repeats", type=whole(1), default=3, metavar="N", help="rounds, after one to warm up (3)")


def lines_of(
    ours: Mapping[str, Sequence[Stretch]], others: Sequence[Stretch], *, dim: int, targets: Mapping[int, float] = TARGETS
) -> list[Line]:
    """Lay the rounds out.

    Args:
        ours: of each round, by name; targets are those of the first.
        others: TFRA's, or none.
        dim: decides the target, one of
        targets: rows/s divided by TFRA's, by dim.
    """
    lines: list[Line] = []
    first = next(iter(ours), "")
    for name, rounds in ours.items():
        figures = _figures(rounds) | {
            "changed": Spread.of([mean(push.changed_fraction for push in one.staleness) for one in rounds]),
            "elapsed": Spread.of([mean(push.batches_elapsed for push in one.staleness) for one in rounds]),
            "/ plain": "–",
            "target": f"/ TFRA >= {targets[dim]}" if not lines and dim in targets else "–",
        }
        if name.startswith(tuple(f"{first}, {beside}" for beside in ("over TLS", "with a subscriber", "saved every"))):
            plain = ours[first]
            figures["/ plain"] = Spread.of([mine.rows_per_s / one.rows_per_s for mine, one in zip(rounds, plain, strict=True)])
        if others:
            figures["/ TFRA"] = Spread.of([mine.rows_per_s / theirs.rows_per_s for mine, theirs in zip(rounds, others, strict=True)])
        lines.append(Line(name, figures))
    if others:
        figures = _figures(others) | {"operations/row": _TFRA_OPERATIONS, "PS µs/row": "–", "target": "–"}
        lines.append(Line("TFRA lookup + Adam", figures))
    return lines


def _figures(rounds: Sequence[Stretch]) -> dict[str, Spread | float | str]:
    return {
        "k rows/s": Spread.of([one.rows_per_s / 1e3 for one in rounds]),
        "/ TFRA": "–",
        "operations/row": Spread.of([one.per_row(one.n_operations) for one in rounds]),
        "calls/row": Spread.of([one.per_row(one.n_calls) for one in rounds]),
        "server µs/row": Spread.of([one.per_row(one.server_cpu_s * 1e6) for one in rounds]),
        "PS µs/row": Spread.of([one.per_row(one.ps_cpu_s * 1e6) for one in rounds]),
        "trainer µs/row": Spread.of([one.per_row(one.turn.client_cpu_s * 1e6) for one in rounds]),
    }


def ways_of(options: argparse.Namespace) -> list[Way]:
    """Return the ways in which ours runs."""
    ways = [Way(f"ours, durability {durability}", durability) for durability in options.durability]
    if options.wire_dtype != "float32":
        name = f"ours, durability {options.durability[0]}, {options.wire_dtype}"
        ways.append(Way(name, options.durability[0], options.wire_dtype))
    if options.tls:
        ways.append(Way(f"{ways[0].name}, over TLS", options.durability[0], tls=True))
    if options.subscriber:
        ways.append(Way(f"{ways[0].name}, with a subscriber", options.durability[0], subscriber=True))
    if options.save_every:
        ways.append(Way(f"{ways[0].name}, saved every {options.save_every:g} s", options.durability[0], save_every_s=options.save_every))
    return ways


def _measure(store: str, dim: int, options: argparse.Namespace, versions: dict[str, str]) -> Section:
    draw = sampler("zipf", options.rows, _SEED)
    batches = [row_ids(draw(BATCH_IDS)) for _ in range(_N_BATCHES)]
    record_bytes = 12 + 12 * dim
    with ExitStack() as stack:
        runners = [_runner(stack, store, dim, way, batches, options, versions) for way in ways_of(options)]
        other, notes = _tfra(stack, runners[0].cluster.servers[0].port, dim, batches, versions)
        for runner in runners:
            check_first_steps(runner.ours, other if runner is runners[0] else None, LEARNING_RATE)
        mine, theirs = _rounds(runners, other, options)
        for runner in runners:
            check_trained(runner.ours)
    settings = {
        "store": store,
        "dim": dim,
        "optimizer": "adam",
        "record_bytes": record_bytes,
        "shards": N_SHARDS,
        "rows": options.rows,
        "layout": options.layout,
        "rows/step": round(float(np.mean([len(np.unique(ids)) for ids in batches[:8]]))),
        "unapplied": options.unapplied,
        "seconds": options.seconds,
        "repeats": options.repeats,
    }
    return Section(settings, notes=notes, lines=lines_of(mine, theirs, dim=dim))


def _runner(
    stack: ExitStack,
    store: str,
    dim: int,
    way: Way,
    batches: Sequence[NDArray[np.uint64]],
    options: argparse.Namespace,
    versions: dict[str, str],
) -> Runner:
    memory_mb = max(1024, math.ceil(2.5 * options.rows * (12 + 12 * dim + 3 * _OVERHEAD_BYTES) / (1 << 20)))
    cluster = stack.enter_context(_kind_of(way)(store, shards=N_SHARDS, memory_mb=memory_mb, durability=way.durability))
    opened = stack.enter_context(kvemb.connect(cluster.url))
    versions[f"{store} server"] = opened.status().nodes[0].server
    spec = kvemb.optim.adam(lr=LEARNING_RATE)
    table = opened.create_table(
        "bench",
        dim=dim,
        optimizer=spec,
        initializer=kvemb.init.zeros(),
        id_dtype="uint64",
        expected_rows=options.rows,
        layout=options.layout,
    )
    table.set_wire_dtype(way.wire_dtype)
    counter = stack.enter_context(CommandCounter.on(cluster.servers[0].port))
    if way.subscriber:
        stack.enter_context(_beside([sys.executable, "-c", _SUBSCRIBER, cluster.url]))
    if way.save_every_s:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        words = ["save", folder, "--every", str(way.save_every_s), "--config", cluster.url]
        stack.enter_context(_beside([sys.executable, "-m", "kvemb.cli", *words]))
    return Runner(way.name, cluster, opened, Ours(table, batches), counter)


def _kind_of(way: Way) -> type[LocalCluster]:
    if not way.tls:
        return LocalCluster
    from tests.integration.encrypted_cluster import EncryptedCluster

    return EncryptedCluster


_SUBSCRIBER = """
import sys, kvemb
with kvemb.connect(sys.argv[1]) as cluster, cluster.feed.open() as feed:
    print("subscribed", flush=True)
    for event in feed:
        pass
"""


@contextmanager
def _beside(command: Sequence[str]) -> Iterator[None]:
    """Have a process run beside the training, once it has said a line."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


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


def _rounds(runners: Sequence[Runner], other: Tfra | None, options: argparse.Namespace) -> tuple[dict[str, list[Stretch]], list[Stretch]]:
    """Let all take turns; the first round creates rows and fills caches, and does not count."""
    mine: dict[str, list[Stretch]] = {runner.name: [] for runner in runners}
    theirs = []
    for _ in range(options.repeats + 1):
        for runner in runners:
            mine[runner.name].append(runner.turn(options))
        if other is not None:
            theirs.append(runners[0].stretch(lambda: other.turn("train", options.seconds)))
    return {name: rounds[1:] for name, rounds in mine.items()}, theirs[1:]
