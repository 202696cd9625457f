"""The question `memory`: how many bytes does a server hold per row? No shard takes part: the benchmark writes the same records itself."""

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import redis
from numpy.typing import NDArray
from pymemcache.client.base import Client

import kvemb
from benchmarks.ids import row_ids
from benchmarks.options import whole
from benchmarks.report import Line, Report, Section
from kvemb.config import StorageConfig
from kvemb.errors import KvembError
from kvemb.local_cluster.storage_servers import StorageServer, start_servers
from kvemb.net.deadline import Deadline
from kvemb.optim import OptimizerSpec
from kvemb.schema.bucket_limits import limits_for
from kvemb.schema.keys import RowKeys
from kvemb.schema.pages import PageLayout
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, WritePart
from kvemb.stores.storage_kinds import open_store
from kvemb.stores.store import Store

STORES = ("redis", "valkey", "memcached")
PAGED_STORES = ("redis", "valkey")
LAYOUTS = {
    "buckets": "rows in buckets (memcached: a key for every row)",
    "compact": 'rows in small buckets (layout="compact")',
    "paged": "rows in pages (num_ids)",
}
OPTIMIZERS: dict[str, Callable[[], OptimizerSpec]] = {
    "sgd": lambda: kvemb.optim.sgd(lr=0.01),
    "adam": lambda: kvemb.optim.adam(lr=0.01),
}
# What TFRA's documentation of its Redis layout comes to, per row of one tensor; W, m and v are a tensor each.
TFRA_STATED_BYTES = {16: 136, 64: 376}
MOST_SGD_RATIO, MOST_ADAM_RATIO = 1.2, 1.0
MOST_PAGED_RATIO = 1.15  # of the record
_WRITE_ROWS = 50_000
_TIMEOUT_S = 60.0
_CALM_S, _LONGEST_CALM_S = 0.5, 15.0


@dataclass(frozen=True)
class Held:
    """What a server holds: bytes it counts as used by items, bytes claimed for them from the system (0: not told), keys."""

    used_bytes: int
    claimed_bytes: int
    n_keys: int


