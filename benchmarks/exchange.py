"""The question `exchange`: what do the ranks of a sync job gain when they exchange rows, instead of each reading and pushing its own?"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Spread, cpu_s
from benchmarks.options import whole
from benchmarks.report import Line, Report, Section
from benchmarks.worker_process import WorkerProcess, running
from kvemb.local_cluster import LocalCluster

ALONE, EXCHANGED = "each rank for itself", "rows exchanged"
_N_BATCHES = 64
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class ExchangedLossError(AssertionError):
    """Ranks that exchange rows did not learn, bit for bit, what they learn without."""


@dataclass(frozen=True)
class RanksTurn:
    """What the ranks did in a turn, per step: rows read and pushed, by all; times, and CPU times, in seconds."""

    n_read: float
    n_pushed: float
    step_s: float
    waited_s: float
    storage_cpu_s: float
    shards_cpu_s: float
    ranks_cpu_s: float


def exchange(options: argparse.Namespace) -> Report:
    """What do the ranks of a sync job gain when they exchange rows, instead of each reading and pushing its own?

    Ranks (processes, gloo on loopback) train bags of Zipf(1.05) ids in --tables tables, with Adam, --lines lines of 8 ids a table on each
    rank; the model costs next to nothing, so that rows are most of the step. Rows are pulled ahead as "exact", in both ways: each rank for
    itself, and exchanged (`prepare(..., exchange=group)`). Both have tables of their own with equal rows, two Redis nodes and two shards in
    common, and take turns of --steps steps on the same batches. Read: rows read and pushed are those of a step, of all ranks together;
    reads / and time / are this line's divided by those without exchange, within a round; waited is the part of a step in which a rank
    waited for rows that were pulled ahead, in ms, the mean of the ranks; CPU is in ms per step, of all storage servers, all shards, all
    ranks. With more ranks than cores the step's time is the sum of all that CPU. Values are medians of the rounds with
    (smallest..largest). In every turn the losses of each rank must be those without exchange, bit for bit.
    """
    return Report("exchange", [_measure(world, options) for world in options.ranks], {})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `exchange` can be asked."""
    parser.add_argument("--ranks", nargs="+", type=whole(2), default=[2, 4, 8], metavar="N", help="ranks, in turn (2 4 8)")
    parser.add_argument("--tables", type=whole(1), default=4, metavar="N", help="tables (4)")
    parser.add_argument("--lines", type=whole(1), default=1024, metavar="N", help="lines of a rank's batch (1024)")
    parser.add_argument("--dim", type=whole(1), default=16, metavar="N", help="weights per row (16)")
    parser.add_argument("--rows", type=whole(1), default=100_000, metavar="N", help="rows of a table (100000)")
    parser.add_argument("--steps", type=whole(1), default=20, metavar="N", help="steps of one turn (20)")
    parser.add_argument("--repeats", type=whole(1), default=5, metavar="N", help="rounds, after one to warm up (5)")


def lines_of(rounds: Mapping[str, Sequence[RanksTurn]]) -> list[Line]:
    """Lay the rounds out, by way; the first is what the others are compared with."""
    alone = rounds[ALONE]
    lines = []
    for way, turns in rounds.items():
        figures: dict[str, Spread | float | str] = {
            "rows read": Spread.of([one.n_read for one in turns]),
            "reads /": Spread.of([one.n_read / its.n_read for one, its in zip(turns, alone, strict=True)]),
            "rows pushed": Spread.of([one.n_pushed for one in turns]),
            "ms/step": Spread.of([1e3 * one.step_s for one in turns]),
            "time /": Spread.of([one.step_s / its.step_s for one, its in zip(turns, alone, strict=True)]),
            "waited": Spread.of([1e3 * one.waited_s for one in turns]),
            "storage CPU": Spread.of([1e3 * one.storage_cpu_s for one in turns]),
            "shards CPU": Spread.of([1e3 * one.shards_cpu_s for one in turns]),
            "ranks CPU": Spread.of([1e3 * one.ranks_cpu_s for one in turns]),
        }
        lines.append(Line(way, figures))
    return lines


def _measure(world: int, options: argparse.Namespace) -> Section:
    began_load = os.getloadavg()[0]
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster("redis", 2, shards=2, mode="sync", trainers=world, durability="os"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvemb-exchange-")))
        command = [sys.executable, "-m", "benchmarks.exchange_rank"]
        ranks = [stack.enter_context(running(f"rank {rank}", command, _ENVIRONMENT)) for rank in range(world)]
        pool = stack.enter_context(ThreadPoolExecutor(world, thread_name_prefix="exchange-rank"))
        job = {"n_tables": options.tables, "n_lines": options.lines, "dim": options.dim, "n_rows": options.rows, "n_batches": _N_BATCHES}
        where = {"url": cluster.url, "world": world, "rendezvous": (folder / "gloo").as_uri(), "options": job}
        list(pool.map(lambda at: ranks[at].ask(rank=at, **where), range(world)))
        for rank in ranks:
            rank.ask(do="enter")
        _all(pool, ranks, do="open")
        rounds: dict[str, list[RanksTurn]] = {ALONE: [], EXCHANGED: []}
        for number in range(options.repeats + 1):
            losses = []
            for way, turns in rounds.items():
                one, learned = _take_turn(pool, ranks, cluster, way, number * options.steps, options.steps)
                losses.append(learned)
                turns.extend([one] if number else [])
            if losses[0] != losses[1]:
                raise ExchangedLossError(f"{world} ranks, round {number}: losses with rows exchanged are not those without")
    settings = {
        "ranks": world,
        **{name: getattr(options, name) for name in ("tables", "lines", "dim", "rows", "steps", "repeats")},
        "load of the machine": f"{began_load:.1f} to {os.getloadavg()[0]:.1f}",
    }
    return Section(settings, lines=lines_of(rounds))


def _take_turn(
    pool: ThreadPoolExecutor, ranks: Sequence[WorkerProcess], cluster: LocalCluster, way: str, first: int, n_steps: int
) -> tuple[RanksTurn, list[Any]]:
    """Let all ranks train; return what it took, and the losses of each rank."""
    servers, shards = [server.process.pid for server in cluster.servers], [shard.pid for shard in cluster.shards]
    storage_s, shards_s = cpu_s(servers), cpu_s(shards)
    did = _all(pool, ranks, do="turn", way=way, first=first, n_steps=n_steps)
    storage_s, shards_s = cpu_s(servers) - storage_s, cpu_s(shards) - shards_s
    n_read, n_pushed, waited_s, ranks_s = (sum(one[name] for one in did) / n_steps for name in ("n_read", "n_pushed", "waited_s", "cpu_s"))
    step_s = max(one["wall_s"] for one in did) / n_steps
    turn = RanksTurn(n_read, n_pushed, step_s, waited_s / len(ranks), storage_s / n_steps, shards_s / n_steps, ranks_s)
    return turn, [one["losses"] for one in did]


def _all(pool: ThreadPoolExecutor, ranks: Sequence[WorkerProcess], **request: object) -> list[dict[str, Any]]:
    """Ask all ranks at once, for what they do together."""
    return list(pool.map(lambda rank: rank.ask(**request), ranks))
