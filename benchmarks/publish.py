"""The question `publish`: how fast does a publisher fill a projection, at what cost, and when does it have what was just applied?"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import redis

import kvemb
from benchmarks.ids import row_ids
from benchmarks.measure import Spread, cpu_s
from benchmarks.network import Network, NetworkSpec
from benchmarks.options import positive, whole
from benchmarks.report import Line, Report, Section
from benchmarks.train import STORES
from benchmarks.train_loop import TIMEOUT_S
from kvemb.api.table import Table
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.storage_servers import StorageServer, start_servers
from kvemb.net.deadline import Deadline

DTYPES = ("float32", "float16", "int8")
_STEP_IDS, _PROBE = 2_000, 12345
_PATIENCE_S = 600.0
_TICK_S = 0.01  # of the clock that counts CPU time


def publish(options: argparse.Namespace) -> Report:
    """How fast does a publisher fill a projection, at what cost, and when does it have what was just applied?

    A table of --rows rows of dim 16 with Adam, one node, one shard; the target is a Redis of its own. Fill: the target is flushed, and the
    publisher, which runs all the while, brings every row again, --repeats times for each dtype. Counted is from the first rows there to the
    last. Read: rows/s is wall time, "rows/s a core" is by the publisher's own CPU time; the servers' CPU is beside it. Fresh: the publisher
    writes through a proxy with a round trip of --rtt-ms and 1 Gbit/s, while a trainer pushes --steps-per-s steps of 2,000 rows. A row is
    pushed; the clock runs from the moment at which that is applied to that at which the target has it.
    """
    return Report("publish", [_on(store, options) for store in options.store])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `publish` can be asked."""
    parser.add_argument("--store", nargs="+", choices=STORES, default=["redis"], help="storage kinds, in turn (redis)")
    parser.add_argument("--rows", type=whole(1), default=1_000_000, metavar="N", help="rows of the table (1000000)")
    parser.add_argument("--repeats", type=whole(1), default=3, metavar="N", help="fills for each dtype (3)")
    parser.add_argument("--rtt-ms", type=positive, default=50.0, metavar="X", help="round trip to the target (50)")
    parser.add_argument("--steps-per-s", type=positive, default=10.0, metavar="X", help="of the trainer (10)")
    parser.add_argument("--probes", type=whole(1), default=200, metavar="N", help="rows that are timed (200)")


def _on(store: str, options: argparse.Namespace) -> Section:
    memory_mb = max(1024, options.rows * 400 >> 20)
    with ExitStack() as stack:
        local = stack.enter_context(LocalCluster(store, memory_mb=memory_mb, durability="os"))
        cluster = stack.enter_context(kvemb.connect(local.url))
        table = cluster.create_table("bench", dim=16, optimizer=kvemb.optim.adam(lr=0.01), id_dtype="uint64")
        for start in range(0, options.rows, 100_000):
            ids = row_ids(np.arange(start, min(start + 100_000, options.rows)))
            table.push(ids, np.random.default_rng(start).standard_normal((len(ids), 16), np.float32), timeout_s=TIMEOUT_S)
        table.flush(TIMEOUT_S)
        lines = [_filled(local, memory_mb, dtype, options) for dtype in DTYPES]
        lines.append(_fresh(local, table, options))
    return Section({"store": store, "dim": 16, "optimizer": "adam", "rows": options.rows, "rtt ms": options.rtt_ms}, lines=lines)


@contextmanager
def target_server(local: LocalCluster, memory_mb: int) -> Iterator[tuple[StorageServer, redis.Redis]]:
    """A Redis of its own, and a connection to it."""
    (server,) = start_servers("redis", 1, local.folder, memory_mb)
    try:
        yield server, redis.Redis(port=server.port, protocol=2)
    finally:
        server.process.kill()


@contextmanager
def publishing(local: LocalCluster, address: str, dtype: str) -> Iterator[int]:
    """Run a publisher of the table `bench` meanwhile; its process id."""
    words = ["publish", str(local.config_path), "--to", f"redis://{address}", "--tables", "bench", "--dtype", dtype]
    with subprocess.Popen([sys.executable, "-m", "kvemb.cli", *words], stdout=subprocess.DEVNULL) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def _whole(client: "redis.Redis") -> bool:
    return bool(json.loads(client.get("kvemb:projection:1/1") or b"{}").get("until"))


