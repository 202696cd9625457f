"""The saved state of a shard: the manifest of its row log, and all else that it needs to go on. A small file, replaced whole.

    magic 8 | format version u32 | size u32 | msgpack | xxh3-64 of all before

It is the state as of a position in the journal. The rows that existed then are in the runs that it names, and in the journal from the cut
up to that position; so the state has none. A file that no state names does not count. If anything is wrong with it, nothing of it is used.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import xxhash

from kvemb.errors import ParameterServerError, other_format
from kvemb.schema.table_def import TableDef

from ..journal import START, Position
from ..shard_process.data_dir import DataDir

STATE = "state"  # the file
MAGIC = b"kvembsst"
FORMAT_VERSION = 4
HEAD = struct.Struct("<8sII")
_SUM = struct.Struct("<Q")
_MAX_BYTES = 256 << 20
_KEYS = ("cluster_id", "shard", "n_shards", "epoch", "k", "rows_applied", "next_incarnation", "complete")


@dataclass(frozen=True)
class RunEntry:
    """One run of the row log.

    Args:
        number: gives its file's name.
        size_bytes: of the file.
        newest: no version in it is above this one.
    """

    number: int
    size_bytes: int
    newest: int


@dataclass(frozen=True)
class LoggedTable:
    """One table of a shard.

    Args:
        definition: the table.
        step: applies so far.
        n_rows: rows that exist.
        runs: of the row log, oldest first.
        erased_since: runs and journal note every row that was erased by a batch above this version.
    """

    definition: TableDef
    step: int = 0
    n_rows: int = 0
    runs: tuple[RunEntry, ...] = ()
    erased_since: int = 0


@dataclass(frozen=True)
class ShardState:
    """Everything a shard keeps over its end.

    Args:
        cluster_id: 16 bytes.
        shard: its number.
        n_shards: numbers of shards that the cluster map had; only written, never used.
        epoch: of the process that wrote it (0: the shard never served).
        k: of the last batch applied; the next process goes on counting.
        rows_applied: for status.
        next_incarnation: the next one to issue (shard 0).
        tables: each with its runs.
        sessions: (trainer, incarnation, last sequence).
        members: (trainer, incarnation) of a sync job, see `paramserver.ingest.sync_steps.Membership`.
        complete: whether all trainers of that job have been here at once.
        journal: from where the journal is replayed.
        cut: version up to which the runs hold every change of every table; they may hold later ones. 0: there are none.
        loading: (serial, load id, keys of its tables) of a load whose rows are in the row log and not all in storage yet.
        points, since: of `paramserver.model.row_ages.RowAges`.
    """

    cluster_id: bytes
    shard: int
    n_shards: int
    epoch: int = 0
    k: int = 0
    rows_applied: int = 0
    next_incarnation: int = 1
    tables: tuple[LoggedTable, ...] = ()
    sessions: tuple[tuple[str, int, int], ...] = ()
    members: tuple[tuple[str, int], ...] = ()
    complete: bool = False
    journal: Position = START
    cut: int = 0
    loading: tuple[int, str, tuple[str, ...]] | None = None
    points: tuple[tuple[int, int], ...] = ()
    since: tuple[tuple[int, int], ...] = ()

    def of(self, definition: TableDef) -> LoggedTable:
        """Return a table; an empty one where the shard has not had work of it."""
        found = next((one for one in self.tables if one.definition.key == definition.key), LoggedTable(definition))
        if found.definition != definition:
            raise ParameterServerError(
                f"table {definition.name!r}: the saved state knows {found.definition}, the registry {definition}. Is the folder another "
                "cluster's?"
            )
        return found

    def with_table(self, table: LoggedTable) -> "ShardState":
        """Return the state with this table in the place of the one of its key."""
        return replace(self, tables=(*(one for one in self.tables if one.definition.key != table.definition.key), table))


class SavedState:
    """A shard's state as its folder holds it, and the process that may replace it. Apply thread only, once there is one."""

    def __init__(self, data: DataDir, now: ShardState, still_ours: Callable[[], None] = lambda: None) -> None:
        self._data, self.now, self._still_ours = data, now, still_ours

    def replace(self, state: ShardState) -> None:
        """Put another state in its place, durably.

        Raises:
            FencedError: another process owns the shard; nothing changed.
        """
        self._data.write(STATE, [encode_state(state)], self._still_ours)
        self.now = state


