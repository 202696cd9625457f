"""The check of parts: a part's rows are checked before any of them is accepted, and must be routed by the cluster map in force.

A part that was routed by an older map of the shards is refused as a whole: its slots may have another writer by now. A part routed by a
newer map waits until this shard has seen that map. While slots are handed over to another shard, everything waits. While slots move between
nodes, nothing is refused: rows keep their writer. docs/adr/0062 says why. Pure, apart from the look-up of tables and map; no lock here.
"""

from collections.abc import Callable

import numpy as np

from kvemb.arrays.ids import first_outside
from kvemb.arrays.rounding import to_float32
from kvemb.errors import (
    ClusterLoadedError,
    InvalidInputError,
    PushRejectedError,
    ShardUnavailableError,
    SlotsMovedError,
    TableDroppedError,
    UnknownTableError,
)
from kvemb.protocol.message_format import TableRows, digest_tables
from kvemb.protocol.messages import PushPart
from kvemb.protocol.shard_routing import MapSource
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.move_plan import ABORTING, DRAINING, FLIPPED, HOLDING, SHARDS
from kvemb.schema.table_def import TableDef

from ..model.batch import ERASE, CheckedRows, dims_of
from ..model.table_registry import AFTER_A_DROP, Registry

_FIRST = ClusterMap.first(0, 1)
_AT_THE_BARRIER = (HOLDING, DRAINING, ABORTING)
FindTable = Callable[[str, int], TableDef]
"""(name, schema) -> definition; re-reads the registry once when either is unknown. Raises UnknownTableError."""
Checked = tuple[CheckedRows, ...]


def check_push(
    part: PushPart, registry: Registry, shard: int, maps: MapSource, *, sync: bool, loads: "LoadGate"
) -> tuple[Checked, Checked]:
    """Return the rows of a part that are to be applied, and those that its trainer has prefetched; see `check_part`, `check_prefetched`.

    From here on the shard knows every table and policy that the part's trainer can have known.
    """
    cluster_map, find = maps.cluster_map, registry.find
    if part.load_serial != loads.serial:
        loads.require(part.load_serial)
    registry.reach(part.tables_serial)
    tables = check_part(part, find, shard, cluster_map)
    return tables, check_prefetched(part, find, shard, cluster_map, sync=sync) if part.prefetched else ()


def check_part(part: PushPart, find: FindTable, shard: int, cluster_map: ClusterMap) -> Checked:
    """Check a whole part of a push."""
    if part.sequence < 1 or part.step < 0:
        raise PushRejectedError(f"trainer {part.trainer!r}: sequence {part.sequence}, step {part.step}: sequences count from 1")
    digest = digest_tables(part.tables, part.prefetched)
    if digest != part.digest:
        raise PushRejectedError(f"part {part.sequence}: digest {part.digest:016x} does not match its data ({digest:016x}); send it again")
    names = [rows.table for rows in part.tables]
    if len(set(names)) < len(names):
        raise PushRejectedError(f"part {part.sequence}: a table stands twice in {names}")
    return tuple(check_rows(rows, find, shard, cluster_map) for rows in part.tables)


def check_prefetched(part: PushPart, find: FindTable, shard: int, cluster_map: ClusterMap, *, sync: bool) -> Checked:
    """Check the rows that a part says its trainer has prefetched; the other arguments as in `check_part`."""
    if part.prefetched and not sync:
        raise PushRejectedError(f"part {part.sequence}: it asks about prefetched rows, which only shards of a sync job answer")
    names = [rows.table for rows in part.prefetched]
    if len(set(names)) < len(names):
        raise PushRejectedError(f"part {part.sequence}: a table is prefetched twice in {names}")
    for rows in part.prefetched:
        if len(rows.versions) != len(rows.ids):
            raise PushRejectedError(f"table {rows.table!r}: {len(rows.ids)} rows are prefetched, with {len(rows.versions)} versions")
    return tuple(check_rows(rows, find, shard, cluster_map, ERASE) for rows in part.prefetched)


