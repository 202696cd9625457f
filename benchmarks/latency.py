"""The question `latency`: how long does a small pull take beside redis-py's MGET of as many bytes, from the same server?"""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median

import numpy as np
import redis

from benchmarks.ids import sampler
from benchmarks.measure import Spread
from benchmarks.options import whole
from benchmarks.report import Line, Report, Section
from benchmarks.servers import filled, ids_of

SIZES = (1, 26, 500)
TARGETS = {1: 1.4, 26: 1.4, 500: 1.1}
_N_BATCHES = 50
_SET_AT_ONCE = 10_000
_SEED = 5


def latency(options: argparse.Namespace) -> Report:
    """How long does a pull of few rows take, beside redis-py's MGET of as many values of the same size, on the same server?

    One thread asks for batches of --sizes distinct ids, ours by `Table.pull` and then redis-py (with hiredis) by `mget` of keys made
    beforehand, in turn, call by call: whatever else the machine does happens to both. The records are header and W of an SGD table.
    For redis-py the server holds as many values as the table has rows, written in the order of the rows. (Written batch by batch, they
    would lie side by side in its memory as they are asked for.)
    Ours checks ids, makes requests, compares the marker and every record's header, and returns one array; redis-py returns a list of
    bytes. Read: µs is the median (p50) of the calls of a round, and p10 their tenth percentile, which says what a quiet machine would
    take; ratios are ours / redis-py's within a round. Values are medians of the rounds with (smallest..largest).
    """
    with filled("redis", nodes=1, dim=options.dim, n_rows=options.rows) as target:
        value = bytes(target.table.definition.record.size_bytes)
        draw = sampler("uniform", target.n_rows, _SEED)
        lines = []
        with redis.Redis(port=target.cluster.servers[0].port) as peer:
            for start in range(0, target.n_rows, _SET_AT_ONCE):
                peer.mset(dict.fromkeys(_keys(range(start, min(start + _SET_AT_ONCE, target.n_rows))), value))
            for size in options.sizes:
                positions = [draw(size) for _ in range(_N_BATCHES)]
                ids = [ids_of(target.table.definition, some) for some in positions]
                keys = [_keys(some.tolist()) for some in positions]
                calls = [(partial(target.table.pull, some), partial(peer.mget, those)) for some, those in zip(ids, keys, strict=True)]
                lines += _lines(size, [_round(calls, options.calls) for _ in range(options.repeats + 1)][1:])
    settings = {"store": "redis", "dim": options.dim, "record_bytes": len(value), "rows": options.rows, "calls": options.calls}
    return Report("latency", [Section(settings, lines=lines)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `latency` can be asked."""
    parser.add_argument("--sizes", nargs="+", type=whole(1), default=list(SIZES), metavar="N", help="ids of a pull (1 26 500)")
    parser.add_argument("--dim", type=whole(1), default=16, metavar="N", help="weights per row (16)")
    parser.add_argument("--rows", type=whole(1), default=100_000, metavar="N", help="rows in the table (100000)")
    parser.add_argument("--calls", type=whole(1), default=1000, metavar="N", help="of each in a round (1000)")
    parser.add_argument("--repeats", type=whole(1), default=4, metavar="N", help="rounds, after one to warm up (4)")


def _keys(positions: Iterable[int]) -> list[bytes]:
    return [b"raw:%010d" % at for at in positions]


def _round(calls: Sequence[tuple[Callable[[], object], Callable[[], object]]], n: int) -> tuple[list[float], list[float]]:
    """Let both take turns, call by call; return how long each call took, in µs."""
    ours, theirs = [], []
    for i in range(n):
        mine, other = calls[i % len(calls)]
        begin_s = time.perf_counter()
        mine()
        between_s = time.perf_counter()
        other()
        ours.append(1e6 * (between_s - begin_s))
        theirs.append(1e6 * (time.perf_counter() - between_s))
    return ours, theirs


def _lines(size: int, rounds: list[tuple[list[float], list[float]]]) -> list[Line]:
    ratios = Spread.of([median(mine) / median(other) for mine, other in rounds])
    quiet = Spread.of([float(np.quantile(mine, 0.1) / np.quantile(other, 0.1)) for mine, other in rounds])
    names = (f"Table.pull, {size} ids", f"redis-py mget, {size} keys")
    figures = [
        {"µs": Spread.of([median(one) for one in each]), "p10 µs": Spread.of([float(np.quantile(one, 0.1)) for one in each])}
        for each in zip(*rounds, strict=True)
    ]
    target = f"<= {TARGETS[size]}" if size in TARGETS else "–"
    return [
        Line(names[0], figures[0] | {"/ mget": ratios, "/ mget, p10": quiet, "target": target}),
        Line(names[1], figures[1] | {"/ mget": "–", "/ mget, p10": "–", "target": "–"}),
    ]
