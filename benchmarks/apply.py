"""The question `apply`: how many rows per second does one shard sustain, push in, optimizer, record written? Its load is in apply_load."""

import argparse
import math
from collections.abc import Callable, Sequence
from itertools import product

import kvemb
from benchmarks import peers
from benchmarks.apply_load import Load, Pass, cache_mb_for, check_sums, check_written, make_load, our_pass
from benchmarks.measure import Contender, Spread, cpu_s
from benchmarks.options import whole
from benchmarks.report import Line, Report, Section
from benchmarks.set_peer import redis_benchmark_set
from kvemb.config import DURABILITIES
from kvemb.local_cluster import LocalCluster
from kvemb.optim import OptimizerSpec
from kvemb.schema.table_def import TableDef

OPTIMIZERS: dict[str, Callable[[], OptimizerSpec]] = {
    "sgd": lambda: kvemb.optim.sgd(lr=0.01),
    "rowwise_adagrad": lambda: kvemb.optim.rowwise_adagrad(lr=0.01),
    "adam": lambda: kvemb.optim.adam(lr=0.01),
}
STORES = ("redis", "valkey", "memcached")
LEAST_RATIO, MOST_PS_US, MOST_PS_US_DIM = 0.8, 1.0, 16
_OVERHEAD_BYTES = 160
_PEER_TURN_S = 0.5