def find_same(name: str, schema: int, find: FindTable) -> TableDef:
    """Return the table of a name and schema."""
    definition = find(name, schema)
    if definition.schema != schema and definition.life:
        raise TableDroppedError(f"table {name!r}: was dropped, and created again since, as another table. {AFTER_A_DROP}.")
    return definition


def check_rows(rows: TableRows, find: FindTable, shard: int, cluster_map: ClusterMap, kind: str = "") -> CheckedRows:
    """Check the rows of one table: definition, dim, values, ids, run-time values.

    Raises:
        PushRejectedError, TableDroppedError: nothing was accepted.
    """
    at = f"table {rows.table!r}"
    try:
        definition = find_same(rows.table, rows.schema, find)
        if not kind:
            definition.require_trained()
        hyper = definition.optimizer.check_hyper(rows.hyper)
    except TableDroppedError:
        raise
    except (UnknownTableError, InvalidInputError) as error:
        raise PushRejectedError(f"{at}: {error}") from error
    if definition.schema != rows.schema:
        raise PushRejectedError(f"{at}: exists with another definition (schema {definition.schema}, got {rows.schema}); open it again")
    dims = dims_of(kind, definition) if kind else (definition.dim,)
    dim = rows.rows.shape[1] if len(rows.ids) else dims[0]
    if dim not in dims:
        raise PushRejectedError(f"{at}: rows of dim {dim}, expected {' or '.join(map(str, dims))}")
    values = to_float32(rows.rows, rows.dtype).reshape(len(rows.ids), dim)  # exact: a 16-bit dtype saves bytes on the way only
    if dim and values.dtype != definition.row_dtype:
        raise PushRejectedError(f"{at}: rows of {rows.dtype}, its rows are {definition.dtype}; open it again")
    if values.dtype == np.float32:  # any byte is fine
        _check_values(at, definition, rows, values)
    _check_ids(at, definition, rows, shard, cluster_map)
    return CheckedRows(definition, rows.ids, values, rows.versions, hyper)


def _check_values(at: str, definition: TableDef, rows: TableRows, values: np.ndarray) -> None:
    finite = np.isfinite(values)  # bool [n, d]
    if finite.all():
        return
    bad = np.flatnonzero(~finite.all(axis=1))
    first = definition.shown_id(int(rows.ids[bad[0]]))
    raise PushRejectedError(f"{at}: NaN or infinity in {len(bad)} rows, first id {first}; the whole part was refused")


def _check_ids(at: str, definition: TableDef, rows: TableRows, shard: int, cluster_map: ClusterMap) -> None:
    outside = first_outside(rows.ids, definition.num_ids)
    if outside is not None:
        row_id = definition.shown_id(int(rows.ids[outside]))
        raise PushRejectedError(f"{at}: id {row_id} is outside 0 to {definition.num_ids} - 1, the ids of this table; nothing was accepted")
    if cluster_map.n_shards > 1 or shard:
        owners = cluster_map.shards_of(definition.placement.slots(rows.ids))
        if (owners != shard).any():
            wrong = int(np.argmax(owners != shard))
            row_id = definition.shown_id(int(rows.ids[wrong]))
            raise SlotsMovedError(
                f"{at}: id {row_id} belongs to shard {owners[wrong]} by the cluster map of serial {cluster_map.serial}, this is shard "
                f"{shard} of {cluster_map.n_shards}; nothing was accepted"
            )
    if (rows.ids[1:] > rows.ids[:-1]).all():
        return  # ascending, as clients send them, so none occurs twice
    ordered = np.sort(rows.ids)
    twice = ordered[1:] == ordered[:-1]
    if twice.any():
        row_id = definition.shown_id(int(ordered[np.argmax(twice)]))
        raise PushRejectedError(f"{at}: id {row_id} stands twice; sum the gradients of equal ids first")


