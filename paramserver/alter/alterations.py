"""Altering a table, verb by verb. The client drives it, and copies the rows; every step may be repeated.

A table that is altered is one more that is dropped in the end (docs/adr/0102); the client copies the rows:

    alter begin    shard 0: a table of the new definition is registered, without a name. Pushes to the other one wait from now on
    follow_alter   every shard: what was taken before is applied; so the rows stay as they are, and are copied by assigns
    alter switch   shard 0: the name passes to the new table, by one write to the registry
    erase          every shard: pushes by the old definition are refused, its rows erased

Until the switch "abort" makes the new table the one that is erased. A shard that was killed in between knows from the registry what it is
to hold or to refuse, and from its journal which rows are erased.
"""

from typing import ClassVar

import numpy as np

from kvemb.alter.alter_messages import ALTER_TABLE, FOLLOW_ALTER, AlterTableReply, AlterTableRequest, FollowAlterReply, FollowAlterRequest
from kvemb.errors import InvalidInputError, TableAlteredError
from kvemb.net.deadline import Deadline
from kvemb.protocol.verb import Handled
from kvemb.schema.table_def import TableDef

from ..capability import Capability
from ..ingest.sync_steps import COMING
from ..journal import EventEntry
from ..journal.entry import ALTER
from ..model.batch import ASSIGN, RowsWork
from ..rpc.table_drops import require_first, require_undeclared, without_values


class Alterations(Capability):
    """One shard's part of altering tables. Thread-safe."""

    def alter(self, request: AlterTableRequest, deadline: Deadline) -> AlterTableReply:
        """Take a step of an alteration (shard 0); each may be taken again.

        Raises:
            MoveRefusedError: slots are moving between shards; nothing was changed.
        """
        require_first(self._parts, "altered")
        registry, staged = self._parts.registry, None
        if request.step == "begin":
            require_undeclared(
                self._parts,
                request.table,
                "by which shard 0 would refuse to start. Take it out of `tables` there, restart shard 0, alter the table, and declare it "
                "as it is then.",
            )
            with self._kernel.still():  # rows on their way would be missed where they come from, and where they go
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
            self._kernel.events.tell(EventEntry(ALTER, staged.key))
            work = RowsWork(ASSIGN, without_values(staged, np.empty(0, np.uint64), staged.dim))
            parts.ingest.submit_rows(work, deadline, parts.maps.cluster_map.shards_serial)
        return FollowAlterReply(old.n_rows, new.n_rows, parts.engine.epoch, held.last, False)

    verbs: ClassVar[Handled] = {ALTER_TABLE: alter, FOLLOW_ALTER: follow_alter}
