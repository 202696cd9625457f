"""A table that gets another definition: its rows are copied into a table without a name, which then takes the name (docs/adr/0102).

Pushes to the table wait from the first row to the last, so the rows stand still. Pulls go on. Whatever process dies, the table is wholly
the old or wholly the new one: the name passes by one write of shard 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress

import numpy as np
from numpy.typing import NDArray

from kvemb.alter.alter_messages import ALTER_TABLE, FOLLOW_ALTER, AlterTableRequest, FollowAlterReply, FollowAlterRequest
from kvemb.alter.altered_table import AlteredTable, TableChanges
from kvemb.client.shard_client import ShardClient, wait_s
from kvemb.connection import Connection
from kvemb.errors import DeadlineExceededError, KvembError, LostRowError, ParameterServerError, ShardUnavailableError, StorageError, n_of
from kvemb.net.deadline import Deadline
from kvemb.process.work_ahead import work_ahead
from kvemb.protocol.message_format import TableRows
from kvemb.schema.record import HEADER_SIZE
from kvemb.schema.table_def import TableDef, check_table_name
from kvemb.stores.row_io import ReadPart
from kvemb.stores.store import Store

AlterProgress = Callable[[str, int, int], None]
"""Called with (name of the phase, rows done, rows in all)."""
_BLOCK_BYTES = 8 << 20
_AT_ONCE = 3  # blocks: one is read while one is on its way and one is applied
_PAUSE_S = 0.02
_ABORT_S = 10.0  # what is not erased by then is said by `kvemb status`


def alter_table(connection: Connection, name: str, changes: TableChanges, timeout_s: float | None, progress: AlterProgress | None) -> None:
    """Give a table another definition; see `Cluster.alter_table`."""
    check_table_name(name)
    shards = connection.require_shards("alter_table")
    old = shards.questions.get_table(name, timeout_s)
    change = AlteredTable.of(old, changes)
    with connection.changes.change():
        if change.is_none:  # so it may be because an alteration was broken off after its switch
            end_alter(shards, name, "abort", old.key, timeout_s)
        else:
            _alter(shards, connection.store, change, connection.storage_deadline, timeout_s=timeout_s, progress=progress)


def abort_alter_table(connection: Connection, name: str, timeout_s: float | None) -> int:
    """Give up an alteration, or erase what one has left; see `Cluster.abort_alter_table`."""
    check_table_name(name)
    return end_alter(connection.require_shards("abort_alter_table"), name, "abort", "", timeout_s)


def _alter(
    shards: ShardClient,
    store: Store,
    change: AlteredTable,
    storage_deadline: Callable[[], Deadline],
    *,
    timeout_s: float | None,
    progress: AlterProgress | None,
) -> None:
    show, old, key = progress or (lambda what, done, total: None), change.old, ""
    try:
        staged = begin_alter(shards, old, change.new, timeout_s)
        change, key = AlteredTable(old, staged, change.new_columns), staged.key
        before = hold_for_alter(shards, old, staged, timeout_s, begin=True, steps=change.keeps_steps)
        n_rows, n_done = sum(reply.n_rows for reply in before.values()), 0

        def copy(ids: NDArray[np.uint64]) -> int:
            copy_rows(shards, _altered(store, change, ids, storage_deadline()), timeout_s)
            return len(ids)

        with closing(work_ahead(copy, _blocks(shards, old, timeout_s), n_threads=_AT_ONCE, name="kvemb-alter")) as copied:
            for n in copied:
                n_done += n
                show("copying", n_done, n_rows)
        _require_all(old.name, before, hold_for_alter(shards, old, staged, timeout_s, begin=False))
        end_alter(shards, old.name, "switch", key, timeout_s)
    except BaseException as error:  # also where the program is told to end
        if not key and isinstance(error, KvembError) and not isinstance(error, (StorageError, ShardUnavailableError)):
            raise  # it was refused
        error.add_note(
            f"Table {old.name!r} is as it was, or, where its end alone was not heard of, as it is to be. If its pushes still wait, as "
            f"`kvemb status` says: kvemb alter {old.name} --abort"
        )
        with suppress(KvembError):
            end_alter(shards, old.name, "abort", key, _ABORT_S)  # once the table has switched, that erases the rows of the old one
        raise


def begin_alter(shards: ShardClient, old: TableDef, wanted: TableDef, timeout_s: float | None) -> TableDef:
    """Begin to alter a table, after this process's own pushes; return the one that is to be filled."""
    if shards.n_undelivered:  # they may wait for the end of an alteration that was broken off: this one takes its place
        end_alter(shards, old.name, "abort", "", timeout_s)
    deadline = shards.deadline(timeout_s)
    shards.wait_applied(deadline)
    request = AlterTableRequest(old.name, "begin", old.key, wanted.to_dict())
    return TableDef.from_dict(shards.servers.call(0, ALTER_TABLE, request, deadline).staged)


def hold_for_alter(
    shards: ShardClient, old: TableDef, staged: TableDef, timeout_s: float | None, *, begin: bool, steps: bool = False
) -> dict[int, FollowAlterReply]:
    """Have every shard hold the pushes to a table that is being altered; return each one's answer.

    The shards of a sync job go on to the step that the first of them has reached. With `begin` each begins once all stand at it.
    """
    deadline, last, level = shards.deadline(timeout_s), 0, False
    while True:
        request = FollowAlterRequest(old.key, staged.key, begin and level, steps, last, wait_s(deadline))
        replies = shards.servers.call_each(FOLLOW_ALTER, request, deadline)
        before, furthest = level, max(reply.last_step for reply in replies.values())
        level = furthest == last and not any(reply.coming for reply in replies.values())
        if level and (before or not begin):
            return replies
        if deadline.expired:
            raise DeadlineExceededError(
                f"table {old.name!r}: not all shards have come to step {furthest} of the sync job within {deadline.timeout_s:g} s"
            )
        last = furthest
        time.sleep(0.0 if level else _PAUSE_S)


def copy_rows(shards: ShardClient, rows: TableRows, timeout_s: float | None) -> None:
    """Set rows of a table that is filled. Not after this process's own pushes, as `assign`: these may wait for the end of the copy."""
    shards.assign(rows, timeout_s, behind_pushes=False)


def end_alter(shards: ShardClient, name: str, step: str, key: str, timeout_s: float | None) -> int:
    """Switch to the table that was filled, or abort; erase the rows that are left, and return how many these were."""
    deadline = shards.deadline(timeout_s)
    left = shards.servers.call(0, ALTER_TABLE, AlterTableRequest(name, step, key), deadline).left
    return sum(shards.end_drop(one, deadline, timeout_s) for one in left)


def block_rows(definition: TableDef) -> int:
    """Return how many rows are copied at once."""
    return max(1, _BLOCK_BYTES // (definition.record.size_bytes + 8))


def _blocks(shards: ShardClient, old: TableDef, timeout_s: float | None) -> Iterator[NDArray[np.uint64]]:
    step = block_rows(old)
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
