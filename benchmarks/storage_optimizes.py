"""The question `storage_optimizes`: what would it cost if storage itself applied gradients, by a script, instead of a tier of shards?"""

import argparse
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import redis
from numpy.typing import NDArray

import kvemb
from benchmarks.ids import row_ids, sampler
from benchmarks.measure import Spread
from benchmarks.options import positive, whole
from benchmarks.report import Line, Report, Section
from benchmarks.train_loop import GRADIENT, TIMEOUT_S, CommandCounter, Ours, Stretch, WrongTrainingError, stretch
from kvemb.api.table import Table
from kvemb.arrays.ids import unique_ascending
from kvemb.local_cluster import LocalCluster

OPTIMIZERS = ("sgd", "adagrad")
_N_BATCHES = 48
_SEED = 11
_LEARNING_RATE = 0.05
_EPS = 1e-10
_CHECKED = 4
_ROWS_PER_CALL = 4096  # a script blocks the server: some 10 ms each

SCRIPT = """
local keys, fields, grads, key_bytes, dim, state, lr, eps = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6] ~= '0',
    tonumber(ARGV[7]), tonumber(ARGV[8])
local row, grad = '<' .. string.rep('f', state and 2 * dim or dim), '<' .. string.rep('f', dim)
local n, first, done = #fields / 8, 1, 0
while first <= n do
    local key, last = string.sub(keys, (first - 1) * key_bytes + 1, first * key_bytes), first
    while last < n and last - first < 127 and string.sub(keys, last * key_bytes + 1, (last + 1) * key_bytes) == key do last = last + 1 end
    local names, out = {}, {}
    for i = first, last do names[i - first + 1] = string.sub(fields, (i - 1) * 8 + 1, i * 8) end
    local records = redis.call('HMGET', key, unpack(names))
    for j, record in ipairs(records) do
        local w, g = {struct.unpack(row, record, 13)}, {struct.unpack(grad, grads, (first + j - 2) * dim * 4 + 1)}
        w[#w] = nil
        for c = 1, dim do
            if state then
                w[dim + c] = w[dim + c] + g[c] * g[c]
                w[c] = w[c] - lr * g[c] / (math.sqrt(w[dim + c]) + eps)
            else
                w[c] = w[c] - lr * g[c]
            end
        end
        out[2 * j - 1], out[2 * j] = names[j], string.sub(record, 1, 12) .. struct.pack(row, unpack(w))
        done = done + 1
    end
    redis.call('HSET', key, unpack(out))
    first = last + 1
end
return done
"""
"""Applies SGD, or Adagrad, to rows of buckets, run by run of neighbouring rows of one bucket. It moves no version and keeps no journal."""


@dataclass(frozen=True)
class Traffic:
    """A stretch, and the bytes that went over the loopback interface in it: of all processes of the run, each byte once."""

    stretch: Stretch
    n_bytes: int


class StorageOptimizes(Ours):
    """The other design's trainer: rows are read as ours are, gradients go to the storage server, whose script changes the rows in place.

    Args:
        table: all its rows exist; no shard writes to it meanwhile.
        batches: ids, uint64 [m] each, duplicates included.
        client: of the one storage server.
        lr: of the optimizer.
    """

    def __init__(self, table: Table, batches: Sequence[NDArray[np.uint64]], client: "redis.Redis", lr: float) -> None:
        super().__init__(table, batches)
        self._client, self._lr = client, lr
        self._sha = client.script_load(SCRIPT)
        self._sender = ThreadPoolExecutor(1, "script-sender")

    def step(self, index: int) -> tuple[int, Any]:
        """Pull one batch and have its gradients applied, behind the caller as a push is."""
        ids = unique_ascending(self.batches[index]).ids
        rows = self.table.pull(ids, timeout_s=TIMEOUT_S)
        self.loss = float(rows.sum()) * GRADIENT
        self.used.add(index)
        return len(ids), self._sender.submit(self._apply, ids, np.full_like(rows, GRADIENT))

    def wait_applied(self, ack: Any) -> None:
        """Wait until the script has run for all rows of a step."""
        future: Future[None] = ack
        future.result(TIMEOUT_S)

    def close(self) -> None:
        """End the sending thread."""
        self._sender.shutdown()

    def _apply(self, ids: NDArray[np.uint64], gradients: NDArray[np.float32]) -> None:
        keys = self.table.definition.keys(ids, pages=True)
        order = keys.locality()
        if order is not None:  # neighbours share a bucket, as in our own requests
            at = np.argsort(order, kind="stable")
            keys, gradients = keys[at], gradients[at]
        names, fields = keys.encode(), np.ascontiguousarray(keys.ids.astype("<u8", copy=False))
        dim, state = gradients.shape[1], int(self.table.definition.optimizer.kind != "sgd")
        calls = self._client.pipeline(transaction=False)
        for first in range(0, len(ids), _ROWS_PER_CALL):
            some = slice(first, first + _ROWS_PER_CALL)
            blobs = names[some].tobytes(), fields[some].tobytes(), gradients[some].tobytes()
            calls.evalsha(self._sha, 0, *blobs, names.shape[1], dim, state, repr(self._lr), repr(_EPS))
        if sum(calls.execute()) != len(ids):
            raise WrongTrainingError("the script did not change all rows")


