"""Dropping a table, verb by verb. The client drives it; every step may be repeated, so that it can go on where it broke off.

begin_drop     shard 0: the table has no name any more, durably (registry). Shards that hear of it refuse its pushes.
erase          every shard, again and again: accepted work is applied first, then its rows are erased by batches like any other
end_drop       shard 0, once no shard knows of a row: buckets are deleted with all that is in them, then the name is free, durably
"""

from contextlib import suppress
from typing import ClassVar

import numpy as np

from kvemb.errors import InvalidInputError, ParameterServerError, SlotsMovedError
from kvemb.net.deadline import Deadline
from kvemb.protocol import messages
from kvemb.protocol.messages import (
    Empty,
    EraseTableReply,
    EraseTableRequest,
    TableReply,
    TableRequest,
)
from kvemb.protocol.verb import Handled
from kvemb.schema.table_def import TableDef

from ..capability import ShardKernel
from ..journal import EventEntry
from ..journal.entry import DROP
from ..model.batch import DROPPED, ERASE, CheckedRows, RowsWork
from ..recovery.shard_parts import ShardParts

_PORTION = 1 << 19  # rows erased by one batch


class TableDrops:
    """Answers one shard's part of dropping tables. Thread-safe."""

    def __init__(self, kernel: ShardKernel) -> None:
        self._kernel, self._parts = kernel, kernel.parts

    def begin_drop(self, request: TableRequest, deadline: Deadline) -> TableReply:
        """Take a table's name away (shard 0); return its definition.

        Raises:
            UnknownTableError: there is none of that name.
            MoveRefusedError: slots are moving between shards; nothing was changed.
            StorageError: it may have begun.
        """
        require_first(self._parts, "dropped")
        require_undeclared(
            self._parts,
            request.table,
            "and would be created again when shard 0 starts. Take it out of `tables` there, restart shard 0, and drop it then.",
        )
        with self._kernel.still():  # rows on their way would be missed where they come from, and where they go
            return TableReply(self._parts.registry.begin_drop(request.table).to_dict())

    def erase(self, request: EraseTableRequest, deadline: Deadline) -> EraseTableReply:
        """Erase some of this shard's rows of a table that is being dropped."""
        deadline, parts = deadline.within(request.timeout_s), self._parts
        parts.registry.load()
        if request.key in {table.key for table in parts.registry.gone}:
            return EraseTableReply(0, 0)
        definition = next((table for table in parts.registry.dropping if table.key == request.key), None)
        if definition is None:
            raise ParameterServerError(
                f"table {request.key!r} is not being dropped, as far as shard {parts.shard} can read; call drop_table again"
            )
        parts.ingest.steps.follow()  # its lock comes behind every part that was let in before; steps that wait and name it are refused
        parts.ingest.backlog.flush(deadline, table=definition.key)
        state = parts.tables.state(definition)
        if parts.registry.deletes_whole(definition):
            state.let_go()
        ids, n_erased = state.page(0, _PORTION), 0
        if len(ids):
            with suppress(SlotsMovedError):  # slots changed their shard in between: the client asks again
                n_erased = parts.ingest.submit_rows(
                    RowsWork(ERASE, without_values(definition, ids, 0), DROPPED), deadline, parts.maps.cluster_map.shards_serial
                )
        if not state.n_rows:
            parts.tables.forget(definition)
            self._kernel.events.tell(EventEntry(DROP, definition.key))
        return EraseTableReply(n_erased, state.n_rows)

    def end_drop(self, request: TableRequest, deadline: Deadline) -> Empty:
        """Free the name of a table, by its key, once every shard has answered that it has no row of it (shard 0).

        Raises:
            StorageError: it may be free.
        """
        require_first(self._parts, "dropped")
        self._parts.registry.end_drop(request.table)
        return Empty()

    verbs: ClassVar[Handled] = {
        messages.DROP_TABLE: begin_drop,
        messages.ERASE_TABLE: erase,
        messages.END_DROP: end_drop,
    }


def require_first(parts: ShardParts, done: str) -> None:
    """Refuse what shard 0 does for all tables."""
    if parts.shard != 0:
        raise ParameterServerError(f"tables are {done} by shard 0, this is shard {parts.shard}")


def require_undeclared(parts: ShardParts, name: str, why: str) -> None:
    """Refuse it for a table that kvemb.yaml declares."""
    if name in {table.name for table in parts.config.tables}:
        raise InvalidInputError(f"table {name!r} is declared in kvemb.yaml, {why}")


def without_values(definition: TableDef, ids: np.ndarray, dim: int) -> CheckedRows:
    """Return rows of these ids without weights, which an erase takes; or no row at all."""
    rows = np.empty((len(ids), dim), definition.row_dtype if dim else np.float32)
    return CheckedRows(definition, ids, rows, np.empty(0, np.uint64), definition.optimizer.check_hyper({}))
