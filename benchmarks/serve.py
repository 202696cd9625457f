"""The question `serve`: how soon does a serving client see what was applied, and how long does a look-up take, cached and not?"""

import argparse
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.synchronize import Event
from statistics import median
from typing import Any

import numpy as np
import redis
from prometheus_client import CollectorRegistry

import kvemb
import kvemb.init
import kvemb.optim
import kvemb.serve
from benchmarks import peers
from benchmarks.feature_store import feast_rows
from benchmarks.ids import row_ids
from benchmarks.measure import Contender, Spread, Turn, run_rounds
from benchmarks.options import positive, whole
from benchmarks.peers import PeerAbsentError
from benchmarks.publish import publishing, target_server, wait_whole
from benchmarks.report import Line, Report, Section
from kvemb.api.table import Table
from kvemb.errors import KvembError
from kvemb.local_cluster import LocalCluster
from kvemb.serve import ServingClient

PARTS = ("freshness", "cached", "uncached", "threads", "unseen", "feast", "beside")
LOOKUP_IDS, CACHED_SHARE = 512, 0.95
_TRAINED_IDS = 2000  # of one push of the training beside
_PROBE = np.arange(10) + (1 << 40)
_FEAST_ROWS = 50_000
_READY_S, _ASSIGNED_AT_ONCE, _SET_AT_ONCE = 120.0, 50_000, 10_000


