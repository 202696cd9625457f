"""The copies of the table registry: on every node, and in the data folder of each shard. Their content is `table_registry`'s.

The highest serial is the truth. So a write that was broken off counts as soon as one copy has it, and shard 0 completes it before the next
one. When all nodes have lost theirs, the shards must still know the tables to restore: hence the file, which is written first. No copy is
replaced by an older one. Not thread-safe, apart from `now`.
"""

import logging
import time
from collections.abc import Mapping, Sequence

from kvemb.coordination.registry_format import META_NAME, STAGED, Registered, decode_registry, encode_registry, newest_registry
from kvemb.coordination.replicated_values import Change, are_damaged, unless_newer
from kvemb.errors import NodeLostError, NodeSuspectError, ParameterServerError, ShardUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.schema.table_def import TableDef
from kvemb.stores.store import Store

from ..shard_process.data_dir import DataDir, named

KEPT = "tables"  # file in the data folder
_MENDED_WITHIN_S, _PAUSE_S = 30.0, 0.2  # shard 0 looks at the copies every 5 s, and every 20 s where one look at the markers takes long
log = logging.getLogger("paramserver")


class RegistryCopies:
    """The copies of the registry of tables, on the nodes and in the data folder, as one shard reads and writes them."""

    def __init__(self, store: Store, shard: int, timeout_s: float, data: DataDir) -> None:
        self._store, self._shard, self._timeout_s, self._data = store, shard, timeout_s, data
        self.now = Registered(0, {}, {})  # replaced as a whole, and so is the next: see `Registry.altering`
        self.altering: Mapping[str, TableDef] = {}
        self._behind = True  # nodes may hold more than we know: never read yet, or a write was broken off

    def catch_up(self) -> None:
        """Read the copies, if they may be newer than `now`."""
        if self._behind:
            self.read()

    def read(self) -> None:
        """Read the copies; shard 0 also completes a write that was broken off.

        Raises:
            ShardUnavailableError: a newer one cannot be kept in the folder.
        """
        self._behind = True
        kept = self._data.read(KEPT)
        try:
            copies, whole = self._on_nodes(), True
        except (NodeLostError, NodeSuspectError):  # to be repaired, with the tables that we know
            if kept is None:
                raise
            copies, whole = [], False
        holders = self._store.values.copies_on(META_NAME) if copies else ()
        found = newest_registry([*copies, kept], [*holders, f"this shard's file {KEPT}"])
        damaged = are_damaged(copies, decode_registry)
        if any(damaged) and (self._shard == 0 or _some_good(copies, damaged)):  # another shard's file may be old
            self._store.values.mend(META_NAME, copies, damaged, encoded(found), Deadline.after(self._timeout_s))
        if self._shard == 0 and found.serial and any(copy != encoded(found) for copy in copies):
            self._store.values.update(META_NAME, put_back(found), Deadline.after(self._timeout_s))
        if found.serial and kept != encoded(found):
            try:
                self._keep(found)
            except ParameterServerError as error:  # pushes of the tables that it names wait for it
                raise ShardUnavailableError(str(error)) from error
        self._see(found)
        self._behind = not whole

    def write(self, new: Registered, *, ends: bool = False) -> None:
        """Write the next registry to the file and every node. One that ends what was begun is not held up by a full disk.

        Raises:
            ParameterServerError: it cannot be kept in the folder; nothing was changed.
        """
        self._behind = True
        try:
            self._keep(new)
        except ParameterServerError as error:
            if not ends:
                raise
            log.warning("%s It is kept when that is mended.", error)
        self._store.values.update(META_NAME, _in_turn(new), Deadline.after(self._timeout_s))
        self._see(new)
        self._behind = False

    def _on_nodes(self) -> list[bytes | None]:
        """The nodes' copies; where all are damaged, shard 0 gets time to mend them: no other shard is sure to know the newest tables."""
        until = Deadline.after(_MENDED_WITHIN_S)
        while True:
            copies = self._store.values.get(META_NAME, Deadline.after(self._timeout_s))
            damaged = are_damaged(copies, decode_registry)
            if self._shard == 0 or not any(damaged) or _some_good(copies, damaged) or until.expired:
                return copies
            time.sleep(_PAUSE_S)

    def _keep(self, new: Registered) -> None:
        with named("the tables' definitions cannot be kept", self._data.path):
            self._data.write(KEPT, [encoded(new)])

    def _see(self, new: Registered) -> None:
        staged = [one.definition for one in new.dropped.values() if one.altered == STAGED and one.definition.name in new.tables]
        self.altering = {new.tables[one.name].key: one for one in staged}
        self.now = new  # last: who sees its serial knows what is being altered


def encoded(new: Registered) -> bytes:
    """Return a registry as nodes hold it."""
    return encode_registry(new.serial, [table for _, table in sorted(new.tables.items())], new.dropped.values(), new.policies)


def put_back(known: Registered) -> Change:
    """Return the change that lets a copy be this registry, unless it is a newer one: a shard may not have heard of the last one."""
    return unless_newer(encoded(known), lambda found: decode_registry(found).serial >= known.serial)


def _in_turn(new: Registered) -> Change:
    """Return the change that puts the next registry in the place of the one before."""
    value = encoded(new)

    def is_newer(found: bytes) -> bool:
        if found != value and decode_registry(found).serial >= new.serial:
            raise ShardUnavailableError("another process has changed the registry of tables meanwhile; nothing was changed. Ask again")
        return False

    return unless_newer(value, is_newer)


def _some_good(copies: Sequence[bytes | None], damaged: Sequence[bool]) -> bool:
    return any(copy is not None and not wrong for copy, wrong in zip(copies, damaged, strict=True))