def storage_optimizes(options: argparse.Namespace) -> Report:
    """What would it cost if storage itself applied gradients, by a script, instead of a tier of shards?

    One trainer trains Zipf(1.05) batches of 26 x 4096 ids (about 32,000 distinct rows), all rows exist. A step: dedupe, pull, a gradient
    that costs nothing, and then either push (ours: one shard journals, merges, optimizes and writes), or send the gradients to the
    storage server, whose Lua script reads, optimizes and writes the rows (EVALSHA, 4096 rows a call, HMGET and HSET of up to 128 rows
    of a bucket; the same rows in the same buckets, read by the same code). At most two pushes, or calls of the script, are under way.
    Ours runs with a cache that holds every row, and with none (cache_mb 0), without fsync: a script has no journal. Read: / script is
    rows/s divided by the script's, within a round; wire bytes/row is what went over the loopback interface, TCP's headers included,
    between all processes, pulls and gradients and writes together; run it with nothing else on the machine. µs/row is CPU time. Before:
    the first steps of each must give the same rows, as NumPy does.
    What the script gives up: a push is applied once or twice after a lost reply; nothing is merged over trainers; there is no version,
    so no staleness, no repair, no increments; float32 state only; and each optimizer has to be written in Lua. Redis and Valkey alone.
    """
    sections = [_measure(store, kind, options) for store in options.store for kind in options.optimizer]
    return Report("storage_optimizes", sections, {})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `storage_optimizes` can be asked."""
    parser.add_argument("--store", nargs="+", choices=("redis", "valkey"), default=["redis"], help="storage kinds, in turn (redis)")
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), help="in turn (sgd adagrad)")
    parser.add_argument("--dim", type=whole(1), default=16, metavar="N", help="weights per row (16)")
    parser.add_argument("--rows", type=whole(1), default=300_000, metavar="N", help="rows in the table (300000)")
    parser.add_argument("--seconds", type=positive, default=3.0, metavar="S", help="length of one turn (3)")
    parser.add_argument("--repeats", type=whole(1), default=3, metavar="N", help="rounds, after one to warm up (3)")


def _measure(store: str, kind: str, options: argparse.Namespace) -> Section:
    draw = sampler("zipf", options.rows, _SEED)
    batches = [row_ids(draw(26 * 4096)) for _ in range(_N_BATCHES)]
    with ExitStack() as stack:
        runs = {
            "ours, every row cached": _ours(stack, store, kind, batches, options, None),
            "ours, no row cached": _ours(stack, store, kind, batches, options, 0),
        }
        name = "a script in storage"
        runs[name] = _script(stack, store, kind, batches, options)
        for trainer, _, _ in runs.values():
            _check(trainer, kind)
        rounds: dict[str, list[Traffic]] = {name: [] for name in runs}
        for _ in range(options.repeats + 1):
            for name, (trainer, cluster, counter) in runs.items():
                rounds[name].append(_turn(trainer, cluster, counter, options.seconds))
    settings = {"store": store, "dim": options.dim, "optimizer": kind, "rows": options.rows, "shards": 1, "repeats": options.repeats}
    return Section(settings, lines=lines_of({name: some[1:] for name, some in rounds.items()}))


def lines_of(rounds: Mapping[str, Sequence[Traffic]]) -> list[Line]:
    """Lay the rounds out, by contender; the last one is what the others are compared with."""
    *_, script = rounds.values()
    lines = []
    for name, some in rounds.items():
        figures: dict[str, Spread | float | str] = {
            "k rows/s": Spread.of([one.stretch.rows_per_s / 1e3 for one in some]),
            "/ script": Spread.of([one.stretch.rows_per_s / its.stretch.rows_per_s for one, its in zip(some, script, strict=True)]),
            "wire bytes/row": Spread.of([one.stretch.per_row(one.n_bytes) for one in some]),
            "server µs/row": Spread.of([one.stretch.per_row(one.stretch.server_cpu_s * 1e6) for one in some]),
            "PS µs/row": Spread.of([one.stretch.per_row(one.stretch.ps_cpu_s * 1e6) for one in some]),
            "trainer µs/row": Spread.of([one.stretch.per_row(one.stretch.turn.client_cpu_s * 1e6) for one in some]),
        }
        lines.append(Line(name, figures))
    return lines


Run = tuple[Ours, LocalCluster, CommandCounter]


def _table(
    stack: ExitStack, store: str, kind: str, batches: Sequence[NDArray[np.uint64]], options: argparse.Namespace, cache_mb: int | None
) -> tuple[Table, LocalCluster, CommandCounter]:
    memory_mb = max(1024, math.ceil(4 * options.rows * (12 + 8 * options.dim + 160) / (1 << 20)))
    cluster = stack.enter_context(LocalCluster(store, shards=1, memory_mb=memory_mb, durability="os", cache_mb=cache_mb))
    opened = stack.enter_context(kvemb.connect(cluster.url))
    spec = kvemb.optim.sgd(_LEARNING_RATE) if kind == "sgd" else kvemb.optim.adagrad(_LEARNING_RATE, eps=_EPS)
    table = opened.create_table(
        "bench", dim=options.dim, optimizer=spec, initializer=kvemb.init.zeros(), id_dtype="uint64", expected_rows=options.rows
    )
    ids = np.unique(np.concatenate(batches))
    table.assign(ids, np.zeros((len(ids), options.dim), np.float32), timeout_s=TIMEOUT_S)
    table.flush(TIMEOUT_S)
    return table, cluster, stack.enter_context(CommandCounter.on(cluster.servers[0].port))


def _ours(
    stack: ExitStack, store: str, kind: str, batches: Sequence[NDArray[np.uint64]], options: argparse.Namespace, cache_mb: int | None
) -> Run:
    table, cluster, counter = _table(stack, store, kind, batches, options, cache_mb)
    return Ours(table, batches), cluster, counter


def _script(stack: ExitStack, store: str, kind: str, batches: Sequence[NDArray[np.uint64]], options: argparse.Namespace) -> Run:
    table, cluster, counter = _table(stack, store, kind, batches, options, None)
    client = stack.enter_context(redis.Redis(port=cluster.servers[0].port))
    trainer = StorageOptimizes(table, batches, client, _LEARNING_RATE)
    stack.callback(trainer.close)
    return trainer, cluster, counter


def _check(trainer: Ours, kind: str) -> None:
    """Train the first batches one by one, and compare every row with the optimizer in NumPy.

    Raises:
        WrongTrainingError: a row is not what the steps make of it.
    """
    ids = np.unique(np.concatenate(trainer.batches[:_CHECKED]))
    weights, squares = np.zeros(len(ids)), np.zeros(len(ids))
    for index in range(_CHECKED):
        trainer.wait_applied(trainer.step(index)[1])
        at = np.searchsorted(ids, np.unique(trainer.batches[index]))
        squares[at] += GRADIENT**2
        weights[at] -= _LEARNING_RATE * GRADIENT / (1.0 if kind == "sgd" else np.sqrt(squares[at]) + _EPS)
    trainer.table.flush(TIMEOUT_S)
    off = np.abs(trainer.table.pull(ids, timeout_s=TIMEOUT_S) - weights[:, None]).max()
    if not off < 1e-6:
        raise WrongTrainingError(f"{type(trainer).__name__}: after {_CHECKED} steps of {kind} a weight is off by {off:.2e}")


def _turn(trainer: Ours, cluster: LocalCluster, counter: CommandCounter, seconds: float) -> Traffic:
    server, shards = [cluster.servers[0].process.pid], [shard.pid for shard in cluster.shards]
    before = _loopback_bytes()
    one = stretch(lambda: trainer.run(seconds, max_unapplied=2), server, shards, counter)
    return Traffic(one, _loopback_bytes() - before)


def _loopback_bytes() -> int:
    """Bytes received on the loopback interface since the machine started; https://docs.kernel.org/networking/statistics.html."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])
