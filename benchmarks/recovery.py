"""The question `recovery`: how fast does a shard come back from its journal, and a node that came back empty? Its steps: recovery_steps."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import kvemb
from benchmarks.apply import OPTIMIZERS, STORES
from benchmarks.apply_load import TIMEOUT_S, Load, Pass, cache_mb_for, check_written, make_load, our_pass
from benchmarks.disk import file_system
from benchmarks.measure import Contender, Spread
from benchmarks.options import whole
from benchmarks.peers import PeerAbsentError, fill_benchmark_keys, redis_benchmark
from benchmarks.recovery_steps import Restored, Target, empty_and_repair, kill_and_replay, records, until_snapshot
from benchmarks.report import Line, Report, Section
from benchmarks.set_peer import redis_benchmark_set
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.stores.storage_kinds import open_store

REPLAY_STORED, REPLAY_LOST = "replay, writes had arrived", "replay, no write had arrived"
REPAIR_CACHE, REPAIR_DISK = "repair from the cache", "repair from snapshot + journal"
REPAIR_SMALL = "repair from a journal of small batches"
_OVERHEAD_BYTES = 160
_OPEN_S = 20.0
# The passes that fill a journal of which a snapshot is to let the old part go: one, and this share of the next.
_FULL_AFTER_PASSES = 1.4


def recovery(options: argparse.Namespace) -> Report:
    """How many rows per second does a killed shard replay, and how many does it give back to a storage node that came back empty?

    One shard with durability fsync, one node. In every round every row is pushed and flushed, then the shard is killed (SIGKILL) and
    started again: it replays those pushes (and as many of the round before), of which storage has everything, so that rows are read and
    found to be there. Then the same with every record put back to what it was before the last pushes, as if no write of them had arrived:
    rows are read, computed and written. Then the node is killed and started empty: the shard writes every row anew, from its cache, which
    has all of them. A second shard on a node of its own has no cache (cache_mb 0): it makes its rows from a local snapshot and the journal
    behind it, whose size is in the settings. A third one, without a cache either, makes them from its journal alone, into which every row
    came once in every round, by pushes of a few rows (--small-batch), each acknowledged before the next. Read: k rows/s of a replay counts
    the rows of the journal and the time that the shard states (recovery_s of its status), of a repair the table's rows and the time from
    the marker that says "in repair" to the node's return, seen from outside; / apply and / SET are divided by the rows/s of the peers,
    within a round: what the same shard applies when rows are pushed to it (push + flush), and pipelined SETs of Redis' own benchmark
    program (in C), of values of a record's size, on the same server. wait s is what comes on top: of a replay the whole time from the
    process's start until it serves, replay included; of a repair the time from the node's return until the repair began (a shard that has
    nothing to write looks once a second). There is no target; the figure says how long a job stands still: rows of a shard / rows per
    second. Values are medians with (smallest..largest). After every step every row and version must be, bit for bit, what it was before.
    """
    sections = []
    versions: dict[str, str] = {}
    for store in options.store:
        sections.append(_measure(store, options, versions))
    return Report("recovery", sections, versions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `recovery` can be asked."""
    parser.add_argument("--store", nargs="+", choices=STORES, default=["redis", "memcached"], help="storage kinds (redis memcached)")
    parser.add_argument("--dim", type=whole(1), default=16, metavar="N", help="weights per row (16)")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adam", help="(adam)")
    parser.add_argument("--rows", type=whole(1), default=160_000, metavar="N", help="rows in the table (160000)")
    parser.add_argument("--batch", type=whole(1), default=40_000, metavar="N", help="rows of a push (40000)")
    parser.add_argument("--small-batch", type=whole(1), default=500, metavar="N", help="rows of a small push (500)")
    parser.add_argument("--repeats", type=whole(1), default=3, metavar="N", help="rounds (3)")


def lines_of(ours: Mapping[str, Sequence[Restored]], passes: Sequence[Pass], sets: Sequence[float]) -> list[Line]:
    """Lay the rounds out, peers first.

    Args:
        ours: of each round, by name.
        passes: the shard's applies in each round.
        sets: SETs per second of each round, or nothing.
    """
    lines = [Line("push + flush", {"k rows/s": Spread.of([one.rows_per_s / 1e3 for one in passes])})]
    if sets:
        lines.append(Line("redis-benchmark SET -P 256 -c 4 (C)", {"k rows/s": Spread.of([one / 1e3 for one in sets])}))
    for name, rounds in ours.items():
        figures: dict[str, Spread | float | str] = {
            "k rows/s": Spread.of([one.rows_per_s / 1e3 for one in rounds]),
            "/ apply": Spread.of([one.rows_per_s / peer.rows_per_s for one, peer in zip(rounds, passes, strict=True)]),
        }
        if sets:
            figures["/ SET"] = Spread.of([one.rows_per_s / peer for one, peer in zip(rounds, sets, strict=True)])
        figures["wait s"] = Spread.of([one.waited_s for one in rounds])
        lines.append(Line(name, figures))
    return lines


