"""Dropping a table, verb by verb. The client drives it; every step may be repeated, so that a drop that was broken off can begin again.

    begin   shard 0: the table has no name any more, durably (registry). Shards that hear of it refuse its pushes.
    erase   every shard, again and again: accepted work is applied first, then its rows are erased by batches like any other
    end     shard 0, once no shard knows of a row: buckets are deleted with all that is in them, then the name is free, durably

A shard that was killed in between knows from the registry that it must refuse, and from its journal which rows are erased.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress

import numpy as np

from kvemb.errors import InvalidInputError, ParameterServerError, SlotsMovedError
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import Empty, EraseTableReply, EraseTableRequest, TableReply, TableRequest
from kvemb.protocol.shard_routing import MapSource
from kvemb.schema.table_def import TableDef

from ..ingest.ingest import Ingest
from ..journal import EventEntry
from ..journal.entry import DROP
from ..model.batch import DROPPED, ERASE, CheckedRows, RowsWork
from ..model.table_registry import Registry
from ..model.tables import Tables

_PORTION = 1 << 19  # rows erased by one batch


class DropHandlers:
    """Answers one shard's part of dropping a table. Thread-safe.

    Args:
        shard: number.
        declared: the tables of kvemb.yaml.
        registry, tables, ingest: the shard's.
        maps: says which map is in force.
        no_shard_move: keeps slots with their shards while a block runs, on shard 0; raises where they are on their way.
        tell: tells the feed.
    """

    def __init__(
        self,
        shard: int,
        declared: Sequence[TableDef],
        registry: Registry,
        tables: Tables,
        ingest: Ingest,
        *,
        maps: MapSource,
        no_shard_move: Callable[[], AbstractContextManager[None]],
        tell: Callable[[EventEntry], None],
    ) -> None:
        self._shard, self._declared = shard, {table.name for table in declared}
        self._registry, self._tables, self._ingest = registry, tables, ingest
        self._maps, self._no_shard_move, self._tell = maps, no_shard_move, tell

    @property
    def unfinished(self) -> str:
        """Describe the drops and alterations that shard 0 knows and that have not ended, or ""."""
        return self._registry.unfinished if self._shard == 0 else ""

    def begin(self, request: TableRequest, deadline: Deadline) -> TableReply:
        """Take a table's name away (shard 0); return its definition.

        Raises:
            InvalidInputError: kvemb.yaml declares it.
            UnknownTableError: there is none of that name.
            MoveRefusedError: slots are moving between shards; nothing was changed.
            StorageError: it may have begun.
        """
        self._require_first()
        if request.table in self._declared:
            raise InvalidInputError(
                f"table {request.table!r} is declared in kvemb.yaml, and would be created again when shard 0 starts. Take it out of "
                "`tables` there, restart shard 0, and drop it then."
            )
        with self._no_shard_move():  # rows on their way would be missed where they come from, and where they go
            return TableReply(self._registry.begin_drop(request.table).to_dict())

    def erase(self, request: EraseTableRequest, deadline: Deadline) -> EraseTableReply:
        """Erase some of this shard's rows of a table that is being dropped.

        Raises:
            ParameterServerError: it is not being dropped, as far as storage says.
            DeadlineExceededError: work accepted before is not applied yet, or the rows are not erased yet.
        """
        deadline = deadline.within(request.timeout_s)
        self._registry.load()
        if request.key in {table.key for table in self._registry.gone}:
            return EraseTableReply(0, 0)
        definition = next((table for table in self._registry.dropping if table.key == request.key), None)
        if definition is None:
            raise ParameterServerError(
                f"table {request.key!r} is not being dropped, as far as shard {self._shard} can read; call drop_table again"
            )
        self._ingest.refuse_table(definition.key)
        self._ingest.steps.follow()  # pushes that wait and name it are refused, where it was altered
        self._ingest.backlog.flush(deadline, table=definition.key)
        state = self._tables.state(definition)
        if self._registry.deletes_whole(definition):
            state.let_go()
        ids, n_erased = state.page(0, _PORTION), 0
        if len(ids):
            nothing = np.empty((len(ids), 0), np.float32), np.empty(0, np.uint64)
            rows = CheckedRows(definition, ids, *nothing, definition.optimizer.check_hyper({}))
            with suppress(SlotsMovedError):  # slots changed their shard in between: the client asks again
                n_erased = self._ingest.submit_rows(RowsWork(ERASE, rows, DROPPED), deadline, self._maps.cluster_map.shards_serial)
        if not state.n_rows:
            self._tables.forget(definition)
            self._tell(EventEntry(DROP, definition.key))
        return EraseTableReply(n_erased, state.n_rows)

    def end(self, request: TableRequest, deadline: Deadline) -> Empty:
        """Free the name of a table, by its key, once every shard has answered that it has no row of it (shard 0).

        Raises:
            StorageError: it may be free.
        """
        self._require_first()
        self._registry.end_drop(request.table)
        return Empty()

    def _require_first(self) -> None:
        if self._shard != 0:
            raise ParameterServerError(f"tables are dropped by shard 0, this is shard {self._shard}")