def serve(options: argparse.Namespace) -> Report:
    """How soon does a serving client see what was applied, and how long does a look-up take, from its cache and from storage?

    freshness: beside a trainer that pushes all the while to the same shard, rows that the client has in its cache are pushed, again and
    again; the client looks them up until it shows the push. Timed from the moment that the push is known to be applied, and from before
    it was sent. On Redis and memcached. cached: look-ups of 512 ids of which 95 % are in the cache, and no training. uncached: look-ups
    of 26 and 512 ids that storage is asked for, without a cache and with one that has none of them, in turn with redis-py's (hiredis) MGET
    of as many values of the same size and one numpy.frombuffer over them, call by call. threads: four threads look up without a cache,
    beside redis-benchmark (C). unseen: a million ids without a row; of how many is storage asked? feast: look-ups of 512 ids without a
    cache, in turn with those of Feast's online store of the same rows on the same server, where it is installed. beside: a trainer pulls
    and pushes as fast as it can, in turn alone and beside two serving processes that look up 26 ids at a time, --beside ids a second
    together, and a publisher to a Redis of its own, which catches up with what was pushed while it stood. Read: times are of single calls
    in µs: of each round p10, which says what a quiet machine would take, p50 and p99, and of these medians with (smallest..largest).
    """
    sections = []
    if "freshness" in options.parts:
        lines = [_freshness(store, options) for store in options.store]
        sections.append(Section({"part": "freshness", "dim": options.dim, "pushes": options.pushes}, lines=lines))
    parts: dict[str, Callable[[Table, LocalCluster, argparse.Namespace], Section]] = {
        "cached": _cached,
        "uncached": _uncached,
        "threads": _threads,
        "unseen": _unseen,
        "feast": _feast,
        "beside": _beside,
    }
    for part in [part for part in parts if part in options.parts]:
        with _filled("redis", options) as (table, local):
            sections.append(parts[part](table, local, options))
    return Report("serve", sections)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `serve` can be asked."""
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="see above (all)")
    parser.add_argument("--store", nargs="+", choices=("redis", "memcached"), default=["redis", "memcached"], help="of freshness (both)")
    parser.add_argument("--dim", type=whole(1), default=16, metavar="N", help="weights per row (16)")
    parser.add_argument("--rows", type=whole(1), default=400_000, metavar="N", help="rows in the table (400000)")
    parser.add_argument("--pushes", type=whole(1), default=500, metavar="N", help="of freshness (500)")
    parser.add_argument("--calls", type=whole(1), default=1000, metavar="N", help="look-ups in a round (1000)")
    parser.add_argument("--unseen", type=whole(1), default=1_000_000, metavar="N", help="ids without a row (1000000)")
    parser.add_argument("--beside", type=positive, default=20_000.0, metavar="X", help="ids a second that `beside` looks up (20000)")
    parser.add_argument("--seconds", type=positive, default=1.0, metavar="S", help="length of a turn of `threads`; `beside` has 5 x (1)")
    parser.add_argument("--repeats", type=whole(1), default=4, metavar="N", help="rounds, after one to warm up (4)")


# --- freshness ----------------------------------------------------------------------------------------------------------------------


def _freshness(store: str, options: argparse.Namespace) -> Line:
    spawned = multiprocessing.get_context("spawn")
    end = spawned.Event()
    with _filled(store, options) as (table, local):
        trainer = spawned.Process(target=_train, args=(local.url, options.dim, options.rows, end))
        trainer.start()
        try:
            with kvemb.serve.connect(local.url, max_age_ms=1e9) as client:
                client.lookup("bench", _PROBE)
                _require(client.wait_ready(_READY_S), "the feed is not followed")
                times = [_until_visible(table, client) for _ in range(options.pushes + 20)][20:]
        finally:
            end.set()
            trainer.join(_READY_S)
    applied, pushed = zip(*times, strict=True)
    figures: dict[str, Spread | float | str] = {}
    for name, some in (("applied", applied), ("pushed", pushed)):
        figures |= {f"{name} to visible, p50 ms": 1e3 * median(some), f"{name}, p99 ms": 1e3 * float(np.quantile(some, 0.99))}
    return Line(store, figures | {"target": "applied, p99 < 100 ms"})


def _until_visible(table: Table, client: ServingClient) -> tuple[float, float]:
    """Push; return the seconds from when it was known to be applied, and from before it was sent, until a look-up shows it."""
    before = client.lookup("bench", _PROBE)
    pushed_s = time.perf_counter()
    table.push(_PROBE, np.ones((len(_PROBE), table.dim), np.float32)).wait_applied(_READY_S)
    applied_s = time.perf_counter()
    while (client.lookup("bench", _PROBE) == before).any():
        _require(time.perf_counter() < applied_s + _READY_S, "a push is not visible")
        time.sleep(0.0005)
    seen_s = time.perf_counter()
    return seen_s - applied_s, seen_s - pushed_s


def _train(url: str, dim: int, n_rows: int, end: Event, steps: Any = None) -> None:
    """Push to random rows until told to end; if steps are counted, pull them before. A process of its own."""
    with kvemb.connect(url) as cluster:
        table, rng = cluster.table("bench"), np.random.default_rng(3)
        grads = np.ones((_TRAINED_IDS, dim), np.float32)
        while not end.is_set():
            ids = row_ids(rng.integers(0, n_rows, _TRAINED_IDS))
            if steps is not None:
                table.pull(ids)
                steps.value += 1
            table.push(ids, grads).wait_applied(_READY_S)


# --- look-ups -----------------------------------------------------------------------------------------------------------------------


def _cached(table: Table, local: LocalCluster, options: argparse.Namespace) -> Section:
    n_new = round(LOOKUP_IDS * (1 - CACHED_SHARE))
    n_warm = options.rows // 2
    rng = np.random.default_rng(1)
    with kvemb.serve.connect(local.url) as client:
        client.lookup("bench", row_ids(np.arange(n_warm)))
        _require(client.wait_ready(_READY_S), "the feed is not followed")
        client.lookup("bench", row_ids(np.arange(n_warm)))  # those that were read before it was followed age
        rounds, at = [], n_warm
        for _ in range(options.repeats + 1):
            took = []
            for _ in range(options.calls):
                at = n_warm if at + n_new > options.rows else at
                ids = row_ids(np.concatenate([rng.integers(0, n_warm, LOOKUP_IDS - n_new), np.arange(at, at + n_new)]))
                at += n_new
                took.append(_timed(partial(client.lookup, "bench", ids)))
            rounds.append(took)
        all_cached = [_timed(partial(client.lookup, "bench", ids[: LOOKUP_IDS - n_new])) for _ in range(options.calls)]
    figures = _percentiles(rounds[1:]) | {"target": "p50 < 300, p99 < 2000"}
    lines = [Line(f"{LOOKUP_IDS} ids, {n_new} of them not cached", figures), Line("all cached", _percentiles([all_cached]))]
    return Section({"part": "cached", "store": "redis", "dim": options.dim, "rows": options.rows}, lines=lines)


def _uncached(table: Table, local: LocalCluster, options: argparse.Namespace) -> Section:
    size, n = table.definition.record.size_bytes, options.rows
    rng, lines = np.random.default_rng(2), list[Line]()
    value, dim = np.zeros(size, np.uint8).tobytes(), options.dim
    with (
        redis.Redis(port=local.servers[0].port) as peer,
        kvemb.serve.connect(local.url, cache_mb=0, filter_mb=0) as plain,
        kvemb.serve.connect(local.url, cache_mb=4, max_age_ms=0) as caching,
    ):
        for start in range(0, n, _SET_AT_ONCE):
            peer.mset(dict.fromkeys(_keys(np.arange(start, min(start + _SET_AT_ONCE, n))), value))
        for client in (plain, caching):
            client.lookup("bench", row_ids(np.arange(10)))
        _require(caching.wait_ready(_READY_S), "the feed is not followed")

        def mget(keys: list[bytes]) -> Any:
            return np.frombuffer(b"".join(peer.mget(keys)), np.uint8).reshape(len(keys), size)[:, -4 * dim :].view(np.float32)

        for count in (26, LOOKUP_IDS):
            rounds: list[list[list[float]]] = []
            for _ in range(options.repeats + 1):
                took: list[list[float]] = [[], [], []]
                for _ in range(options.calls):
                    positions = rng.integers(0, n, count)
                    ids, keys = row_ids(positions), _keys(positions)
                    calls = (partial(plain.lookup, "bench", ids), partial(caching.lookup, "bench", ids), partial(mget, keys))
                    for some, call in zip(took, calls, strict=True):
                        some.append(_timed(call))
                rounds.append(took)
            names = ("no cache, no filter", "cache and filter, every id missed", "redis-py mget + frombuffer")
            theirs = [took[2] for took in rounds[1:]]
            for number, name in enumerate(names):
                mine = [took[number] for took in rounds[1:]]
                ratio = Spread.of([median(a) / median(b) for a, b in zip(mine, theirs, strict=True)])
                quiet = Spread.of([float(np.quantile(a, 0.1) / np.quantile(b, 0.1)) for a, b in zip(mine, theirs, strict=True)])
                target = {0: "<= 1.2" if count == 26 else "<= 1.0"}.get(number, "–")
                lines.append(
                    Line(f"{count} ids: {name}", _percentiles(mine) | {"/ mget, p50": ratio, "/ mget, p10": quiet, "target": target})
                )
    return Section({"part": "uncached", "store": "redis", "dim": dim, "record_bytes": size, "rows": n}, lines=lines)


def _threads(table: Table, local: LocalCluster, options: argparse.Namespace) -> Section:
    size, rng = table.definition.record.size_bytes, np.random.default_rng(4)
    batches = {count: [row_ids(rng.integers(0, options.rows, count)) for _ in range(16)] for count in (LOOKUP_IDS, 26 * 512)}
    contenders = []
    with kvemb.serve.connect(local.url, cache_mb=0, filter_mb=0) as client, ThreadPoolExecutor(4) as pool:
        for count, some in reversed(batches.items()):
            contenders.append(Contender(f"4 threads, {count} ids each", partial(_in_threads, pool, client, some)))
        notes = ["Ours of the ratio is the first line."]
        try:
            server = local.servers[0]
            contenders.append(peers.redis_benchmark(server.port, value_bytes=size, n_keys=options.rows, missing=0.0))
        except peers.PeerAbsentError as absent:
            notes.append(f"Peer skipped: {absent}")
        pids = [server.process.pid for server in local.servers]
        measured = run_rounds(contenders, pids, seconds=options.seconds, repeats=options.repeats)
    return Section({"part": "threads", "store": "redis", "dim": options.dim, "rows": options.rows}, measured, notes)


def _in_threads(pool: ThreadPoolExecutor, client: ServingClient, batches: Sequence[np.ndarray], seconds: float) -> Turn:
    begun_s, cpu_s = time.perf_counter(), time.process_time()

    def work(first: int) -> int:
        n, at = 0, first
        while time.perf_counter() - begun_s < seconds:
            n, at = n + len(client.lookup("bench", batches[at % len(batches)])), at + 1
        return n

    n_rows = sum(pool.map(work, range(4)))
    return Turn(n_rows, time.perf_counter() - begun_s, time.process_time() - cpu_s)


def _unseen(table: Table, local: LocalCluster, options: argparse.Namespace) -> Section:
    registry = CollectorRegistry()
    with kvemb.serve.connect(local.url) as client:
        registry.register(client)
        client.lookup("bench", row_ids(np.arange(10)))
        _require(client.wait_ready(_READY_S), "the filter is not built")
        labels = {"cluster": table.cluster.config.cluster, "table": "bench"}
        before, took = registry.get_sample_value("kvemb_serve_asked_ids_total", labels) or 0.0, list[float]()
        for start in range(0, options.unseen, LOOKUP_IDS):
            ids = row_ids(options.rows + np.arange(start, min(start + LOOKUP_IDS, options.unseen)))
            took.append(_timed(partial(client.lookup, "bench", ids)))
        asked = (registry.get_sample_value("kvemb_serve_asked_ids_total", labels) or 0.0) - before
        size = registry.get_sample_value("kvemb_serve_filter_bytes", labels) or 0.0
    figures: dict[str, Spread | float | str] = {
        "not asked for, %": 100 * (1 - asked / options.unseen),
        "filter, B/row": size / options.rows,
    }
    lines = [Line(f"{options.unseen} ids", figures | _percentiles([took]) | {"target": ">= 98 %"})]
    return Section({"part": "unseen", "store": "redis", "dim": options.dim, "rows": options.rows}, lines=lines)


def _feast(table: Table, local: LocalCluster, options: argparse.Namespace) -> Section:
    rng, lines, notes = np.random.default_rng(5), list[Line](), list[str]()
    positions = np.arange(min(options.rows, _FEAST_ROWS))
    ids = row_ids(positions) >> np.uint64(1)  # Feast's are signed
    rows = rng.normal(size=(len(ids), options.dim)).astype(np.float32)
    table.assign(ids, rows)
    try:
        with (
            kvemb.serve.connect(local.url, cache_mb=0, filter_mb=0) as client,
            feast_rows(local.servers[0].port, ids.astype(np.int64), rows) as theirs,
        ):
            rounds: list[list[list[float]]] = []
            for _ in range(options.repeats + 1):
                took: list[list[float]] = [[], []]
                for _ in range(max(1, options.calls // 20)):
                    some = rng.integers(0, len(ids), LOOKUP_IDS)
                    calls = (partial(client.lookup, "bench", ids[some]), partial(theirs, ids[some].astype(np.int64)))
                    for mine, call in zip(took, calls, strict=True):
                        mine.append(_timed(call))
                    _require(all(np.array_equal(call(), rows[some]) for call in calls), "rows differ")
                rounds.append(took)
        for number, name in enumerate(("ours, no cache", "Feast")):
            ratio = Spread.of([sum(took[1]) / sum(took[number]) for took in rounds[1:]])
            rate = Spread.of([1e6 * LOOKUP_IDS * len(took[number]) / sum(took[number]) for took in rounds[1:]])
            figures = {"rows/s": rate} | _percentiles([took[number] for took in rounds[1:]]) | {"rows/s / Feast": ratio}
            lines.append(Line(f"{LOOKUP_IDS} ids: {name}", figures | {"target": "–" if number else ">= 5"}))
    except PeerAbsentError as absent:
        notes.append(f"Peer skipped: {absent}")
    return Section({"part": "feast", "store": "redis", "dim": options.dim, "rows": len(ids)}, lines=lines, notes=notes)


# --- training beside it -------------------------------------------------------------------------------------------------------------


def _beside(table: Table, local: LocalCluster, options: argparse.Namespace) -> Section:
    spawned, turn_s = multiprocessing.get_context("spawn"), 5 * options.seconds
    end, serves = spawned.Event(), spawned.Event()
    steps, lookups = spawned.Value("q"), spawned.Value("q")
    reading = (local.url, options.rows, options.beside / 2, serves, end, lookups)
    processes = [spawned.Process(target=_train, args=(local.url, options.dim, options.rows, end, steps))]
    processes += [spawned.Process(target=_look_up, args=reading) for _ in range(2)]
    rates: dict[bool, list[float]] = {False: [], True: []}
    asked = []
    with target_server(local, 1024) as (server, client), publishing(local, server.address, "float32") as publisher:
        wait_whole(client)
        for process in processes:
            process.start()
        try:
            for number in range(2 * (options.repeats + 1)):
                beside = bool(number % 2)
                os.kill(publisher, signal.SIGCONT if beside else signal.SIGSTOP)
                (serves.set if beside else serves.clear)()
                time.sleep(turn_s / 5)
                before, read, begun_s = steps.value, lookups.value, time.perf_counter()
                while (took_s := time.perf_counter() - begun_s) < turn_s or steps.value == before:
                    _require(took_s < _READY_S, "the trainer makes no step")
                    time.sleep(min(turn_s, 0.05))
                rates[beside].append((steps.value - before) / took_s)
                if beside:
                    asked.append((lookups.value - read) / took_s)
        finally:
            os.kill(publisher, signal.SIGCONT)
            end.set()
            serves.set()
            for process in processes:
                process.join(_READY_S)
    alone, with_them = rates[False][1:], rates[True][1:]
    figures: dict[str, Spread | float | str] = {
        "steps/s alone": Spread.of(alone),
        "steps/s beside": Spread.of(with_them),
        "ids looked up/s": Spread.of(asked[1:]),
        "beside / alone": Spread.of([a / b for a, b in zip(with_them, alone, strict=True)]),
        "target": ">= 0.9",
    }
    lines = [Line("two readers and a publisher", figures)]
    return Section({"part": "beside", "store": "redis", "dim": options.dim, "rows": options.rows}, lines=lines)


def _look_up(url: str, n_rows: int, ids_per_s: float, serves: Event, end: Event, n_done: Any) -> None:
    """Look up at a pace while told to; a process of its own."""
    rng, count = np.random.default_rng(), 26
    with kvemb.serve.connect(url) as client:
        while not end.is_set():
            serves.wait()
            next_s = time.perf_counter()
            while serves.is_set() and not end.is_set():
                client.lookup("bench", row_ids(rng.zipf(1.2, count) % n_rows))
                with n_done:
                    n_done.value += count
                next_s += count / ids_per_s
                time.sleep(max(0.0, next_s - time.perf_counter()))


@contextmanager
def _filled(store: str, options: argparse.Namespace) -> Iterator[tuple[Table, LocalCluster]]:
    """A cluster of one node and one shard, and a table whose rows the shard knows."""
    with LocalCluster(store, 1, memory_mb=1024) as local, kvemb.connect(local.url) as cluster:
        table = cluster.create_table(
            "bench", dim=options.dim, id_dtype="uint64", optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros()
        )
        for start in range(0, options.rows, _ASSIGNED_AT_ONCE):
            ids = row_ids(np.arange(start, min(start + _ASSIGNED_AT_ONCE, options.rows)))
            table.assign(ids, np.ones((len(ids), options.dim), np.float32))
        yield table, local


def _keys(positions: np.ndarray) -> list[bytes]:
    return [b"raw:%010d" % at for at in positions.tolist()]


def _timed(call: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - begun_s)


def _percentiles(rounds: Sequence[Sequence[float]]) -> dict[str, Spread | float | str]:
    return {
        "p10 µs": Spread.of([float(np.quantile(took, 0.1)) for took in rounds]),
        "p50 µs": Spread.of([median(took) for took in rounds]),
        "p99 µs": Spread.of([float(np.quantile(took, 0.99)) for took in rounds]),
    }


def _require(good: bool, otherwise: str) -> None:
    if not good:
        raise KvembError(f"benchmarks serve: {otherwise}")
