"""The registry of tables: shard 0 keeps it, storage holds a copy on every node, the other shards and read-only clients read that.

The copy is written to every node before a creation is answered (`registry_copies`); its form is `kvemb.coordination.registry_format`.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kvemb.arrays.rounding import opaque_bytes
from kvemb.coordination.registry_format import REPLACED, STAGED, Dropped, Registered
from kvemb.coordination.replicated_values import Change
from kvemb.errors import (
    InvalidInputError,
    NodeLostError,
    NodeSuspectError,
    ParameterServerError,
    ShardUnavailableError,
    TableAlteredError,
    TableDroppedError,
    TableMismatchError,
    UnknownTableError,
    did_you_mean,
)
from kvemb.net.deadline import Absence, Deadline
from kvemb.optim import FROZEN
from kvemb.schema.keys import RowKeys
from kvemb.schema.policies import KEPT_CHANGES, NO_POLICIES, Changes, Policies, as_of
from kvemb.schema.table_def import TableDef
from kvemb.stores.read_retry import retry_read
from kvemb.stores.row_io import WritePart
from kvemb.stores.store import Store

from ..shard_process.data_dir import DataDir
from .bucket_settings import require_limits, require_records_fit
from .registry_copies import RegistryCopies, encoded, put_back

MAX_TABLES = 1024
MAX_DROPPED = 2048  # over the life of a cluster: their definitions are kept
_OTHER_SCHEMAS = 100  # of the newest tables dropped under a name: a trainer that still holds one of them is refused
MAX_REGISTRY_BYTES = 1_000_000  # it is one value in storage, and memcached takes a megabyte
AFTER_A_DROP = (
    "A process that used it connects again (kvemb.connect), and opens or creates a table of that name; for a model over it, build the "
    "model again and call distribute"
)
"""The next step for a user, whether the user or the user's model made the table."""
log = logging.getLogger("paramserver")


