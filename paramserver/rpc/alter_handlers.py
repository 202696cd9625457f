"""Altering a table, verb by verb (docs/adr/0102). The client drives it, and copies the rows; every step may be repeated.

    begin    shard 0: a table of the new definition is registered, without a name. Pushes to the other one wait from now on
    follow   every shard: what was taken before is applied; so the rows stay as they are, and are copied by assigns
    switch   shard 0: the name passes to the new table, by one write to the registry
    erase    every shard, as of a drop: pushes by the old definition are refused, its rows erased

Until the switch "abort" makes the new table the one that is erased. A shard that was killed in between reads from the registry what it is
to hold or to refuse.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from kvemb.errors import InvalidInputError, ParameterServerError, TableAlteredError
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import AlterTableReply, AlterTableRequest, FollowAlterReply, FollowAlterRequest
from kvemb.schema.table_def import TableDef

from ..ingest.sync_steps import COMING
from ..journal import EventEntry
from ..journal.entry import ALTER
from ..model.batch import ASSIGN, CheckedRows, RowsWork
from ..recovery.shard_parts import ShardParts


class AlterHandlers:
    """Answers one shard's part of altering a table. Thread-safe.

    Args:
        parts: of the shard.
        no_shard_move: keeps slots with their shards while a block runs, on shard 0; raises where they are on their way.
        tell: tells the feed.
    """

    def __init__(
        self, parts: ShardParts, *, no_shard_move: Callable[[], AbstractContextManager[None]], tell: Callable[[EventEntry], None]
    ) -> None:
        self._parts, self._no_shard_move, self._tell = parts, no_shard_move, tell

    def step(self, request: AlterTableRequest, deadline: Deadline) -> AlterTableReply:
        """Take a step of an alteration (shard 0); each may be taken again.

        Raises:
            InvalidInputError: kvemb.yaml declares the table, or see `Registry.begin_alter` and `switch`.
            MoveRefusedError: slots are moving between shards; nothing was changed.
            KvembError: any of `Registry`'s.
        """
        parts, staged = self._parts, None
        if parts.shard != 0:
            raise ParameterServerError(f"tables are altered by shard 0, this is shard {parts.shard}")
        if request.step == "begin":
            if request.table in {table.name for table in parts.config.tables}:
                raise InvalidInputError(
                    f"table {request.table!r} is declared in kvemb.yaml, by which shard 0 would refuse to start. Take it out of `tables` "
                    "there, restart shard 0, alter the table, and declare it as it is then."
                )
            with self._no_shard_move():  # rows on their way would be missed where they come from, and where they go
                staged = parts.registry.begin_alter(request.key, TableDef.from_dict(request.definition))
        elif request.step == "switch":
            parts.registry.switch(request.key)
        elif request.step == "abort":
            parts.registry.abort_alter(request.table, request.key)
        else:
            raise InvalidInputError(f"step {request.step!r}: is none of an alteration")
        left = [table.key for table in parts.registry.left_by_alter(request.table)]
        return AlterTableReply({} if staged is None else staged.to_dict(), left)

    def follow(self, request: FollowAlterRequest, deadline: Deadline) -> FollowAlterReply:
        """Hold a table's pushes, and say what there is of both tables once what was taken before is applied.

        Raises:
            TableAlteredError: the alteration was given up, or begun again.
            DeadlineExceededError: work accepted before is not applied yet.
        """
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
            nothing = np.empty(0, np.uint64), np.empty((0, staged.dim), staged.row_dtype), np.empty(0, np.uint64)
            rows = CheckedRows(staged, *nothing, staged.optimizer.check_hyper({}))
            self._tell(EventEntry(ALTER, staged.key))
            parts.ingest.submit_rows(RowsWork(ASSIGN, rows), deadline, parts.maps.cluster_map.shards_serial)
        return FollowAlterReply(old.n_rows, new.n_rows, parts.engine.epoch, held.last, False)
