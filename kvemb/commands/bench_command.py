"""The verb `kvemb bench`: pulls rows of a running cluster, and prints the speed beside the one measured elsewhere."""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvemb.api import Cluster, connect
from kvemb.commands.terminal_output import text_table
from kvemb.errors import InvalidInputError
from kvemb.operate import capacity as costs
from kvemb.operate.pull_rates import Ids, PullRate, by_node, measure
from kvemb.sample.row_sample import sample_ids
from kvemb.schema.table_def import TableDef

_PARTS = 3  # of the time: all nodes, ids that do not exist, node by node
_SLOW = 0.5  # of the nodes' median
_CONDITIONS = """\
There node and trainer shared 2 cores,
nothing else ran, the table had a million rows, and a pull 106,496 ids. More ids a pull (--batch) come closer; a network,
and what the cluster does beside, cost time."""


def bench_command(args: argparse.Namespace) -> int:
    """Measure, and print."""
    with connect(args.config) as cluster:
        name = args.table or _largest(cluster)
        table = cluster.table(name).definition
        ids = sample_ids(cluster.connection, name)
        if not len(ids):
            raise InvalidInputError(f"table {name!r} has no rows, so there is nothing to read; name another one with --table")
        rates = dict(_measure(cluster, table, ids, args))
    layout = "keys" if not cluster.store.capabilities.pages else "pages" if table.pages is not None else table.layout
    elsewhere = costs.pull_rows_s(cluster.config.storage.kind, layout, table.record.size_bytes)
    if args.json:
        shown = {where: {**dataclasses.asdict(rate), "rows_per_s": rate.rows_per_s} for where, rate in rates.items()}
        print(
            json.dumps({"table": name, "layout": layout, "batch": args.batch, "sampled": len(ids), "measured_elsewhere": elsewhere} | shown)
        )
    else:
        print(_text(name, table, layout, len(ids), args, rates, elsewhere))
    return 0


def _largest(cluster: Cluster) -> str:
    sizes = {name: len(cluster.table(name)) for name in cluster.tables()}
    if not sizes:
        raise InvalidInputError("this cluster has no tables, so there is nothing to read")
    return max(sizes, key=lambda name: sizes[name])


def _measure(cluster: Cluster, table: TableDef, ids: Ids, args: argparse.Namespace) -> Iterator[tuple[str, PullRate]]:
    rng, store, timeout_s = np.random.default_rng(), cluster.store, cluster.config.storage.timeout_s
    each_s = args.seconds / _PARTS
    rng.shuffle(ids)
    yield "all nodes", measure(store, table, _in_turn(ids, args.batch), each_s, timeout_s)
    other = "ids without rows" if table.num_ids is None else "ids at random"
    yield other, measure(store, table, lambda: _drawn(table, rng, args.batch), each_s, timeout_s)
    of_nodes = by_node(store, table, ids)
    for address, its in of_nodes.items():
        yield f"node {address}", measure(store, table, _in_turn(its, args.batch), each_s / len(of_nodes), timeout_s)


def _in_turn(ids: Ids, n: int) -> Callable[[], Ids]:
    """Return a function that gives n of the ids, and the next n at the next call; all of them if there are no more than n."""
    at = 0

    def draw() -> Ids:
        nonlocal at
        some, at = ids[at : at + n], at + n
        if at + n > len(ids):
            at = 0
        return some

    return draw


def _drawn(table: TableDef, rng: np.random.Generator, n: int) -> Ids:
    """Draw ids of the table's whole range: without num_ids almost none of them has a row."""
    return np.unique(rng.integers(0, table.num_ids or 2**63 - 1, n, dtype=np.uint64))


def _text(
    name: str, table: TableDef, layout: str, n_ids: int, args: argparse.Namespace, rates: dict[str, PullRate], elsewhere: float | None
) -> str:
    head = ("WHAT", "PULLS", "ROWS/S", "p50 ms", "p90 ms", "p99 ms", "LONGEST", "MISSING", "OF MEASURED")
    rows = [(where, *_cells(rate), _share(where, rate, elsewhere)) for where, rate in rates.items()]
    known = f"{elsewhere:,.0f} rows/s of one node" if elsewhere is not None else "not measured for this layout"
    return "\n".join(
        [
            f"table {name!r}: {layout}, records of {table.record.size_bytes} bytes, {n_ids:,} ids sampled, up to {args.batch:,} ids a pull",
            text_table([head, *rows]),
            *_slow_nodes(rates),
            f"Measured elsewhere: {known} (benchmarks/RESULTS.md). {_CONDITIONS}",
        ]
    )


def _cells(rate: PullRate) -> tuple[str, ...]:
    times = (rate.p50_ms, rate.p90_ms, rate.p99_ms, rate.longest_ms)
    return (f"{rate.n_pulls:,}", f"{rate.rows_per_s:,.0f}", *(f"{ms:.1f}" for ms in times), f"{rate.n_missing / rate.n_rows:.1%}")


def _share(where: str, rate: PullRate, elsewhere: float | None) -> str:
    return f"{rate.rows_per_s / elsewhere:.2f}" if elsewhere is not None and where.startswith("node ") else "-"


def _slow_nodes(rates: dict[str, PullRate]) -> list[str]:
    nodes: dict[str, Any] = {where: rate.rows_per_s for where, rate in rates.items() if where.startswith("node ")}
    middle = statistics.median_high(nodes.values())
    return [
        f"{where} gives {speed / middle:.2f} of what the node in the middle gives: look at its host (CPU, network, swap), then kvemb doctor"
        for where, speed in nodes.items()
        if speed < _SLOW * middle
    ]
