"""The question `elastic`: what does training notice while nodes and shards come and go? Load: elastic_load; moves: elastic_moves."""

import argparse
from collections.abc import Callable, Sequence

from benchmarks.elastic_losses import check_losses
from benchmarks.elastic_moves import N_SHARDS, Change, ElasticCluster, Move, longest_steps
from benchmarks.measure import Spread
from benchmarks.options import positive, whole
from benchmarks.report import Line, Report, Section, Series

STORES = ("redis", "valkey", "memcached", "redis-cluster")
NODES, SHARDS, LOSSES = PARTS = ("nodes", "shards", "losses")
LONGEST_WAIT_MS, LEAST_THROUGHPUT, MOST_ROWS, LEAST_SPEED = 1000, 0.7, 1.05, 0.5
Figures = dict[str, Spread | float | str]


def elastic(options: argparse.Namespace) -> Report:
    """What does training notice while nodes and shards come and go: longest wait, throughput, rows moved, speed, loss?

    Two nodes, two shards; --trainers threads of this process pull and push batches of --batch distinct ids without a pause, at most 2
    pushes unapplied. In every round, under that load: --seconds as they are; a third node joins; --seconds as they are; it leaves. Then,
    without load, another third node joins and leaves, and a node is restarted empty and repaired. Rounds of shards are the same without
    the repair. Read: wait ms is the longest step of any trainer from the command until the move is done, above the median step before;
    quiet ms the same of the time before, without a move; throughput is steps per second meanwhile / before; rows is what the plan moved /
    a third of all rows; s is from command to done; of a move without load, k rows/s is rows moved per second from command to done, and /
    repair that of a repair's (rows of the node per second of the repair) in the same round. Of shards, index MB is what one told the
    other of the rows that moved, which bounds s, and s / M rows is s for a million of these. Values are medians with
    (smallest..largest); the longest wait that counts is the largest. After all, every row must be the number of pushes that it got. At
    last, a DeepFM of one sync trainer is trained for --steps steps, twice: while a node joins, another leaves, one is exchanged, a shard
    joins and leaves, and with nothing of that; losses must be equal bit for bit.
    """
    sections: list[Section] = []
    versions: dict[str, str] = {}
    for store in options.store:
        if parts := [part for part in options.parts if part == SHARDS or (part == NODES and store != "redis-cluster")]:  # redis-cli's
            sections += _measure(store, options, parts, versions)
        if LOSSES in options.parts:
            n_steps = check_losses(store, options.steps)
            equal = "losses with three changes of nodes and two of shards, and with none, are equal, bit for bit."
            sections.append(Section({"store": store, "part": LOSSES}, notes=[f"DeepFM, sync, {n_steps} steps: {equal}"]))
    return Report("elastic", sections, versions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `elastic` can be asked."""
    parser.add_argument("--store", nargs="+", choices=STORES, default=["redis", "memcached"], help="storage kinds (redis memcached)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what comes and goes; losses (all)")
    parser.add_argument("--dim", type=whole(1), default=16, metavar="N", help="weights per row (16)")
    parser.add_argument("--rows", type=whole(1000), default=400_000, metavar="N", help="rows in the table (400000)")
    parser.add_argument("--batch", type=whole(1), default=4096, metavar="N", help="rows of a step (4096)")
    parser.add_argument("--trainers", type=whole(1), default=2, metavar="N", help="that pull and push (2)")
    parser.add_argument("--seconds", type=positive, default=4.0, metavar="S", help="of load before a move (4)")
    parser.add_argument("--repeats", type=whole(1), default=3, metavar="N", help="rounds (3)")
    parser.add_argument("--steps", type=whole(4), default=400, metavar="N", help="of the DeepFM, at least (400)")


def _measure(store: str, options: argparse.Namespace, parts: Sequence[str], versions: dict[str, str]) -> list[Section]:
    rounds: dict[str, Callable[[ElasticCluster, int], tuple[list[Line], Series]]] = {NODES: _rounds_of_nodes, SHARDS: _rounds_of_shards}
    with ElasticCluster(store, options) as it:
        versions[f"{store} server"] = it.opened.status().nodes[0].server
        settings = {"dim": options.dim, "record_bytes": it.table.definition.record.size_bytes, "rows": options.rows}
        settings |= {"batch": options.batch, "trainers": options.trainers, "shards": N_SHARDS, "repeats": options.repeats}
        sections = []
        for part in parts:
            lines, waits = rounds[part](it, options.repeats)
            sections.append(Section({"store": store, "part": part, **settings}, lines=lines, series=[waits]))
    return sections


def _rounds_of_nodes(it: ElasticCluster, repeats: int) -> tuple[list[Line], Series]:
    joins, leaves, moves, repairs = [], [], [], []
    for _ in range(repeats):
        with it.further_node() as third, it.load() as trainers:
            joins.append(it.under_load(trainers, it.opened.nodes.add(third)))
            leaves.append(it.under_load(trainers, it.opened.nodes.remove(third)))
        with it.further_node() as third:
            moves.append(it.alone(it.opened.nodes.add(third)))
            it.alone(it.opened.nodes.remove(third))
        repairs.append(it.repair())
        it.check()
    ratio = Spread.of([move.rows_per_s / repair for move, repair in zip(moves, repairs, strict=True)])
    speeds: Figures = {"k rows/s": _speed(moves), "/ repair": ratio, "target": f"/ repair >= {LEAST_SPEED}"}
    lines = [
        Line(f"{it.n_nodes} -> {it.n_nodes + 1} nodes", _under_load(joins)),
        Line(f"{it.n_nodes + 1} -> {it.n_nodes} nodes", _under_load(leaves)),
        Line("a node joins, no load", speeds),
        Line("a node is repaired, no load", {"k rows/s": Spread.of([one / 1e3 for one in repairs])}),
    ]
    return lines, longest_steps({"a node joins": joins[-1], "it leaves": leaves[-1]})


def _rounds_of_shards(it: ElasticCluster, repeats: int) -> tuple[list[Line], Series]:
    joins, leaves, alone_joins, alone_leaves = [], [], [], []
    for _ in range(repeats):
        with it.further_shard() as third, it.load() as trainers:
            joins.append(it.under_load(trainers, it.opened.shards.add(third)))
            leaves.append(it.under_load(trainers, it.opened.shards.remove(third)))
        with it.further_shard() as third:
            alone_joins.append(it.alone(it.opened.shards.add(third)))
            alone_leaves.append(it.alone(it.opened.shards.remove(third)))
        it.check()
    lines = [
        Line("2 -> 3 shards", {**_under_load(joins), **_index([one.move for one in joins])}),
        Line("3 -> 2 shards", {**_under_load(leaves), **_index([one.move for one in leaves])}),
        Line("a shard joins, no load", {"k rows/s": _speed(alone_joins), **_index(alone_joins)}),
        Line("a shard leaves, no load", {"k rows/s": _speed(alone_leaves), **_index(alone_leaves)}),
    ]
    return lines, longest_steps({"a shard joins": joins[-1], "it leaves": leaves[-1]})


def _under_load(rounds: Sequence[Change]) -> Figures:
    return {
        "wait ms": Spread.of([one.wait_ms for one in rounds]),
        "quiet ms": Spread.of([one.quiet_ms for one in rounds]),
        "throughput": Spread.of([one.throughput for one in rounds]),
        "rows": Spread.of([one.rows_ratio for one in rounds]),
        "target": f"wait < {LONGEST_WAIT_MS}, throughput >= {LEAST_THROUGHPUT}, rows <= {MOST_ROWS}",
        "s": Spread.of([one.move.seconds for one in rounds]),
    }


def _index(moves: Sequence[Move]) -> Figures:
    seconds = [one.seconds for one in moves]
    per_million = [one.seconds / one.n_rows * 1e6 for one in moves]
    return {"s": Spread.of(seconds), "index MB": Spread.of([one.index_mb for one in moves]), "s / M rows": Spread.of(per_million)}


def _speed(moves: Sequence[Move]) -> Spread:
    return Spread.of([one.rows_per_s / 1e3 for one in moves])
