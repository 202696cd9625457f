"""The copies of the table registry: on every node, and in the data folder of each shard. Their content is `table_registry`'s.

The highest serial is the truth. So a write that was broken off counts as soon as one node has it, and shard 0 completes it before the next
one. When all nodes have lost theirs, the shards must still know the tables to restore: hence the file. Not thread-safe, apart from `now`.
"""

import time
from collections.abc import Mapping, Sequence

from kvemb.coordination.registry_format import META_NAME, STAGED, Registered, decode_registry, encode_registry, newest_registry
from kvemb.coordination.replicated_values import are_damaged
from kvemb.errors import NodeLostError, NodeSuspectError
from kvemb.net.deadline import Deadline
from kvemb.schema.table_def import TableDef
from kvemb.stores.store import Store

from ..shard_process.data_dir import DataDir, named

KEPT = "tables"  # file in the data folder
_MENDED_WITHIN_S, _PAUSE_S = 30.0, 0.2  # shard 0 looks at the copies every 5 s, and every 20 s where one look at the markers takes long


class RegistryCopies:
    """The copies of the registry of tables, on the nodes and in the data folder, as one shard reads and writes them.

    Args:
        store: open.
        shard: number; shard 0 alone writes to the nodes, except over damaged copies.
        timeout_s: deadline of one storage call.
        data: the shard's folder.
    """

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
        """Read the copies; shard 0 also completes a write that was broken off."""
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
        if self._shard == 0 and found.serial and whole and len(set(copies)) > 1:
            self.write(found)
        self._remember(found, kept)
        self._behind = not whole

    def write(self, new: Registered) -> None:
        """Write a new registry to every node, and to the file.

        Raises:
            StorageError: some nodes may hold it; the next `catch_up` tells.
        """
        self._behind = True
        self._store.values.put(META_NAME, encoded(new), Deadline.after(self._timeout_s))
        self._remember(new, None)
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

    def _remember(self, new: Registered, kept: bytes | None) -> None:
        staged = [one.definition for one in new.dropped.values() if one.altered == STAGED and one.definition.name in new.tables]
        self.altering = {new.tables[one.name].key: one for one in staged}
        self.now = new  # last: who sees its serial knows what is being altered
        if new.serial and kept != encoded(new):
            with named("the tables' definitions cannot be kept", self._data.path):
                self._data.write(KEPT, [encoded(new)])


def encoded(new: Registered) -> bytes:
    """Return a registry as nodes hold it."""
    return encode_registry(new.serial, [table for _, table in sorted(new.tables.items())], new.dropped.values(), new.policies)


def _some_good(copies: Sequence[bytes | None], damaged: Sequence[bool]) -> bool:
    return any(copy is not None and not wrong for copy, wrong in zip(copies, damaged, strict=True))
