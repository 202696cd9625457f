"""A table that gets another definition: its rows are copied into a table without a name, which then takes the name (docs/adr/0102).

Pushes to the table wait from the first row to the last, so the rows stand still. Pulls go on. Whatever process dies, the table is wholly
the old or wholly the new one: the name passes by one write of shard 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress

import numpy as np
from numpy.typing import NDArray

from kvemb.client.shard_client import ShardClient
from kvemb.errors import KvembError, LostRowError, ParameterServerError, ShardUnavailableError, StorageError, n_of
from kvemb.foreign.foreign_rows import block_rows
from kvemb.net.deadline import Deadline
from kvemb.process.work_ahead import work_ahead
from kvemb.protocol.message_format import TableRows
from kvemb.protocol.messages import FollowAlterReply
from kvemb.schema.altered_table import AlteredTable
from kvemb.schema.record import HEADER_SIZE
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart
from kvemb.stores.store import Store

AlterProgress = Callable[[str, int, int], None]
"""Called with (name of the phase, rows done, rows in all)."""
_AT_ONCE = 3  # blocks of 8 MiB: one is read while one is on its way and one is applied
_ABORT_S = 10.0  # what is not erased by then is said by `kvemb status`


def alter(
    shards: ShardClient,
    store: Store,
    change: AlteredTable,
    storage_deadline: Callable[[], Deadline],
    *,
    timeout_s: float | None,
    progress: AlterProgress | None,
) -> None:
    """Give a table its new definition; see `Cluster.alter_table`."""
    show, old, key = progress or (lambda what, done, total: None), change.old, ""
    try:
        staged = shards.begin_alter(old, change.new, timeout_s)
        change, key = AlteredTable(old, staged, change.new_columns), staged.key
        before = shards.hold_for_alter(old, staged, timeout_s, begin=True, steps=change.keeps_steps)
        n_rows, n_done = sum(reply.n_rows for reply in before.values()), 0

        def copy(ids: NDArray[np.uint64]) -> int:
            shards.copy_rows(_altered(store, change, ids, storage_deadline()), timeout_s)
            return len(ids)

        with closing(work_ahead(copy, _blocks(shards, old, timeout_s), n_threads=_AT_ONCE, name="kvemb-alter")) as copied:
            for n in copied:
                n_done += n
                show("copying", n_done, n_rows)
        _require_all(old.name, before, shards.hold_for_alter(old, staged, timeout_s, begin=False))
        shards.end_alter(old.name, "switch", key, timeout_s)
    except BaseException as error:  # also where the program is told to end
        if not key and isinstance(error, KvembError) and not isinstance(error, (StorageError, ShardUnavailableError)):
            raise  # it was refused
        error.add_note(
            f"Table {old.name!r} is as it was, or, where its end alone was not heard of, as it is to be. If its pushes still wait, as "
            f"`kvemb status` says: kvemb alter {old.name} --abort"
        )
        with suppress(KvembError):
            shards.end_alter(old.name, "abort", key, _ABORT_S)  # once the table has switched, that erases the rows of the old one
        raise


def _blocks(shards: ShardClient, old: TableDef, timeout_s: float | None) -> Iterator[NDArray[np.uint64]]:
    step = max(1, block_rows(old) // 8)
    return (page[at : at + step] for page in shards.questions.ids(old.name, timeout_s) for at in range(0, len(page), step))


def _altered(store: Store, change: AlteredTable, ids: NDArray[np.uint64], deadline: Deadline) -> TableRows:
    """Read rows with their state, and return what they become."""
    old, new, record = change.old, change.new, change.old.record
    keys = old.keys(ids, pages=store.capabilities.pages)
    read = store.rows.read([ReadPart(keys, record.size_bytes, record.size_bytes)], deadline)[0].in_key_order()
    record.check(read.records, ids, read.found, store.rows.whereabouts(keys))
    if not read.found.all():
        first, n_lost = old.shown_id(int(ids[int(np.argmin(read.found))])), int((~read.found).sum())
        raise LostRowError(
            f"table {old.name!r}, id {first}: is missing in storage ({n_of(n_lost, 'such row')} in a block); nothing was altered. Have it "
            "restored by `kvemb repair --all`, and alter the table then"
        )
    weights = record.weights(read.records) if old.row_dtype == np.float32 else read.records[:, HEADER_SIZE : record.prefix_bytes]
    rows = change.rows(ids, weights, record.state(read.records))
    dtype = "float32" if new.row_dtype == np.float32 else new.dtype
    return TableRows(new.name, new.schema, ids, rows, dtype=dtype, placement=new.placement)


def _require_all(name: str, before: Mapping[int, FollowAlterReply], after: Mapping[int, FollowAlterReply]) -> None:
    """Refuse the switch unless the new table has as many rows as the old one, of which none came or went meanwhile."""
    there, copied = sum(reply.n_rows for reply in after.values()), sum(reply.n_staged for reply in after.values())
    first = sum(reply.n_rows for reply in before.values())
    same = [(shard, reply.epoch) for shard, reply in before.items()] == [(shard, reply.epoch) for shard, reply in after.items()]
    if not (there == copied == first and same):
        raise ParameterServerError(
            f"table {name!r}: {first:,} rows when the copy began, {there:,} when it ended, {copied:,} copied: rows came or went "
            "meanwhile, by a load, say; nothing was altered. Alter the table again"
        )