def wait_whole(client: "redis.Redis") -> None:
    """Wait until a target has every row."""
    deadline = Deadline.after(_PATIENCE_S)
    while not _whole(client):
        if deadline.expired:
            raise RuntimeError(f"the projection was not whole after {_PATIENCE_S:g} s")
        time.sleep(0.01)


def _n_rows(client: "redis.Redis") -> int:
    with client.pipeline(transaction=False) as pipe:
        for key in client.keys("???{???}"):
            pipe.hlen(key)
        return sum(pipe.execute())


def _filled(local: LocalCluster, memory_mb: int, dtype: str, options: argparse.Namespace) -> Line:
    speeds: list[float] = []
    costs: dict[str, list[float]] = {"publisher": [], "storage": [], "target": []}
    with target_server(local, memory_mb) as (server, client), publishing(local, server.address, dtype) as pid:
        pids = {"publisher": pid, "storage": local.servers[0].process.pid, "target": server.process.pid}
        for turn in range(options.repeats + 1):  # the first warms up
            client.flushall()
            while not (n_before := _n_rows(client)):
                time.sleep(0.002)
            begun_s, begun = time.perf_counter(), {name: cpu_s([one]) for name, one in pids.items()}
            wait_whole(client)
            took_s, ended = time.perf_counter() - begun_s, {name: cpu_s([one]) for name, one in pids.items()}
            n_rows = max(1, _n_rows(client) - n_before)
            if turn:
                speeds.append(n_rows / took_s)
                for name in costs:
                    costs[name].append(max(_TICK_S, ended[name] - begun[name]) / n_rows * 1e6)
        used = client.info("memory")["used_memory_dataset"] / options.rows
    figures: dict[str, Spread | float | str] = {
        "rows/s": Spread.of(speeds),
        "rows/s a core": Spread.of([1e6 / cost for cost in costs["publisher"]]),
        **{f"{name} µs/row": Spread.of(cost) for name, cost in costs.items()},
        "bytes/row there": used,
    }
    return Line(f"fill, {dtype}", figures)


def _fresh(local: LocalCluster, table: Table, options: argparse.Namespace) -> Line:
    with ExitStack() as stack:
        server, client = stack.enter_context(target_server(local, 1024))
        network = stack.enter_context(Network(NetworkSpec(options.rtt_ms, 1.0), [("publisher", "target", server.address)]))
        stack.enter_context(publishing(local, network.addresses["publisher", "target"], "int8"))
        wait_whole(client)
        end = threading.Event()
        trainer = threading.Thread(target=_train, args=(local.url, options, end))
        trainer.start()
        try:
            late_s = [_probe(table, client) for _ in range(options.probes)]
        finally:
            end.set()
            trainer.join()
    p50, p99, most = np.percentile(late_s, [50, 99, 100]) * 1e3
    return Line("fresh, int8", {"p50 ms": float(p50), "p99 ms": float(p99), "longest ms": float(most), "target": "p99 < 1000"})


def _train(url: str, options: argparse.Namespace, end: threading.Event) -> None:
    rng = np.random.default_rng(7)
    with kvemb.connect(url) as cluster:
        table = cluster.table("bench")
        while not end.wait(1 / options.steps_per_s):
            ids = row_ids(rng.choice(options.rows, min(_STEP_IDS, options.rows), replace=False))
            table.push(ids, np.ones((len(ids), 16), np.float32), timeout_s=TIMEOUT_S)


def _probe(table: Table, client: "redis.Redis") -> float:
    """Change a row; return how long after that was applied the target had it, in seconds."""
    about = json.loads(client.get("kvemb:projection") or b"{}")["tables"]["bench"]
    mix = (_PROBE ^ _PROBE >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mix = (mix ^ mix >> 27) * 0x94D049BB133111EB % 2**64
    key, field = about["keys"][(mix ^ mix >> 31) * len(about["keys"]) >> 64], _PROBE.to_bytes(8, "little")
    before = client.hget(key, field)
    table.push(np.array([_PROBE]), np.random.default_rng().standard_normal((1, 16), np.float32)).wait_applied(TIMEOUT_S)
    applied_s, deadline = time.perf_counter(), Deadline.after(_PATIENCE_S)
    while client.hget(key, field) == before:
        if deadline.expired:
            raise RuntimeError(f"what was applied was not in the target after {_PATIENCE_S:g} s")
        time.sleep(0.001)
    return time.perf_counter() - applied_s
