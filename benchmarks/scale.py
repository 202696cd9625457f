"""The question `scale`: does a row cost more as nodes and trainers are added? The trainer processes are in scale_trainer."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.measure import Spread, Turn, cpu_s
from benchmarks.options import whole
from benchmarks.report import Line, Report, Section
from benchmarks.scale_simulate import simulate
from benchmarks.scale_trainer import Trainer
from benchmarks.servers import Filled, filled

STORES = ("redis", "valkey", "memcached")
FLAT_WITHIN = 0.15


@dataclass(frozen=True)
class Setting:
    """Some trainers that pull from some nodes at the same time."""

    name: str
    target: Filled
    trainers: Sequence[Trainer]


@dataclass(frozen=True)
class Costs:
    """One round of one setting: rows of all trainers per second; CPU of all nodes, and of all trainers, per row, in µs."""

    rows_per_s: float
    server_us: float
    client_us: float


def scale(options: argparse.Namespace) -> Report:
    """Does a row cost storage or trainer more CPU as nodes go 1, 2, 4, 8 and trainers 1, 2, 4?

    Every number of nodes has a cluster of its own, with the same table of SGD records; all of them run at once and take turns in every
    round. Trainers are processes that pull batches of 26 x 4096 uniform ids through the public API at the same time, and compare every
    row with what was written outside the timed part. Read: µs/row is the CPU time of all nodes, or of all trainers, divided by the rows
    that all of them pulled; the ratio beside it is to 1 node and 1 trainer, within a round, and should stay flat (target: within 15 %).
    Rows per second are no answer here: nodes and trainers share this machine's cores, so only what a row costs can scale. More
    processes than cores make a row dearer by themselves, since they take each other's caches. Values are medians with
    (smallest..largest).

    With --simulate another question: does the model by which `kvemb plan` reckons say what real clusters take? Clusters of 1 to 8 nodes
    and 1 to 4 shards, with tables of SGD and Adam, in few buckets, in many and in compact ones, train (by steps of 2,000 and 32,000 rows;
    no shard has a cache), save, load, start a killed shard, bring back an empty node and let one join. Read: measured / model of the CPU
    time per row of each kind of process, of the bytes that nodes receive and send, and of nodes' memory per row; the target is within
    20 %. rows/s of 2 cores: what they would give if the CPU time of all processes filled them; seen is by the clock, with what else the
    machine does. Then what is not within, and the costs that these runs alone would give the model. --rows, --seconds and --repeats hold
    there too; --store, --dim, --nodes and --trainers do not.
    """
    if options.simulate:
        return simulate(options)
    versions: dict[str, str] = {}
    return Report("scale", [_measure(store, options, versions) for store in options.store], versions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `scale` can be asked."""
    parser.add_argument("--simulate", action="store_true", help="compare the model of `kvemb plan` with real clusters; takes minutes")
    parser.add_argument("--store", nargs="+", choices=STORES, default=["redis"], help="storage kinds, in turn (redis)")
    parser.add_argument("--dim", type=whole(1), default=16, metavar="N", help="weights per row (16)")
    parser.add_argument("--nodes", nargs="+", type=whole(2), default=[2, 4, 8], metavar="N", help="numbers of nodes beside 1 (2 4 8)")
    parser.add_argument("--trainers", nargs="+", type=whole(2), default=[2, 4], metavar="N", help="numbers of trainers beside 1 (2 4)")
    parser.add_argument("--rows", type=whole(1), default=300_000, metavar="N", help="rows in each table (300000)")
    parser.add_argument("--seconds", type=float, default=0.7, metavar="S", help="length of one turn (0.7)")
    parser.add_argument("--repeats", type=whole(1), default=5, metavar="N", help="rounds, after one to warm up (5)")


def lines_of(names: Sequence[str], rounds: Sequence[Sequence[Costs]]) -> list[Line]:
    """Lay the rounds out; the first setting is the one that the others are compared with.

    Args:
        names: of the settings.
        rounds: of each setting, as many.
    """
    target = f"ratios <= {1 + FLAT_WITHIN}"
    lines = []
    for name, these in zip(names, rounds, strict=True):
        pairs = list(zip(these, rounds[0], strict=True))
        lines.append(
            Line(
                name,
                {
                    "M rows/s": Spread.of([one.rows_per_s / 1e6 for one in these]),
                    "server µs/row": Spread.of([one.server_us for one in these]),
                    "server ratio": Spread.of([one.server_us / first.server_us for one, first in pairs]),
                    "client µs/row": Spread.of([one.client_us for one in these]),
                    "client ratio": Spread.of([one.client_us / first.client_us for one, first in pairs]),
                    "target": target if these is not rounds[0] else "–",
                },
            )
        )
    return lines


def costs_of(turns: Sequence[Turn], server_cpu_s: float) -> Costs:
    """Add up what several trainers did at the same time."""
    n_rows = sum(turn.n_rows for turn in turns)
    client_cpu_s = sum(turn.client_cpu_s for turn in turns)
    return Costs(sum(turn.n_rows / turn.wall_s for turn in turns), server_cpu_s * 1e6 / n_rows, client_cpu_s * 1e6 / n_rows)


def _measure(store: str, options: argparse.Namespace, versions: dict[str, str]) -> Section:
    with ExitStack() as stack:
        settings = _settings(stack, store, options)
        versions[f"{store} server"] = settings[0].target.stats()[0].server
        rounds = [[_take_turn(setting, options.seconds) for setting in settings] for _ in range(options.repeats + 1)]
        record_bytes = settings[0].target.table.definition.record.size_bytes
    by_setting = [list(these) for these in zip(*rounds[1:], strict=True)]
    said = {"store": store, "dim": options.dim, "record_bytes": record_bytes, "rows": options.rows}
    said |= {"seconds": options.seconds, "repeats": options.repeats}
    return Section(said, lines=lines_of([setting.name for setting in settings], by_setting))


def _settings(stack: ExitStack, store: str, options: argparse.Namespace) -> list[Setting]:
    """Start everything; 1 node and 1 trainer come first."""
    one = stack.enter_context(filled(store, nodes=1, dim=options.dim, n_rows=options.rows))
    trainers = _trainers(stack, one, max([1, *options.trainers]))
    settings = [Setting("1 node, 1 trainer", one, trainers[:1])]
    for n in options.nodes:
        target = stack.enter_context(filled(store, nodes=n, dim=options.dim, n_rows=options.rows))
        settings.append(Setting(f"{n} nodes, 1 trainer", target, _trainers(stack, target, 1)))
    settings += [Setting(f"1 node, {n} trainers", one, trainers[:n]) for n in options.trainers]
    return settings


def _trainers(stack: ExitStack, target: Filled, n: int) -> list[Trainer]:
    trainers = [stack.enter_context(Trainer(target.cluster.url, target.n_rows)) for _ in range(n)]
    for trainer in trainers:
        trainer.wait_ready()
    return trainers


def _take_turn(setting: Setting, seconds: float) -> Costs:
    before_s = cpu_s(setting.target.pids)
    for trainer in setting.trainers:
        trainer.start(seconds)
    turns = [trainer.finish() for trainer in setting.trainers]
    return costs_of(turns, cpu_s(setting.target.pids) - before_s)
