"""Dropping and altering a table, verb by verb. The client drives both; every step may be repeated, so that it can go on where it broke off.

    begin_drop     shard 0: the table has no name any more, durably (registry). Shards that hear of it refuse its pushes.
    erase          every shard, again and again: accepted work is applied first, then its rows are erased by batches like any other
    end_drop       shard 0, once no shard knows of a row: buckets are deleted with all that is in them, then the name is free, durably

A table that is altered is one more that is dropped in the end (docs/adr/0102); the client copies the rows:

    alter begin    shard 0: a table of the new definition is registered, without a name. Pushes to the other one wait from now on
    follow_alter   every shard: what was taken before is applied; so the rows stay as they are, and are copied by assigns
    alter switch   shard 0: the name passes to the new table, by one write to the registry
    erase          every shard: pushes by the old definition are refused, its rows erased

Until the switch "abort" makes the new table the one that is erased. A shard that was killed in between knows from the registry what it is
to hold or to refuse, and from its journal which rows are erased.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import ClassVar

import numpy as np

from kvemb.errors import InvalidInputError, ParameterServerError, SlotsMovedError, TableAlteredError
from kvemb.net.deadline import Deadline
from kvemb.protocol import messages
from kvemb.protocol.messages import (
    AlterTableReply,
    AlterTableRequest,
    Empty,
    EraseTableReply,
    EraseTableRequest,
    FollowAlterReply,
    FollowAlterRequest,
    TableReply,
    TableRequest,
)
from kvemb.protocol.verb import Handled
from kvemb.schema.table_def import TableDef

from ..ingest.sync_steps import COMING
from ..journal import EventEntry
from ..journal.entry import ALTER, DROP
from ..model.batch import ASSIGN, DROPPED, ERASE, CheckedRows, RowsWork
from ..recovery.shard_parts import ShardParts

_PORTION = 1 << 19  # rows erased by one batch


class TableChanging:
    """Answers one shard's part of dropping and altering tables. Thread-safe."""

    def __init__(
        self, parts: ShardParts, *, no_shard_move: Callable[[], AbstractContextManager[None]], tell: Callable[[EventEntry], None]
    ) -> None:
        self._parts, self._no_shard_move, self._tell = parts, no_shard_move, tell

    @property
    def unfinished(self) -> str:
        """Describe the drops and alterations that shard 0 knows and that have not ended, or ""."""
        return self._parts.registry.unfinished if self._parts.shard == 0 else ""

    def begin_drop(self, request: TableRequest, deadline: Deadline) -> TableReply:
        """Take a table's name away (shard 0); return its definition.

        Raises:
            UnknownTableError: there is none of that name.
            MoveRefusedError: slots are moving between shards; nothing was changed.
            StorageError: it may have begun.
        """
        self._require_first("dropped")
        self._require_undeclared(
            request.table,
            "and would be created again when shard 0 starts. Take it out of `tables` there, restart shard 0, and drop it then.",
        )
        with self._no_shard_move():  # rows on their way would be missed where they come from, and where they go
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
                n_erased = self._submit(RowsWork(ERASE, _without_values(definition, ids, 0), DROPPED), deadline)
        if not state.n_rows:
            parts.tables.forget(definition)
            self._tell(EventEntry(DROP, definition.key))
        return EraseTableReply(n_erased, state.n_rows)

    def end_drop(self, request: TableRequest, deadline: Deadline) -> Empty:
        """Free the name of a table, by its key, once every shard has answered that it has no row of it (shard 0).

        Raises:
            StorageError: it may be free.
        """
        self._require_first("dropped")
        self._parts.registry.end_drop(request.table)
        return Empty()

    def alter(self, request: AlterTableRequest, deadline: Deadline) -> AlterTableReply:
        """Take a step of an alteration (shard 0); each may be taken again.

        Raises:
            MoveRefusedError: slots are moving between shards; nothing was changed.
        """
        self._require_first("altered")
        registry, staged = self._parts.registry, None
        if request.step == "begin":
            self._require_undeclared(
                request.table,
                "by which shard 0 would refuse to start. Take it out of `tables` there, restart shard 0, alter the table, and declare it "
                "as it is then.",
            )
            with self._no_shard_move():  # rows on their way would be missed where they come from, and where they go
                staged = registry.begin_alter(request.key, TableDef.from_dict(request.definition))
        elif request.step == "switch":
            registry.switch(request.key)
        elif request.step == "abort":
            registry.abort_alter(request.table, request.key)
        else:
            raise InvalidInputError(f"step {request.step!r}: is none of an alteration")
        left = [table.key for table in registry.left_by_alter(request.table)]
        return AlterTableReply({} if staged is None else staged.to_dict(), left)

    def follow_alter(self, request: FollowAlterRequest, deadline: Deadline) -> FollowAlterReply:
        """Hold a table's pushes, and say what there is of both tables once what was taken before is applied."""
        parts = self._parts
        parts.registry.load()
        staged = parts.registry.altering.get(request.key)
        if staged is None or staged.key != request.staged:
            raise TableAlteredError("this alteration was given up, or begun again by another command; the table is as it was")
        held = parts.ingest.steps.hold_behind(request.last_step)  # the lock that it takes comes behind every part that was let in before
        if held.phase == COMING:
            return FollowAlterReply(0, 0, parts.engine.epoch, held.last, True)
        deadline = deadline.within(request.timeout_s)
        parts.ingest.backlog.flush(deadline, steps_held=True)
        old, new = parts.tables.state(parts.registry.find_key(request.key)), parts.tables.state(staged)
        if request.begin:
            if request.steps:
                new.raise_step(old.step)  # no batch of it is on its way before this one, which keeps the number in the journal
            self._tell(EventEntry(ALTER, staged.key))
            self._submit(RowsWork(ASSIGN, _without_values(staged, np.empty(0, np.uint64), staged.dim)), deadline)
        return FollowAlterReply(old.n_rows, new.n_rows, parts.engine.epoch, held.last, False)

    verbs: ClassVar[Handled] = {
        messages.DROP_TABLE: begin_drop,
        messages.ERASE_TABLE: erase,
        messages.END_DROP: end_drop,
        messages.ALTER_TABLE: alter,
        messages.FOLLOW_ALTER: follow_alter,
    }

    def _submit(self, work: RowsWork, deadline: Deadline) -> int:
        return self._parts.ingest.submit_rows(work, deadline, self._parts.maps.cluster_map.shards_serial)

    def _require_first(self, done: str) -> None:
        if self._parts.shard != 0:
            raise ParameterServerError(f"tables are {done} by shard 0, this is shard {self._parts.shard}")

    def _require_undeclared(self, name: str, why: str) -> None:
        if name in {table.name for table in self._parts.config.tables}:
            raise InvalidInputError(f"table {name!r} is declared in kvemb.yaml, {why}")


def _without_values(definition: TableDef, ids: np.ndarray, dim: int) -> CheckedRows:
    """Return rows of these ids without weights, which an erase takes; or no row at all."""
    rows = np.empty((len(ids), dim), definition.row_dtype if dim else np.float32)
    return CheckedRows(definition, ids, rows, np.empty(0, np.uint64), definition.optimizer.check_hyper({}))