def memory(options: argparse.Namespace) -> Report:
    """How many bytes does a server hold per row, by layout?

    Each line starts a fresh server, writes rows as a shard writes them, reads them back, and divides what the server's memory grew by.
    Redis and Valkey: used_memory, once it has come to rest; the directory of keys doubles at powers of two, so that its share depends on
    the number of rows. memcached: `bytes` (items with their headers); beside it, whole, the slab pages
    claimed for them and the hash table, which is what the system sees. TFRA is not run here: its bytes per row are those that are stated of
    its Redis layout, one tensor for SGD, three (W, m, v) for Adam; the ratio is ours divided by that, below 1 where ours is smaller.
    Rows in buckets are fields of hashes (memcached: keys), with layout compact of small ones. Redis and Valkey only: that, and paged tables
    (num_ids), which keep records side by side, and are compared with the record itself. Rows are created in no order. Nothing here depends
    on what else the machine does.
    """
    sections = []
    versions: dict[str, str] = {}
    for store in options.store:
        for layout in options.layout:
            if layout != "buckets" and store not in PAGED_STORES:
                continue
            lines = [_line(store, layout, dim, name, options.rows, versions) for dim in options.dim for name in options.optimizer]
            sections.append(Section({"store": store, "layout": LAYOUTS[layout], "rows": options.rows}, lines=lines))
    return Report("memory", sections, versions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `memory` can be asked."""
    parser.add_argument("--store", nargs="+", choices=STORES, default=list(STORES), help="storage kinds, in turn (all)")
    parser.add_argument("--layout", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), help="how rows are stored (all)")
    parser.add_argument("--dim", nargs="+", type=whole(1), default=[8, 16, 64], metavar="N", help="weights per row (8 16 64)")
    parser.add_argument("--optimizer", nargs="+", choices=sorted(OPTIMIZERS), default=["sgd", "adam"], help="(sgd adam)")
    parser.add_argument("--rows", type=whole(1), default=300_000, metavar="N", help="rows in the table (300000)")


def line_of(
    dim: int, optimizer: str, record_bytes: int, n_rows: int, before: Held, after: Held, *, n_keys: int, layout: PageLayout | None = None
) -> Line:
    """Say what n rows came to.

    Args:
        dim, optimizer, record_bytes, n_rows: of the table.
        before, after: bytes that the server held.
        n_keys: of rows, buckets or pages.
        layout: if they lie in pages.

    Raises:
        KvembError: the server holds another number of keys.
    """
    if after.n_keys - before.n_keys != n_keys:
        raise KvembError(f"{n_rows} rows were written under {n_keys} keys; the server holds {after.n_keys - before.n_keys}")
    row_bytes = (after.used_bytes - before.used_bytes) / n_rows
    claimed = after.claimed_bytes / n_rows if after.claimed_bytes else "–"
    figures = {
        "record bytes": float(record_bytes),
        "bytes/row": row_bytes,
        "/ record": row_bytes / record_bytes,
        "claimed bytes/row": claimed,
    }
    if layout is not None:
        figures |= {"rows/page": float(layout.rows_per_page), "target": f"/ record <= {MOST_PAGED_RATIO}"}
    n_tensors, most = (3, f"< {MOST_ADAM_RATIO:.1f}") if optimizer == "adam" else (1, f"<= {MOST_SGD_RATIO:.1f}")
    if dim in TFRA_STATED_BYTES:
        stated = n_tensors * TFRA_STATED_BYTES[dim]
        figures |= {"TFRA, stated": float(stated), "/ TFRA": row_bytes / stated}
        if layout is None:
            figures |= {"target": most}
    return Line(f"dim {dim}, {optimizer}", figures)


def _line(store: str, layout: str, dim: int, optimizer: str, n_rows: int, versions: dict[str, str]) -> Line:
    num_ids = n_rows if layout == "paged" else None
    definition = TableDef("bench", dim, OPTIMIZERS[optimizer](), kvemb.init.uniform(), id_dtype="uint64", num_ids=num_ids)
    if layout == "compact":
        definition = definition.laid_out(n_rows, layout)
    size = definition.record.size_bytes
    with _server(store, max(256, math.ceil(2 * n_rows * (size + 256) / (1 << 20)))) as (server, writer):
        versions[f"{store} server"] = writer.nodes.stats(Deadline.after(_TIMEOUT_S))[0].server
        if (limits := writer.rows.bucket_limits(server.address, Deadline.after(_TIMEOUT_S))) is not None:
            writer.rows.set_bucket_limits(server.address, limits_for([definition], limits), Deadline.after(_TIMEOUT_S))
        before = _at_rest(server)
        blocks = [(start, min(start + _WRITE_ROWS, n_rows)) for start in range(0, n_rows, _WRITE_ROWS)]
        for start, stop in blocks:
            _write(writer, definition, start, stop)
        for start, stop in blocks:  # every read also moves a directory that is being resized by a step
            _read_back(writer, definition, start, stop)
        n_keys = _n_keys(definition, n_rows, writer)
        return line_of(dim, optimizer, size, n_rows, before, _at_rest(server), n_keys=n_keys, layout=definition.pages)


@contextmanager
def _server(store: str, memory_mb: int) -> Iterator[tuple[StorageServer, Store]]:
    with tempfile.TemporaryDirectory(prefix="kvemb-") as folder:
        Path(folder).chmod(0o755)  # memcached gives up root for nobody
        (server,) = start_servers(store, 1, Path(folder), memory_mb)
        try:
            with open_store(StorageConfig(store, (server.address,), timeout_s=_TIMEOUT_S), role="shard:0") as writer:
                writer.provision(b"m" * 16, b"g" * 16, Deadline.after(_TIMEOUT_S))
                writer.open(Deadline.after(_TIMEOUT_S))
                yield server, writer
        finally:
            server.process.stop(_TIMEOUT_S)


def _records(definition: TableDef, start: int, stop: int, *, pages: bool) -> tuple[RowKeys, NDArray[np.uint8]]:
    ids, record = _ids(definition, start, stop), definition.record
    values = np.random.default_rng(start).standard_normal((stop - start, definition.dim + record.state_size), dtype=np.float32)
    records = record.encode(ids, make_version(1, 1), values[:, : definition.dim], values[:, definition.dim :])
    new = np.ones(len(ids), bool)
    return definition.keys(ids, pages=pages, new=new), records


def _ids(definition: TableDef, start: int, stop: int) -> NDArray[np.uint64]:
    if definition.num_ids is None:
        return row_ids(np.arange(start, stop))
    order: NDArray[np.uint64] = np.random.default_rng(0).permutation(definition.num_ids).astype(np.uint64)
    return order[start:stop]


def _write(writer: Store, definition: TableDef, start: int, stop: int) -> None:
    keys, records = _records(definition, start, stop, pages=writer.capabilities.pages)
    (result,) = writer.rows.write([WritePart(keys, records, np.zeros(len(keys), np.uint64))], Deadline.after(_TIMEOUT_S))
    if not result.stored.all():
        raise KvembError(f"filling the table: {int((~result.stored).sum())} rows from {start} on were not stored")


def _read_back(reader: Store, definition: TableDef, start: int, stop: int) -> None:
    keys, records = _records(definition, start, stop, pages=reader.capabilities.pages)
    size = definition.record.size_bytes
    got = reader.rows.read([ReadPart(keys, size, size)], Deadline.after(_TIMEOUT_S))[0].in_key_order()
    if not got.found.all() or not np.array_equal(got.records, records):
        raise KvembError(f"rows {start} to {stop} are not what was written")


def _n_keys(definition: TableDef, n_rows: int, writer: Store) -> int:
    """Under how many keys that many rows lie."""
    if definition.pages is not None:
        return -(-n_rows // definition.pages.rows_per_page)
    containers = definition.keys(row_ids(np.arange(n_rows)), pages=writer.capabilities.pages).containers()
    return n_rows if containers is None else len(containers.keys)


def _at_rest(server: StorageServer) -> Held:
    """The bytes that it holds, once they have not changed for a while."""
    held, since = _held(server), time.monotonic()
    deadline = Deadline.after(_LONGEST_CALM_S)
    while time.monotonic() - since < _CALM_S and not deadline.expired:
        time.sleep(_CALM_S / 5)
        now = _held(server)
        if abs(now.used_bytes - held.used_bytes) > now.n_keys:  # a client's buffers come and go: less than a byte per row
            since = time.monotonic()
        held = now
    return held


def _held(server: StorageServer) -> Held:
    if server.kind == "memcached":
        client = Client(("127.0.0.1", server.port), timeout=_TIMEOUT_S)
        try:
            stats, slabs = client.stats(), client.stats("slabs")
        finally:
            client.close()
        claimed = int(slabs.get(b"total_malloced", 0)) + int(stats[b"hash_bytes"])
        return Held(int(stats[b"bytes"]), claimed, int(stats[b"curr_items"]))
    with redis.Redis(port=server.port) as connection:
        return Held(int(connection.info("memory")["used_memory"]), 0, int(connection.dbsize()))