def apply(options: argparse.Namespace) -> Report:
    """How many rows per second does one shard sustain: push in, optimizer, record written?

    A client pushes batches of distinct ids, prepared beforehand, until every row of the table has been pushed once, and waits for the
    flush: that is a pass. The shard merges what is pending, so it writes in batches of its own. Measured with every row in the shard's
    cache (nothing is read from storage) and with no cache (every row is read before it is written), beside Redis' own benchmark program
    (in C) on the same server with values of the record's size: pipelined SET, GET, and GET + SET, whose rate is 1 / (1/GET + 1/SET).
    They take turns in every round. Read: ratio is ours divided by this line's rows/s, within a round; PS, server and client µs/row are
    CPU time of the shard, the storage server and the pushing client (or of that program); hits is the share of rows that the cache had;
    targets stand beside what they are about. Values are medians with (smallest..largest). Three processes of ours share this machine's
    cores, two of the peer's do. --layout paged is a dense table, whose rows lie in pages (peers have a key per row); --durability
    is of the shard's journal. Before: pushes of whole gradients to a plain SGD table must come out as the exact sums. After: every
    pushed id has a row, and no other.
    """
    sections = []
    versions: dict[str, str] = {}
    for store in options.store:
        for dim in options.dim:
            for optimizer in options.optimizer:
                for layout, cache in product(options.layout, options.cache):
                    sections.append(_measure(store, layout, dim, optimizer, cache == "all", options, versions))
    return Report("apply", sections, versions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `apply` can be asked."""
    parser.add_argument("--store", nargs="+", choices=STORES, default=["redis"], help="storage kinds, in turn (redis)")
    parser.add_argument("--dim", nargs="+", type=whole(1), default=[16], metavar="N", help="weights per row (16)")
    names = sorted(OPTIMIZERS)
    parser.add_argument("--optimizer", nargs="+", choices=names, default=["rowwise_adagrad", "adam"], help="(rowwise_adagrad adam)")
    parser.add_argument("--cache", nargs="+", choices=["all", "none"], default=["all", "none"], help="rows that the shard keeps (both)")
    parser.add_argument(
        "--layout", nargs="+", choices=["buckets", "paged"], default=["buckets"], help="of the table; paged: num_ids (buckets)"
    )
    parser.add_argument("--durability", choices=DURABILITIES, default="os", help="of the shard's journal (os)")
    parser.add_argument("--rows", type=whole(1), default=400_000, metavar="N", help="rows in the table (400000)")
    parser.add_argument("--batch", type=whole(1), default=40_000, metavar="N", help="rows of a push (40000)")
    parser.add_argument("--repeats", type=whole(1), default=5, metavar="N", help="rounds, after one to warm up (5)")


def lines_of(ours: Sequence[Pass], others: Sequence[tuple[str, Sequence[Pass]]], *, cached: bool, dim: int) -> list[Line]:
    """Lay the rounds out, ours first.

    Args:
        ours: of each round.
        others: SET and GET, each with its rounds; or nothing.
        cached: whether no row was read.
        dim: decides whether the target for PS CPU applies.
    """
    rates = [one.rows_per_s for one in ours]
    figures = _figures(ours) | {
        "PS µs/row": Spread.of([one.ps_cpu_s * 1e6 / one.n_rows for one in ours]),
        "hits": sum(one.n_hits for one in ours) / max(1, sum(one.n_lookups for one in ours)),
        "rows/batch": f"{sum(one.n_rows for one in ours) / sum(one.n_batches for one in ours):,.0f}",
        "target": f"PS <= {MOST_PS_US:.1f} µs/row" if dim == MOST_PS_US_DIM else "–",
    }
    lines = [Line("push + flush", figures)]
    target = f"ratio >= {LEAST_RATIO}"
    for name, rounds in others:
        aim = target if cached and "SET" in name else "–"
        ratio = Spread.of([mine / one.rows_per_s for mine, one in zip(rates, rounds, strict=True)])
        lines.append(Line(name, _figures(rounds) | {"ratio": ratio, "target": aim}))
    if len(others) == 2:
        both = [1 / (1 / a.rows_per_s + 1 / b.rows_per_s) for a, b in zip(others[0][1], others[1][1], strict=True)]
        ratio = Spread.of([mine / one for mine, one in zip(rates, both, strict=True)])
        rate = Spread.of([one / 1e6 for one in both])
        lines.append(Line("GET + SET, from the two", {"M rows/s": rate, "ratio": ratio, "target": "–" if cached else target}))
    return lines


def _measure(
    store: str, layout: str, dim: int, optimizer: str, cached: bool, options: argparse.Namespace, versions: dict[str, str]
) -> Section:
    num_ids = options.rows if layout == "paged" else None
    definition = TableDef("bench", dim, OPTIMIZERS[optimizer](), kvemb.init.uniform(), id_dtype="uint64", num_ids=num_ids)
    record_bytes, n_rows = definition.record.size_bytes, options.rows
    memory_mb = max(1024, math.ceil(3 * n_rows * (record_bytes + _OVERHEAD_BYTES) / (1 << 20)))
    cache_mb = cache_mb_for(n_rows, record_bytes) if cached else 0
    with (
        LocalCluster(store, memory_mb=memory_mb, cache_mb=cache_mb, durability=options.durability) as cluster,
        kvemb.connect(cluster.url) as opened,
    ):
        versions[f"{store} server"] = opened.status().nodes[0].server
        check_sums(opened)
        table = opened.create_table("bench", dim=dim, optimizer=definition.optimizer, id_dtype="uint64", num_ids=num_ids)
        load = make_load(table, n_rows, options.batch)
        others, notes = _peers(store, cluster, record_bytes, n_rows)
        ours, theirs = _rounds(load, cluster, others, options.repeats)
        check_written(load)
    settings = {
        "store": store,
        "layout": layout,
        "dim": dim,
        "optimizer": optimizer,
        "record_bytes": record_bytes,
        "cached": "every row" if cached else "none",
        "durability": options.durability,
        "rows": n_rows,
        "batch": options.batch,
        "repeats": options.repeats,
    }
    return Section(settings, notes=notes, lines=lines_of(ours, theirs, cached=cached, dim=dim))


def _peers(store: str, cluster: LocalCluster, record_bytes: int, n_rows: int) -> tuple[list[Contender], list[str]]:
    if store == "memcached":
        return [], ["redis-benchmark skipped: it does not speak memcached's protocol, and Debian ships no such program in C for it."]
    port = cluster.servers[0].port
    try:
        get = peers.redis_benchmark(port, value_bytes=record_bytes, n_keys=n_rows, missing=0.0)
    except peers.PeerAbsentError as absent:
        return [], [f"Peer skipped: {absent}"]
    return [redis_benchmark_set(port, value_bytes=record_bytes, n_keys=n_rows, n_requests=n_rows), get], []


def _rounds(
    load: Load, cluster: LocalCluster, others: Sequence[Contender], repeats: int
) -> tuple[list[Pass], list[tuple[str, list[Pass]]]]:
    """Let everybody take turns; the first round creates rows, fills the cache, and does not count."""
    server, shard = [cluster.servers[0].process.pid], [cluster.shards[0].pid]
    ours, theirs = [], [(other.name, list[Pass]()) for other in others]
    for _ in range(repeats + 1):
        ours.append(our_pass(load, server, shard))
        for other, (_, rounds) in zip(others, theirs, strict=True):
            before_s = cpu_s(server)
            turn = other.take_turn(_PEER_TURN_S)
            rounds.append(Pass(turn.n_rows, turn.wall_s, cpu_s(server) - before_s, turn.client_cpu_s))
    return ours[1:], [(name, rounds[1:]) for name, rounds in theirs]


def _figures(rounds: Sequence[Pass]) -> dict[str, Spread | float | str]:
    return {
        "M rows/s": Spread.of([one.rows_per_s / 1e6 for one in rounds]),
        "PS µs/row": "–",
        "server µs/row": Spread.of([one.server_cpu_s * 1e6 / one.n_rows for one in rounds]),
        "client µs/row": Spread.of([one.client_cpu_s * 1e6 / one.n_rows for one in rounds]),
        "ratio": "–",
    }
