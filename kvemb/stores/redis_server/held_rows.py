"""Counts the rows of tables in buckets on one Redis or Valkey server: HLEN of every bucket, or of some of them."""

from collections.abc import Sequence

import numpy as np

from kvemb.net.deadline import Deadline
from kvemb.schema.buckets import WholeBuckets, needs_filler
from kvemb.schema.table_def import TableDef
from kvemb.stores.redis_server.redis_commands import RedisAccess, admin, ask_all
from kvemb.stores.row_io import HeldRows
from kvemb.stores.store_repair import StoreRepair
from kvemb.wire.request_arrays import chunks

_MOST_BUCKETS = 4096  # of a table, that are all counted; of more, so many drawn at random
_PIPELINED = 1024


def held_rows(
    repair: StoreRepair, address: str, access: RedisAccess, tables: Sequence[TableDef], deadline: Deadline
) -> list[HeldRows | None]:
    """See `StoreRows.held_on`."""
    with admin(address, access, deadline) as link:
        counted: list[HeldRows | None] = []
        for table in tables:
            if table.n_buckets is None:
                counted.append(None)
                continue
            buckets = WholeBuckets(table.tag, _numbers(table.n_buckets), table.n_buckets)
            keys = [bytes(key) for key in buckets.take(np.flatnonzero(repair.keys_of(address, buckets))).encode()]
            asked = [[("HLEN", key) for key in keys[some]] for some in chunks(len(keys), _PIPELINED)]
            sizes = [size for commands in asked for size in ask_all(link, commands, deadline)]
            fillers = int(needs_filler(table.record.size_bytes, compact=table.layout == "compact"))
            # A slot on its way and another program's value give no number.
            n_rows = sum(size - fillers for size in sizes if isinstance(size, int) and size)
            counted.append(HeldRows(n_rows * table.n_buckets // len(buckets), exact=len(buckets) == table.n_buckets))
    return counted


def _numbers(n_buckets: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    if n_buckets <= _MOST_BUCKETS:
        return np.arange(n_buckets, dtype=np.uint64)
    return np.unique(np.random.default_rng(n_buckets).integers(n_buckets, size=_MOST_BUCKETS, dtype=np.uint64))