class Registry:
    """One shard's view of the tables. Thread-safe; creation is shard 0's.

    One class: its methods read or change one registry, which is written whole, under one lock.
    """

    def __init__(self, store: Store, shard: int, timeout_s: float, data: DataDir) -> None:
        self._store, self._shard, self._timeout_s = store, shard, timeout_s
        self._copies = RegistryCopies(store, shard, timeout_s, data)
        self._lock = threading.Lock()

    @property
    def tables(self) -> list[TableDef]:
        """Every known table, by name."""
        return [table for _, table in sorted(self._copies.now.tables.items())]

    @property
    def dropping(self) -> list[TableDef]:
        """The tables that are being dropped: shards may have rows of them."""
        return [one.definition for one in self._copies.now.dropped.values() if not one.gone]

    @property
    def gone(self) -> list[TableDef]:
        """The tables that were dropped."""
        return [one.definition for one in self._copies.now.dropped.values() if one.gone]

    @property
    def altering(self) -> Mapping[str, TableDef]:
        """By the key of each table that is being altered: the one that is to take its place."""
        return self._copies.altering

    @property
    def unfinished(self) -> str:
        """Describe the drops and alterations that have not ended, and what ends them; or ""."""
        said = {
            "": "table {0!r} is being dropped; drop_table({0!r}) goes on where that was broken off",
            STAGED: "table {0!r} is being altered, and its pushes wait; `kvemb alter {0}` begins again where that was broken off, with "
            "--abort it is given up",
            REPLACED: "table {0!r} was altered, and rows of its other definition are left; `kvemb alter {0} --abort` erases them",
        }
        left = [one for one in self._copies.now.dropped.values() if not one.gone]
        return "; ".join(said[one.altered].format(one.definition.name) for one in left)

    @property
    def known_keys(self) -> set[str]:
        """The keys of all tables that there are, and were."""
        return {*self._copies.now.dropped, *(table.key for table in self.tables)}

    def is_told(self, key: str) -> bool:
        """Whether the feed tells of a table: not of one that is filled to take another's place, nor of one whose place was taken."""
        one = self._copies.now.dropped.get(key)
        return one is None or not one.altered

    def require_open(self, key: str, *, waits: bool) -> None:
        """Refuse rows of a table that was dropped or altered; `waits` says whether those of one that is being altered are, too."""
        one = self._copies.now.dropped.get(key)
        if one is not None and one.altered != STAGED:
            raise self._was_altered(one.definition.name) if one.altered else self._unknown(one.definition.name)
        if waits and (staged := self._copies.altering.get(key)) is not None:
            name = staged.name
            raise ShardUnavailableError(
                f"table {name!r} is being altered, and takes nothing until that is over; pushes are sent again by themselves. `kvemb "
                "status` says how to end an alteration that was broken off"
            )

    @property
    def serial(self) -> int:
        """Counts the changes of tables and policies; of those that this shard knows."""
        return self._copies.now.serial

    def policies(self, key: str, serial: int = 0) -> Policies:
        """Return the policies of a table, by its key, that hold for pushes made by this serial of the registry; 0: the newest."""
        changes = self._copies.now.policies.get(key)
        return NO_POLICIES if changes is None else as_of(changes, serial)

    def reach(self, serial: int) -> None:
        """Know the tables and policies as of a serial, which a trainer names: read the copies where they are newer."""
        if serial > self._copies.now.serial:
            self.load()
            if serial > self._copies.now.serial:
                raise ShardUnavailableError(
                    f"shard {self._shard} has read the registry of tables as of serial {self.serial}, a trainer names serial {serial}; it "
                    "is read again when the part comes again"
                )

    @property
    def encoded(self) -> bytes:
        """The registry as nodes hold it."""
        return encoded(self._copies.now)

    @property
    def put_back(self) -> Change:
        """Lets a node's copy be the registry that this shard knows, unless that is a newer one."""
        return put_back(self._copies.now)

    def load(self) -> None:
        """Read the registry; shard 0 also completes a write that was broken off."""
        with self._lock:
            self._copies.read()

    def reloaded(self) -> list[TableDef]:
        """Return every table, by name, as of now."""
        self.load()
        return self.tables

    def find(self, name: str, schema: int | None = None) -> TableDef:
        """Return a table; when the name, or the schema under that name, is unknown the registry is read again, once."""
        table = self._copies.now.tables.get(name)
        return table if table is not None and schema in (None, table.schema) else self._find_newer(name, schema)

    def _find_newer(self, name: str, schema: int | None) -> TableDef:
        """Return a table whose name or schema is unknown: it may be one that is to take another's place, or known since."""
        for again in (False, True):
            if again and self._shard != 0:  # shard 0's own view is the newest there is
                self.load()
            table = self._copies.now.tables.get(name)
            staged = None if table is None else self.altering.get(table.key)
            for found in (table, staged):
                if found is not None and schema in (None, found.schema):
                    return found
        if table is None:
            raise self._unknown(name)
        was = next((one for one in self._of(name, REPLACED) if one.schema == schema), None)
        if was is not None and not any(one.life > was.life for one in self._of(name, "")):  # else its successor was dropped
            raise self._was_altered(name)
        return table

    def _of(self, name: str, altered: str) -> list[TableDef]:
        return [one.definition for one in self._copies.now.dropped.values() if one.altered == altered and one.definition.name == name]

    def _was_altered(self, name: str) -> TableAlteredError:
        return TableAlteredError(f"table {name!r} was altered: it has another definition now. {AFTER_A_DROP}.")

    def find_key(self, key: str, schema: int | None = None) -> TableDef:
        """Return the table of a key, also one that was dropped: journals and saved states still name it."""
        found = self._by_key(key)
        if found is None and self._shard != 0:
            self.load()
            found = self._by_key(key)
        if found is None:
            raise self._unknown(key)
        return found

    def find_last(self, name: str) -> TableDef:
        """Return the table of this name, or else the last that had it: a load decided before the drop asks for it."""
        named = [one.definition for one in self._copies.now.dropped.values() if one.definition.name == name]
        return max(named, key=lambda table: table.life) if named and name not in self._copies.now.tables else self.find(name)

    def _by_key(self, key: str) -> TableDef | None:
        dropped, table = self._copies.now.dropped.get(key), self._copies.now.tables.get(key.partition("\n")[0])
        return dropped.definition if dropped is not None else table if table is not None and table.key == key else None

    def _unknown(self, name: str) -> UnknownTableError:
        named = [one for one in self._copies.now.dropped.values() if one.definition.name == name]
        if any(not one.gone for one in named):
            return TableDroppedError(
                f"table {name!r} is being dropped. Call drop_table({name!r}) again if that was broken off; it goes on. {AFTER_A_DROP}."
            )
        known = ", ".join(sorted(self._copies.now.tables)) or "none"
        if named:
            return TableDroppedError(f"table {name!r} was dropped; existing: {known}. {AFTER_A_DROP}.")
        return UnknownTableError(
            f"no table {name!r} in this cluster; existing: {known}{'' if self._copies.now.tables else ' yet'}. "
            f"Create it with create_table{did_you_mean(name, self._copies.now.tables) or '.'}"
        )

    def create(self, table: TableDef, *, exist_ok: bool, policies: Policies = NO_POLICIES) -> TableDef:
        """Register a table and write the registry to every node; return the definition as registered.

        Policies are those of a new table; one that exists keeps its own.
        """
        if self._shard != 0:
            raise ParameterServerError(f"tables are created by shard 0, this is shard {self._shard}")
        with self._lock:
            self._copies.catch_up()
            existing = self._copies.now.tables.get(table.name)
            if existing is not None:
                existing.require_same(table.opened_as(existing))
                if not exist_ok:
                    raise InvalidInputError(f"table {table.name!r} exists already; give exist_ok=True to open it")
                return existing
            if any(one.name == table.name for one in self.dropping):
                raise self._unknown(table.name)
            self._check_new(table)
            _refuse_pointless(table, policies)
            require_limits(self._store, table, self._timeout_s)
            table = self._next_life(table)
            table = table.with_tag_attempt(self._free_tag(table))
            new = self._copies.now._replace(serial=self.serial + 1, tables={**self._copies.now.tables, table.name: table})
            if policies != NO_POLICIES:
                new = new._replace(policies={**new.policies, table.key: ((new.serial, policies),)})
            self._check_size(table.name, new)
            self._copies.write(new)
        log.info("table %s created: dim %d, %s, %s", table.name, table.dim, table.dtype, table.optimizer.kind)
        return table

    def set_policies(self, name: str, given: object) -> TableDef:
        """Change policies of a table, of those given as plain values, and write the registry to every node; return the definition."""
        if self._shard != 0:
            raise ParameterServerError(f"policies are set by shard 0, this is shard {self._shard}")
        with self._lock:
            self._copies.catch_up()
            table = self._copies.now.tables.get(name)
            if table is None:
                raise self._unknown(name)
            changes: Changes = self._copies.now.policies.get(table.key, ((0, NO_POLICIES),))
            policies = changes[-1][1].updated(given)
            if policies == changes[-1][1]:
                return table
            _refuse_pointless(table, policies)
            serial = self.serial + 1
            kept = (*changes, (serial, policies))[-KEPT_CHANGES:]
            new = self._copies.now._replace(serial=serial, policies={**self._copies.now.policies, table.key: kept})
            self._check_size(name, new)
            self._copies.write(new)
        log.info("table %s: admission %s, eviction %s", name, policies.admission, policies.eviction)
        return table

    def begin_drop(self, name: str) -> TableDef:
        """Begin to drop a table: from now on it has no name. Called again, it goes on with the drop.

        Raises:
            StorageError: the drop may have begun; call it again.
        """
        with self._lock:
            self._copies.catch_up()
            table = self._copies.now.tables.get(name)
            if table is None:
                begun = next((one for one in self.dropping if one.name == name), None)
                if begun is None:
                    raise self._unknown(name)
                return begun
            if table.key in self.altering:
                raise InvalidInputError(
                    f"table {name!r} is being altered; nothing was changed. `kvemb alter {name} --abort` gives that up."
                )
            dropped = {**self._copies.now.dropped, table.key: Dropped(table, False)}
            tables = {key: one for key, one in self._copies.now.tables.items() if key != name}
            policies = {key: one for key, one in self._copies.now.policies.items() if key != table.key}
            new = Registered(self._copies.now.serial + 1, tables, dropped, policies)
            self._require_room_for_dropped(new, name)
            self._copies.write(new)
        log.info("table %s is being dropped", name)
        return table

    def begin_alter(self, old: str, wanted: TableDef) -> TableDef:
        """Register a table that is to take the place of the one of its name; return it. Pushes to the other one wait from now on.

        Called again, it begins anew with another such table: nothing that is still on its way to the earlier one can reach this one.

        Raises:
            StorageError: it may have begun; call it again, or `abort_alter`.
        """
        with self._lock:
            self._copies.catch_up()
            now = self._given_up(wanted.name)
            table = now.tables[wanted.name]
            if table.key != old:
                raise TableMismatchError(f"table {wanted.name!r} has another definition than a moment ago; nothing was changed. Ask again.")
            self._check_new(wanted)
            _refuse_pointless(wanted, self.policies(old))
            require_limits(self._store, wanted, self._timeout_s)
            staged = self._next_life(wanted)
            staged = staged.with_tag_attempt(self._free_tag(staged))
            new = now._replace(serial=self.serial + 1, dropped={**now.dropped, staged.key: Dropped(staged, False, STAGED)})
            self._require_room_for_dropped(new, wanted.name)
            self._copies.write(new)
        log.info("table %s is being altered: dim %d, %s, %s", wanted.name, staged.dim, staged.dtype, staged.optimizer.kind)
        return staged

    def switch(self, key: str) -> None:
        """Give a table that was filled the name, and the policies, of the one whose place it takes. Called again, it changes nothing.

        Raises:
            StorageError: it may have switched; call it again.
        """
        with self._lock:
            self._copies.catch_up()
            now = self._copies.now
            staged = next((one for one in self.altering.values() if one.key == key), None)
            if staged is None:
                if self._by_key(key) not in now.tables.values():
                    raise TableAlteredError("this alteration was given up, or begun again by another command; the table is as it was")
                return
            old = now.tables[staged.name]
            _refuse_pointless(staged, self.policies(old.key))
            dropped = {one: what for one, what in now.dropped.items() if one != key} | {old.key: Dropped(old, False, REPLACED)}
            policies = {staged.key if one == old.key else one: changes for one, changes in now.policies.items()}
            self._copies.write(Registered(now.serial + 1, {**now.tables, staged.name: staged}, dropped, policies), ends=True)
        log.info("table %s was altered", staged.name)

    def abort_alter(self, name: str, key: str = "") -> None:
        """Give up the alteration of a table, if there is one, or only that which fills the table of this key: pushes go on.

        Raises:
            StorageError: it may be given up; call it again.
        """
        with self._lock:
            self._copies.catch_up()
            new = self._given_up(name)
            if new is not self._copies.now and (not key or key in {one.key for one in self.altering.values()}):
                self._copies.write(new._replace(serial=self.serial + 1), ends=True)
                log.info("the alteration of table %s was given up", name)

    def left_by_alter(self, name: str) -> list[TableDef]:
        """The tables of a name whose place was taken, or which were to take a place, and of which shards may have rows."""
        return [table for table in self.dropping if table in self._of(name, REPLACED)]

    def _given_up(self, name: str) -> Registered:
        """The registry without an alteration of a table; the same one where there is none."""
        now = self._copies.now
        if name not in now.tables:
            raise self._unknown(name)
        staged = self.altering.get(now.tables[name].key)
        return now if staged is None else now._replace(dropped={**now.dropped, staged.key: Dropped(staged, False, REPLACED)})

    def _require_room_for_dropped(self, new: Registered, name: str) -> None:
        if len(new.dropped) > MAX_DROPPED or len(encoded(new)) > MAX_REGISTRY_BYTES:
            raise InvalidInputError(
                f"table {name!r}: {len(new.dropped) - 1} tables were dropped from this cluster, or altered, whose definitions are kept in "
                "storage, and there is no room for more. Use table.erase for its rows; the table stays, empty."
            )

    def deletes_whole(self, table: TableDef) -> bool:
        """Whether `end_drop` deletes a table's rows in storage, all at once."""
        return table.goes_whole(pages=self._store.capabilities.pages)

    def end_drop(self, key: str) -> None:
        """Free the name of a table of which no shard has rows any more. Called again, it changes nothing.

        Raises:
            StorageError: the name may be free; call it again.
        """
        with self._lock:
            self._copies.catch_up()
            one = self._copies.now.dropped.get(key)
            if one is None or one.gone:
                return
            for keys in one.definition.leftovers(pages=self._store.capabilities.pages):
                _erase_whole(self._store, keys, self._timeout_s)
            dropped = {**self._copies.now.dropped, key: one._replace(gone=True)}
            self._copies.write(self._copies.now._replace(serial=self._copies.now.serial + 1, dropped=dropped), ends=True)
        log.info("table %s was dropped", one.definition.name)

    def _next_life(self, table: TableDef) -> TableDef:
        """The definition with a life that no table of this name has had: no value written for one of those is taken for its own."""
        now = self._copies.now
        others = [*now.tables.values(), *(one.definition for one in now.dropped.values())]  # the living one, where it is being altered
        earlier = sorted((one for one in others if one.name == table.name), key=lambda one: one.life)
        schemas = {one.schema for one in earlier[-_OTHER_SCHEMAS:]}
        table = replace(table, life=earlier[-1].life + 1 if earlier else 0)
        while table.schema in schemas:
            table = replace(table, life=table.life + 1)
        return table

    def _free_tag(self, table: TableDef) -> int:
        taken = {other.tag for other in [*self.tables, *self.dropping, *self.gone]}
        return next(attempt for attempt in range(1 << 16) if table.with_tag_attempt(attempt).tag not in taken)

    def _check_new(self, table: TableDef) -> None:
        require_records_fit(self._store, self._store.nodes.addresses, [table], self._timeout_s)
        if len(self._copies.now.tables) >= MAX_TABLES:
            raise InvalidInputError(f"table {table.name!r}: a cluster has at most {MAX_TABLES} tables")

    def _check_size(self, name: str, new: Registered) -> None:
        size = len(encoded(new))
        if size > MAX_REGISTRY_BYTES:
            raise InvalidInputError(
                f"table {name!r}: the definitions of {len(new.tables)} tables take {size} bytes, at most {MAX_REGISTRY_BYTES} are "
                "kept in storage; put several embeddings into one table, or give shorter names"
            )


