"""The question `pull`: how fast is Table.pull beside other clients on the same server? Its peers are in benchmarks.peers."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import peers
from benchmarks.ids import DISTRIBUTIONS, sampler, with_missing
from benchmarks.measure import Contender, repeated, run_rounds
from benchmarks.options import fraction, positive, whole
from benchmarks.report import Report, Section
from benchmarks.servers import OPTIMIZERS, Filled, filled, ids_of
from benchmarks.tfra.lookups import TFRA_STORES, tfra_lookups
from benchmarks.tls_port import table_over_tls
from kvemb.api.table import Table
from kvemb.arrays.rounding import opaque_bytes
from kvemb.errors import KvembError
from kvemb.schema.buckets import BucketKeys
from kvemb.schema.keys import RowKeys
from kvemb.stores.node_batch import group_by_node
from kvemb.stores.storage_kinds import KINDS

BATCH_IDS = 26 * 4096
STORES = ("redis", "valkey", "memcached")
LAYOUTS = ("buckets", "paged")
PAGED_STORES = ("redis", "valkey", "redis-cluster")
_N_BATCHES = 8
_TIMEOUT_S = 60.0
_SEED = 1


@dataclass(frozen=True)
class Case:
    """The settings of one measurement: a store, how ids are drawn, the form of a record, and how rows are stored."""

    store: str
    ids: str = "uniform"
    optimizer: str = "sgd"
    layout: str = "buckets"
    dim: int = 16
    dtype: str = "float32"


DEFAULT_CASES = (
    *(Case(store) for store in STORES),
    Case("redis", optimizer="adam"),
    Case("redis", ids="zipf"),
    Case("redis", layout="paged"),
    *(Case(store, dim=64) for store in STORES),
    Case("redis", ids="zipf", dim=64),
    *(Case(store, dim=264, dtype="bytes:264") for store in ("redis", "valkey")),
    *(Case(store, layout="paged", dim=264, dtype="bytes:264") for store in ("redis", "valkey")),
)


class WrongRowError(AssertionError):
    """A pull returned other values than those written."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch to pull.

    Args:
        positions: int64 [m] of its rows; those at the table's number of rows and above do not exist.
        ids: uint64 [m].
        expected: [m, dim] of the table's `row_dtype`.
        n_distinct: distinct ids.
    """

    positions: NDArray[np.int64]
    ids: NDArray[np.uint64]
    expected: NDArray[Any]
    n_distinct: int


def pull(options: argparse.Namespace) -> Report:
    """How many rows per second does Table.pull deliver, and what does a row cost server and client, beside other clients?

    Each store's real server is filled with a table. Then, in every round, ours pulls batches of 26 x 4096 ids through the public API,
    and the peers have their turn on the same server: redis-benchmark (C) with pipelined GETs of values of the same size, redis-py with
    hiredis and MGET, or pymemcache with get_many; and TFRA (C++), where `make bench-peers` has set it up, with as many rows of the same
    dim in a hash of its own, looked up with and without dedupe. Without --store, --ids, --optimizer, --layout and --dim the cases are:
    SGD records (header + W) of dim 16 and uniform ids on every store; then on Redis Adam's records, of which a pull keeps the first
    third (TFRA has its moments elsewhere); Zipf(1.05) ids; and a dense table, whose rows lie in pages (layout paged; what reads a row by
    a key of its own is left out then, and redis-benchmark's values are as large as a record); then dim 64 on every store, and with
    Zipf ids on Redis; then rows of 264 opaque bytes (--dtype), beside redis-py's MGET, too, and a memory map of a file on local disk, once
    with its pages in memory and once read from disk. Every row of ours is compared with what
    was written, outside the timed part. Read: rows/s counts the ids asked for, duplicates and misses included; µs/row is CPU time of
    all server processes, and of the client process; commands/row is below 1 where ours asks once for ids that occur several times in
    a batch; the last column is ours divided by this line's rows/s, above 1 where ours is faster. Values are medians of the rounds
    with (smallest..largest); ratios are taken within a round. Ours dedupes ids, builds requests, checks every record and returns an
    array in the order asked for; the peers get ready-made keys and hand out unparsed values, or, in redis-benchmark's case, throw
    them away, and it draws its keys uniformly whatever --ids says. Server and client share this machine's cores, so nothing else
    should be running on it.
    """
    sections = []
    versions: dict[str, str] = {}
    for case in cases_of(options):
        paged = case.layout == "paged"
        with (
            filled(
                case.store,
                nodes=options.nodes,
                dim=case.dim,
                n_rows=options.rows,
                optimizer=case.optimizer,
                paged=paged,
                dtype=case.dtype,
            ) as target,
            ExitStack() as stack,
        ):
            versions[f"{case.store} server"] = server_version(target)
            sections.append(_measure(target, case, options, stack, versions))
    return Report("pull", sections, versions)


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Return the settings to be measured.

    Raises:
        KvembError: pages on storage that has none.
    """
    asked = (options.store, options.ids, options.optimizer, options.layout, options.dim)
    if all(given is None for given in (*asked, options.dtype)):
        return list(DEFAULT_CASES)
    if options.dtype is not None and (options.optimizer or options.dim):
        raise KvembError("--dtype: rows of bytes have no optimizer, and their dim is in the dtype")
    default: tuple[list[Any], ...] = (list(STORES), ["uniform"], ["sgd"], ["buckets"], [16])
    cases = [Case(*one) for one in product(*(given or others for given, others in zip(asked, default, strict=True)))]
    if options.dtype is not None:
        cases = [replace(case, dtype=options.dtype, dim=n_bytes_of(options.dtype)) for case in cases]
    if any(case.layout == "paged" and case.store not in PAGED_STORES for case in cases):
        raise KvembError(f"--layout paged: only {', '.join(PAGED_STORES)} have pages")
    return cases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `pull` can be asked."""
    parser.add_argument("--store", nargs="+", choices=KINDS, help="storage kinds, in turn; without any of these five: see above")
    parser.add_argument("--ids", nargs="+", choices=DISTRIBUTIONS, help="how ids are drawn (uniform); zipf: exponent 1.05")
    parser.add_argument("--optimizer", nargs="+", choices=sorted(OPTIMIZERS), help="decides what a record holds (sgd)")
    parser.add_argument(
        "--layout", nargs="+", choices=LAYOUTS, help="rows in buckets (memcached: a key for every row), or in pages (buckets)"
    )
    parser.add_argument("--dim", nargs="+", type=whole(1), metavar="N", help="weights per row (16)")
    parser.add_argument("--dtype", metavar="bytes:N", help="rows of N opaque bytes instead of weights")
    parser.add_argument("--missing", type=fraction, default=0.0, metavar="F", help="fraction of ids without a row, 0 to 1 (0)")
    parser.add_argument("--rows", type=whole(1), default=1_000_000, metavar="N", help="rows in the table (1000000)")
    parser.add_argument("--tls", action="store_true", help="also the same pulls over TLS 1.3, from the same Redis servers")
    parser.add_argument("--nodes", type=whole(1), default=1, metavar="N", help="storage servers (1; redis-cluster needs 3)")
    parser.add_argument("--seconds", type=positive, default=0.5, metavar="S", help="length of one turn (0.5)")
    parser.add_argument("--repeats", type=whole(1), default=4, metavar="N", help="rounds, after one to warm up (4)")


def make_batches(target: Filled, kind: str, missing: float, n: int = _N_BATCHES, size: int = BATCH_IDS) -> list[Batch]:
    """Draw batches and what pulling them must give."""
    draw = sampler(kind, target.n_rows, _SEED)
    return [_batch(target, with_missing(draw(size), missing, target.n_rows, _SEED + index)) for index in range(n)]


def n_bytes_of(dtype: str) -> int:
    """Return N of "bytes:N", in which N is a multiple of 4, so that rows are compared by words.

    Raises:
        KvembError: it is none.
    """
    n_bytes = opaque_bytes(dtype)
    if n_bytes is None or n_bytes % 4:
        raise KvembError(f"--dtype {dtype}: give bytes:N, N a multiple of 4")
    return n_bytes


def verify(batch: Batch, rows: NDArray[Any]) -> tuple[int, int]:
    """Compare a pull with the written rows, bit for bit; return how many ids were asked for, and how many distinct ones.

    Raises:
        WrongRowError: naming the first id whose row differs.
    """
    if rows.shape != batch.expected.shape or rows.dtype != batch.expected.dtype:
        raise WrongRowError(f"pull returned {rows.dtype} {rows.shape}, expected {batch.expected.dtype} {batch.expected.shape}")
    wrong = (rows.view(np.uint32) != batch.expected.view(np.uint32)).any(axis=1)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise WrongRowError(f"{int(wrong.sum())} rows differ from what was written; the first is id {int(batch.ids[at])}")
    return len(batch.ids), batch.n_distinct


def server_version(target: Filled) -> str:
    """What the first storage server calls itself."""
    (stats, *_) = target.stats()
    return stats.server


def _measure(target: Filled, case: Case, options: argparse.Namespace, stack: ExitStack, versions: dict[str, str]) -> Section:
    batches = make_batches(target, case.ids, options.missing)
    others, notes = _peers(target, case, batches, options.missing)
    if case.dtype != "float32":
        others += _of_bytes(target, case, batches, Path(stack.enter_context(TemporaryDirectory())))
    elif case.store in TFRA_STORES and len(target.ports) == 1:
        try:
            others += tfra_lookups(stack, target, batches, versions)
        except peers.PeerAbsentError as absent:
            notes.append(f"Peer skipped: {absent}")
    if options.tls:
        others.append(_ours(table_over_tls(stack, target), batches, "Table.pull over TLS"))
    contenders = [_ours(target.table, batches), *others]
    measured = run_rounds(contenders, target.pids, seconds=options.seconds, repeats=options.repeats)
    settings = {
        "store": case.store,
        "layout": case.layout,
        "nodes": len(target.ports),
        "dim": target.table.dim,
        "dtype": case.dtype,
        "optimizer": target.table.definition.optimizer.kind,
        "record_bytes": target.table.definition.record.size_bytes,
        "rows": target.n_rows,
        "ids": case.ids,
        "missing": options.missing,
        "seconds": options.seconds,
        "repeats": options.repeats,
    }
    return Section(settings, measured, notes)


def _ours(table: Table, batches: Sequence[Batch], name: str = "Table.pull") -> Contender:
    def read(index: int) -> NDArray[Any]:
        return table.pull(batches[index].ids, timeout_s=_TIMEOUT_S)

    return Contender(name, repeated(read, lambda index, rows: verify(batches[index], rows), len(batches)))


def _of_bytes(target: Filled, case: Case, batches: Sequence[Batch], folder: Path) -> list[Contender]:
    """What else reads rows of bytes: redis-py by keys of their own, and a file on local disk."""
    positions = [batch.positions % target.n_rows for batch in batches]  # those without a row are others here
    in_file = [Batch(at, batch.ids, target.weights[at], batch.n_distinct) for at, batch in zip(positions, batches, strict=True)]

    def check(index: int, rows: NDArray[np.uint8]) -> tuple[int, int]:
        return verify(in_file[index], rows)

    found = [peers.mapped_file(folder / "rows", target.weights, positions, check, cold=cold) for cold in (False, True)]
    if case.store == "memcached" or len(target.ports) > 1:
        return found
    size = target.table.definition.record.size_bytes  # of the keys that redis-benchmark has
    return [peers.redis_py_mget(target.ports[0], [at.tolist() for at in positions], size), *found]


def _peers(target: Filled, case: Case, batches: Sequence[Batch], missing: float) -> tuple[list[Contender], list[str]]:
    """The peers that can be measured here, and a word about each that cannot."""
    if len(target.ports) > 1:
        return [], ["Peers skipped: each of them speaks to one server, and this cluster has several."]
    (port,), size = target.ports, target.table.definition.record.size_bytes
    n_missing = [int((batch.positions >= target.n_rows).sum()) for batch in batches]
    if case.store == "memcached":
        keys = [_keys(target, batch) for batch in batches]
        makers = [partial(peers.pymemcache, port, keys, size, n_missing)]
        notes = ["redis-benchmark skipped: it does not speak memcached's protocol, and Debian ships no such program in C for it."]
    else:
        makers = [
            partial(peers.redis_benchmark, port, value_bytes=size, n_keys=target.n_rows, missing=missing),
            *(
                [partial(peers.redis_py, port, [_fields(target, batch) for batch in batches], size, n_missing)]
                if case.layout == "buckets"
                else []
            ),
        ]
        notes = []
    found = []
    for make in makers:
        try:
            found.append(make())
        except peers.PeerAbsentError as absent:
            notes.append(f"Peer skipped: {absent}")
    return found, notes


def _batch(target: Filled, positions: NDArray[np.int64]) -> Batch:
    definition = target.table.definition
    ids, exists = ids_of(definition, positions), positions < target.n_rows
    expected = np.empty((len(positions), definition.dim), definition.row_dtype)
    expected[exists] = target.weights[positions[exists]]
    if not exists.all():
        expected[~exists] = definition.initial_rows(ids[~exists])
    return Batch(positions, ids, expected, len(np.unique(ids)))


def _keys(target: Filled, batch: Batch) -> list[bytes]:
    encoded = RowKeys(target.table.definition.tag, batch.ids).encode()
    return encoded.view(f"S{encoded.shape[1]}")[:, 0].tolist()  # type: ignore[no-any-return]


def _fields(target: Filled, batch: Batch) -> list[tuple[bytes, list[bytes]]]:
    """The same on Redis and Valkey: every bucket's key, and the fields in it."""
    keys = group_by_node(target.table.definition.keys(batch.ids, pages=True), None).keys
    assert isinstance(keys, BucketKeys)
    firsts = keys.runs()
    names, fields = keys[firsts].encode(), keys.fields().view("V8")[:, 0]
    return [(bytes(name), [bytes(field) for field in some]) for name, some in zip(names, np.split(fields, firsts[1:]), strict=True)]