class MapGate:
    """The cluster map by which one shard takes rows.

    Which rows wait follows from the map alone, so that a restart of the shard in the middle of a hand-over changes nothing.
    """

    def __init__(self, shard: int = 0, cluster_map: Callable[[], ClusterMap] = lambda: _FIRST) -> None:
        self._shard, self._map = shard, cluster_map
        self._known, self._held = _FIRST, False
        self._member = shard in cluster_map().shard_numbers

    @property
    def now(self) -> ClusterMap:
        return self._map()

    def holds(self, serial: int, *, of_step: bool = False) -> bool:
        """Whether rows routed by the shards of this serial are to wait here; in a hand-over those of a sync step wait at the barrier."""
        now = self._map()
        if now is not self._known:
            self._known, self._held = now, hands_over(now, self._shard)
        held = self._held and not (of_step and now.plan is not None and now.plan.phase in _AT_THE_BARRIER)
        return serial > now.shards_serial or (serial == now.shards_serial and held)

    def joins(self) -> None:
        """Take rows from now on: this process has the entries of the slots that come to it. Any thread."""
        self._member = True

    def leaves(self) -> None:
        """Take no rows any more, even if a later map names this shard: another process may have its number by then. Any thread."""
        self._member = False

    def require(self, serial: int) -> None:
        """Refuse rows that were routed by an older map, of other shards."""
        now = self._map().shards_serial
        if not self._member and self._shard in self._map().writing_shards:
            raise ShardUnavailableError(f"shard {self._shard}: another process has its slots; nothing was taken")
        if serial < now:
            raise SlotsMovedError(
                f"shard {self._shard}: rows routed by the cluster map of serial {serial} came in when that of serial {now} was in force; "
                "nothing of them was taken. They are to be sent again by the map in force."
            )


class LoadGate:
    """The last load that one shard has carried out, and by which it takes parts. Any thread."""

    def __init__(self) -> None:
        self._newest: Callable[[], tuple[int, tuple[str, ...]]] = lambda: (0, ())
        self.serial = 0

    def follow(self, newest: Callable[[], tuple[int, tuple[str, ...]]], serial: int) -> None:
        """Go by what tells the newest decision and its tables; this process began with the load of a serial."""
        self._newest, self.serial = newest, serial

    def carried_out(self, serial: int) -> None:
        """Note the load that this process began with."""
        self.serial = serial

    def require(self, serial: int) -> None:
        """Refuse a part whose push was made before the load; one that was made after a later load waits for that.

        Raises:
            ClusterLoadedError, ShardUnavailableError: nothing was taken.
        """
        if 0 <= serial < self.serial:
            raise ClusterLoadedError("a checkpoint was loaded since the push was made; nothing of it was taken here, it is sent again")
        if serial > self.serial and self._newest()[0] > self.serial:
            raise ShardUnavailableError("this shard is still to load a checkpoint: it does when it is started again; pushes wait for that")

    def of(self, table: str) -> int:
        """The serial of the newest load, if it has replaced the rows of a table; else 0."""
        serial, tables = self._newest()
        return serial if not tables or table in tables else 0


def last_step(cluster_map: ClusterMap) -> int | None:
    """Return the last step of a sync job that a shard may hand out; 0: none after its own last one; None: steps go on."""
    plan = cluster_map.plan
    if plan is None or plan.kind != SHARDS or plan.phase not in _AT_THE_BARRIER:
        return None
    return plan.last_step if plan.phase == DRAINING else 0


def hands_over(cluster_map: ClusterMap, shard: int) -> bool:
    """Whether a plan is in a phase in which this shard takes nothing: slots leave it or come to it, and have no writer."""
    plan = cluster_map.plan
    if plan is None or plan.kind != SHARDS or plan.phase not in (DRAINING, FLIPPED, ABORTING):
        return False
    gives, takes = bool(cluster_map.gives(shard).any()), bool(cluster_map.takes(shard).any())
    return gives or (takes and plan.phase == FLIPPED)