def encode_state(state: ShardState) -> bytes:
    """Return the file's bytes."""
    fields = {key: getattr(state, key) for key in (*_KEYS, "cut")}
    fields["tables"] = [
        [one.definition.to_dict(), one.step, one.n_rows, [[run.number, run.size_bytes, run.newest] for run in one.runs], one.erased_since]
        for one in state.tables
    ]
    fields["sessions"], fields["members"], fields["journal"] = list(state.sessions), list(state.members), list(state.journal)
    fields["loading"] = None if state.loading is None else list(state.loading)
    fields["points"], fields["since"] = list(state.points), list(state.since)
    body: bytes = msgpack.packb(fields)
    data = HEAD.pack(MAGIC, FORMAT_VERSION, len(body)) + body
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data))


def read_state(data: DataDir) -> ShardState | None:
    """Return the saved state in a shard's folder, None where there is none; raises as `decode_state`."""
    raw = data.read(STATE)
    return None if raw is None else decode_state(raw, str(data.path / STATE))


def decode_state(data: bytes, where: str) -> ShardState:
    """Read a state file.

    Raises:
        ParameterServerError: truncated, changed, or of another format; nothing of it was used.
    """
    if len(data) < HEAD.size + _SUM.size or data[:8] != MAGIC:
        raise damaged_state(where, "it is no state file, or cut off")
    _, version, size = HEAD.unpack_from(data)
    if version != FORMAT_VERSION:
        raise ParameterServerError(other_format(f"{where}: the shard's saved state", version, (FORMAT_VERSION,)))
    if size > _MAX_BYTES or len(data) != HEAD.size + size + _SUM.size:
        raise damaged_state(where, f"{len(data)} bytes, expected {HEAD.size + size + _SUM.size}")
    if xxhash.xxh3_64_intdigest(data[: -_SUM.size]) != _SUM.unpack(data[-_SUM.size :])[0]:
        raise damaged_state(where, "its checksum does not match")
    try:
        fields = msgpack.unpackb(data[HEAD.size : -_SUM.size])
        loading, (segment, offset) = fields["loading"], fields["journal"] or START
        return ShardState(
            **{key: fields[key] for key in _KEYS},
            sessions=tuple((str(t), _count(i), _count(s)) for t, i, s in fields["sessions"]),
            members=tuple((str(t), _count(i)) for t, i in fields["members"]),
            journal=Position(_count(segment), _count(offset)),
            tables=tuple(_table(*entry) for entry in fields["tables"]),
            cut=_count(fields["cut"]),
            loading=None if loading is None else (_count(loading[0]), str(loading[1]), tuple(map(str, loading[2]))),
            points=_pairs(fields["points"]),
            since=_pairs(fields["since"]),
        )
    except Exception as error:  # whatever bad bytes do to msgpack and to the lines above
        raise damaged_state(where, f"{type(error).__name__}: {error}") from error


def damaged_state(where: str, why: str) -> ParameterServerError:
    """Return the error for a file that is not as it was written."""
    return ParameterServerError(
        f"{where}: the shard's saved state is damaged ({why}). Put a good copy of the file back; without one this shard's rows cannot be "
        "told from lost ones."
    )


def _table(fields: Any, step: Any, n_rows: Any, runs: Any, erased_since: Any) -> LoggedTable:
    entries = tuple(RunEntry(_count(number), _count(size), _count(newest)) for number, size, newest in runs)
    return LoggedTable(TableDef.from_dict(fields), _count(step), _count(n_rows), entries, _count(erased_since))


def _pairs(items: Any) -> tuple[tuple[int, int], ...]:
    return tuple((_count(first), _count(second)) for first, second in items)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a number, got {value!r}")
    return value