def _measure(store: str, options: argparse.Namespace, versions: dict[str, str]) -> Section:
    with ExitStack() as stack:
        cached, uncached, small = (_target(stack, store, options, kind) for kind in ("cached", "snapshot", "small"))
        journal_bytes = _prepare(cached, uncached, options)
        versions[f"{store} server"] = cached.load.table.cluster.status().nodes[0].server
        peer, notes = _peer(store, cached, options.rows)
        ours: dict[str, list[Restored]] = {name: [] for name in (REPLAY_STORED, REPLAY_LOST, REPAIR_CACHE, REPAIR_DISK, REPAIR_SMALL)}
        passes, sets = [], []
        for _ in range(options.repeats):
            passes.append(_pass(cached))
            sets += [] if peer is None else [peer()]
            ours[REPLAY_STORED].append(kill_and_replay(cached, n_passes=2))
            before = records(cached)
            cached.load.push_all()
            ours[REPLAY_LOST].append(kill_and_replay(cached, n_passes=1, lost=before))
            cached.load.push_all()  # a shard that was started has an empty cache
            ours[REPAIR_CACHE].append(empty_and_repair(cached))
            ours[REPAIR_DISK].append(empty_and_repair(uncached))
            push_one_by_one(small.load)
            ours[REPAIR_SMALL].append(empty_and_repair(small))
        for target in (cached, uncached, small):
            check_written(target.load)
        settings = {
            "store": store,
            "dim": options.dim,
            "optimizer": options.optimizer,
            "record_bytes": cached.load.table.definition.record.size_bytes,
            "rows": options.rows,
            "batch": options.batch,
            "small batch": options.small_batch,
            "journal MB behind the snapshot": f"{journal_bytes / 1e6:.1f}",
            "file system": file_system(cached.cluster.folder),
            "repeats": options.repeats,
        }
    return Section(settings, notes=notes, lines=lines_of(ours, passes, sets))


def push_one_by_one(load: Load) -> None:
    """Push every batch, each acknowledged before the next, so that the shard's journal gets them one by one."""
    for ids in load.batches:
        load.table.push(ids, load.grads[: len(ids)], timeout_s=TIMEOUT_S).wait(TIMEOUT_S)
    load.table.flush(TIMEOUT_S)


def _target(stack: ExitStack, store: str, options: argparse.Namespace, kind: str) -> Target:
    """Start a cluster whose rows come back from its cache ("cached"), "snapshot" and journal, or the journal of "small" batches."""
    spec, n_rows = OPTIMIZERS[options.optimizer](), options.rows
    record_bytes = 12 + 4 * (options.dim + spec.state_size(options.dim))
    memory_mb = max(1024, math.ceil(4 * n_rows * (record_bytes + _OVERHEAD_BYTES) / (1 << 20)))
    cache_mb = cache_mb_for(n_rows, record_bytes) if kind == "cached" else 0
    journal_mb = _journal_mb(options) if kind == "snapshot" else None
    cluster = LocalCluster(store, memory_mb=memory_mb, cache_mb=cache_mb, durability="fsync", journal_max_mb=journal_mb)
    stack.enter_context(cluster)
    opened = stack.enter_context(kvemb.connect(cluster.url))
    table = opened.create_table("bench", dim=options.dim, optimizer=spec, id_dtype="uint64")
    looker = stack.enter_context(open_store(opened.config.storage, role="shard:bench"))
    looker.open(Deadline.after(_OPEN_S))
    return Target(cluster, make_load(table, n_rows, options.small_batch if kind == "small" else options.batch), looker)


def _journal_mb(options: argparse.Namespace) -> int:
    """At which the journal takes a snapshot in the course of the second pass."""
    return max(1, int(_FULL_AFTER_PASSES * options.rows * (8 + 4 * options.dim)) >> 20)


def _prepare(cached: Target, uncached: Target, options: argparse.Namespace) -> int:
    """Create every row; where there is no cache, put a snapshot and a piece of journal in its place, and return the latter's bytes."""
    cached.load.push_all()  # which the first replay finds in the journal beside the pass of the first round
    for _ in range(2):
        uncached.load.push_all()
    return until_snapshot(uncached.load, _journal_mb(options) << 20).journal_bytes


def _pass(target: Target) -> Pass:
    cluster = target.cluster
    return our_pass(target.load, [cluster.servers[0].process.pid], [cluster.shards[0].pid])


def _peer(store: str, target: Target, n_rows: int) -> tuple[Callable[[], float] | None, list[str]]:
    """Return what tells the SETs per second of a moment."""
    if store == "memcached":
        return None, ["redis-benchmark skipped: it does not speak memcached's protocol, and Debian ships no such program in C for it."]
    port, value_bytes = target.cluster.servers[0].port, target.load.table.definition.record.size_bytes
    try:
        redis_benchmark(port, value_bytes=value_bytes, n_keys=n_rows, missing=0.0)  # looks whether it is installed
    except PeerAbsentError as absent:
        return None, [f"Peer skipped: {absent}"]
    contender = redis_benchmark_set(port, value_bytes=value_bytes, n_keys=n_rows, n_requests=n_rows)
    return lambda: _sets_per_s(contender, port, value_bytes, n_rows), []


def _sets_per_s(contender: Contender, port: int, value_bytes: int, n_keys: int) -> float:
    fill_benchmark_keys(port, value_bytes, n_keys)  # the node came back empty in the round before
    turn = contender.take_turn(0.0)
    return turn.n_rows / turn.wall_s