def _refuse_pointless(table: TableDef, policies: Policies) -> None:
    """Refuse policies that could do nothing for a table of this kind."""
    at = f"table {table.name!r}"
    if table.num_ids is not None and policies.eviction != NO_POLICIES.eviction:
        raise InvalidInputError(
            f"{at}: eviction {policies.eviction}, but a table with num_ids has a place for each of its ids, and gives memory back only "
            "where all rows of a page are gone. Create it without num_ids to have rows evicted."
        )
    if table.optimizer.kind == FROZEN.kind and policies.admission != NO_POLICIES.admission:
        raise InvalidInputError(f"{at}: admission {policies.admission}, but a frozen table takes no gradients, which it would be asked of")
    if opaque_bytes(table.dtype) is not None and any(one.kind == "l2_below" for one in policies.eviction.parts):
        raise InvalidInputError(f"{at}: eviction {policies.eviction}, but rows of {table.dtype} are no numbers and have no norm")


def _erase_whole(store: Store, keys: RowKeys, timeout_s: float) -> None:
    """Delete buckets or pages, also where a move brings them, or has taken them from."""
    none, deadline = np.empty((0, 0), np.uint8), Deadline.after(timeout_s)

    def once() -> None:
        if (other := store.rows.moving) is not None and (moving := other.has(keys)).any():
            other.erase([WritePart(keys[np.flatnonzero(moving)], none)], deadline)
        store.rows.erase([WritePart(keys, none)], deadline)

    retry_read(once, deadline, away=Absence(), waits_for=(NodeLostError, NodeSuspectError))  # a node that was just repaired, too
