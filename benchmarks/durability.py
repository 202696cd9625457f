"""The question `durability`: what does it cost that an accepted push survives a power failure? Its load is in apply_load."""

import argparse
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import kvemb
from benchmarks.apply import OPTIMIZERS, STORES
from benchmarks.apply_load import Load, Pass, cache_mb_for, check_sums, check_written, make_load, our_pass
from benchmarks.disk import Moved, append_durably, file_system
from benchmarks.measure import Spread
from benchmarks.options import whole
from benchmarks.report import Line, Report, Section
from kvemb.local_cluster import LocalCluster

WAYS = ("os", "fsync")
LEAST_RATIO = 0.8
_OVERHEAD_BYTES = 160


def durability(options: argparse.Namespace) -> Report:
    """How many rows per second does one shard apply with a journal, and with one that is on disk before a push counts?

    Two clusters of one storage server and one shard each, which differ in parameter_servers.durability only: os (a push is accepted
    once its journal entry is with the operating system) and fsync (once it is on the disk). In
    every round each of them, in changing order, applies every row of the same table once: a client pushes batches of distinct ids,
    prepared beforehand, and waits for the flush. Read: ratio is this line's rows/s divided by that of os, within a round (target of
    fsync: at least 0.8); PS, server and client µs/row are CPU time of the shard, the storage server and the pushing client; journal
    MB/s are the bytes that the journal grew by per second of the pass, and B/row per row. Beside it is what the disk alone does:
    as many bytes appended to a file in the same folder, in as many pieces as the shard had batches, each with an fdatasync; where that is
    not several times faster than the journal, the disk decides. The file system is in the settings: on a tmpfs an fsync costs
    nothing. Every shard keeps its rows in its cache (--cache none: it reads them before it writes them, which the journal does not
    touch). Local snapshots, one for every journal_max_mb of journal, are not in it: none is due here. Values are medians with
    (smallest..largest). Before: pushes of whole gradients must come out as the exact sums. After: every pushed id has a row, and no other.
    """
    sections = []
    versions: dict[str, str] = {}
    for store in options.store:
        for cache in options.cache:
            sections.append(_measure(store, cache == "all", options, versions))
    return Report("durability", sections, versions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `durability` can be asked."""
    parser.add_argument("--store", nargs="+", choices=STORES, default=["redis"], help="storage kinds, in turn (redis)")
    parser.add_argument("--dim", type=whole(1), default=16, metavar="N", help="weights per row (16)")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adam", help="(adam)")
    parser.add_argument("--cache", nargs="+", choices=["all", "none"], default=["all"], help="rows that the shard keeps (all)")
    parser.add_argument("--rows", type=whole(1), default=400_000, metavar="N", help="rows in the table (400000)")
    parser.add_argument("--batch", type=whole(1), default=40_000, metavar="N", help="rows of a push (40000)")
    parser.add_argument("--repeats", type=whole(1), default=5, metavar="N", help="rounds, after one to warm up (5)")


def lines_of(passes: Mapping[str, Sequence[Pass]], disk: Sequence[Moved]) -> list[Line]:
    """Lay the rounds out.

    Args:
        passes: of each round, by durability.
        disk: what the disk alone did in each round.
    """
    lines = []
    for way, rounds in passes.items():
        pairs = list(zip(rounds, passes["os"], strict=True))
        figures: dict[str, Spread | float | str] = {
            "k rows/s": Spread.of([one.rows_per_s / 1e3 for one in rounds]),
            "ratio": Spread.of([one.rows_per_s / base.rows_per_s for one, base in pairs]),
            "PS µs/row": Spread.of([one.ps_cpu_s * 1e6 / one.n_rows for one in rounds]),
            "server µs/row": Spread.of([one.server_cpu_s * 1e6 / one.n_rows for one in rounds]),
            "client µs/row": Spread.of([one.client_cpu_s * 1e6 / one.n_rows for one in rounds]),
            "journal MB/s": Spread.of([one.journal_bytes / 1e6 / one.wall_s for one in rounds]),
            "B/row": rounds[-1].journal_bytes / rounds[-1].n_rows,
            "rows/batch": f"{sum(one.n_rows for one in rounds) / sum(one.n_batches for one in rounds):,.0f}",
            "target": f"ratio >= {LEAST_RATIO}" if way == "fsync" else "–",
        }
        lines.append(Line(f"durability {way}", figures))
    return [*lines, Line("write + fdatasync of as much", {"journal MB/s": Spread.of([one.mb_per_s for one in disk])})]


def _measure(store: str, cached: bool, options: argparse.Namespace, versions: dict[str, str]) -> Section:
    spec = OPTIMIZERS[options.optimizer]()
    record_bytes = 12 + 4 * (options.dim + spec.state_size(options.dim))
    cache_mb = cache_mb_for(options.rows, record_bytes) if cached else 0
    memory_mb = max(1024, math.ceil(2 * options.rows * (record_bytes + _OVERHEAD_BYTES) / (1 << 20)))
    # Never full: a snapshot would fall into some rounds and not into others.
    journal_max_mb = 4096 + (options.repeats + 1) * (options.rows * (8 + 4 * options.dim) >> 20)
    with ExitStack() as stack:
        clusters, loads = {}, {}
        for way in WAYS:
            cluster = LocalCluster(store, memory_mb=memory_mb, cache_mb=cache_mb, durability=way, journal_max_mb=journal_max_mb)
            clusters[way] = stack.enter_context(cluster)
            opened = stack.enter_context(kvemb.connect(cluster.url))
            check_sums(opened)
            table = opened.create_table("bench", dim=options.dim, optimizer=spec, id_dtype="uint64")
            loads[way] = make_load(table, options.rows, options.batch)
            versions[f"{store} server"] = opened.status().nodes[0].server
        passes, disk = _rounds(clusters, loads, options.repeats)
        for load in loads.values():
            check_written(load)
        settings = {
            "store": store,
            "dim": options.dim,
            "optimizer": options.optimizer,
            "record_bytes": record_bytes,
            "cached": "every row" if cached else "none",
            "rows": options.rows,
            "batch": options.batch,
            "file system": file_system(clusters["fsync"].folder),
            "repeats": options.repeats,
        }
    return Section(settings, lines=lines_of(passes, disk))


def _rounds(clusters: Mapping[str, LocalCluster], loads: Mapping[str, Load], repeats: int) -> tuple[dict[str, list[Pass]], list[Moved]]:
    """Let all take turns, each round beginning with another one; the first round creates rows and does not count."""
    passes: dict[str, list[Pass]] = {way: [] for way in WAYS}
    disk = []
    for number in range(repeats + 1):
        for way in (*WAYS[number % len(WAYS) :], *WAYS[: number % len(WAYS)]):
            cluster = clusters[way]
            passes[way].append(our_pass(loads[way], [cluster.servers[0].process.pid], [cluster.shards[0].pid]))
        last = passes["fsync"][-1]
        disk.append(append_durably(clusters["fsync"].folder / "raw", last.journal_bytes, last.n_batches))
    return {way: rounds[1:] for way, rounds in passes.items()}, disk[1:]
