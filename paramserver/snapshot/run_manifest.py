"""The manifest of a snapshot, as bytes: the runs that make it up. Small, checksummed, replaced as a whole. Pure.

    magic 8 | format version u32 | size u32 | msgpack | xxh3-64 of all before
    msgpack: {cut, tables: {key: [schema, record bytes, [[run number, size in bytes], ...]]}}

If anything is wrong with it, nothing of it is used.
"""

import struct
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import xxhash

from kvemb.errors import JournalDamagedError, other_format
from kvemb.schema.table_def import TableDef

MAGIC = b"kvembsnp"
FORMAT_VERSION = 1
_HEAD = struct.Struct("<8sII")
_MAX_ITEMS = 1 << 16
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class RunEntry:
    """One run: its number, which gives its file's name, and its size."""

    number: int
    size_bytes: int


@dataclass(frozen=True)
class TableRuns:
    """The runs of one table, oldest first, with schema and record size of the definition that they belong to."""

    schema: int
    record_bytes: int
    runs: tuple[RunEntry, ...] = ()


@dataclass(frozen=True)
class SnapshotManifest:
    """Which runs make a local snapshot.

    Args:
        cut: version up to which the runs hold every change of every table; they may hold later ones. 0: nothing.
        tables: by key.
    """

    cut: int = 0
    tables: dict[str, TableRuns] = field(default_factory=dict)

    @property
    def next_number(self) -> int:
        """A run number that is not taken."""
        return 1 + max((run.number for table in self.tables.values() for run in table.runs), default=0)

    def of(self, definition: TableDef) -> TableRuns:
        """Return a table's runs; none when it has no snapshot yet.

        Raises:
            JournalDamagedError: there are some, of another definition.
        """
        expected = TableRuns(definition.schema, definition.record.size_bytes)
        found = self.tables.get(definition.key, expected)
        if (found.schema, found.record_bytes) != (expected.schema, expected.record_bytes):
            raise JournalDamagedError(
                f"table {definition.name!r}: the local snapshot is of another definition (schema {found.schema}, records of "
                f"{found.record_bytes} bytes; expected {expected.schema} and {expected.record_bytes}). Is the folder another cluster's?"
            )
        return found

    def with_runs(self, definition: TableDef, runs: tuple[RunEntry, ...]) -> "SnapshotManifest":
        """Return the snapshot with other runs for a table."""
        return replace(self, tables={**self.tables, definition.key: replace(self.of(definition), runs=runs)})


def encode_snapshot_manifest(manifest: SnapshotManifest) -> bytes:
    """Return the file's bytes.

    Example:
        >>> manifest = SnapshotManifest(7, {"t": TableRuns(3, 20, (RunEntry(1, 99),))})
        >>> decode_snapshot_manifest(encode_snapshot_manifest(manifest), "f").tables["t"].runs
        (RunEntry(number=1, size_bytes=99),)
    """
    tables = {
        name: [table.schema, table.record_bytes, [[run.number, run.size_bytes] for run in table.runs]]
        for name, table in manifest.tables.items()
    }
    body: bytes = msgpack.packb({"cut": manifest.cut, "tables": tables})
    data = _HEAD.pack(MAGIC, FORMAT_VERSION, len(body)) + body
    return data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data))


def decode_snapshot_manifest(data: bytes, where: str) -> SnapshotManifest:
    """Read a manifest.

    Args:
        data: all of the file.
        where: its path, for messages.

    Raises:
        JournalDamagedError: truncated, changed, or of another format; nothing of it was used.
    """
    if len(data) < _HEAD.size + 8 or data[:8] != MAGIC:
        raise _damaged(where, "it is no snapshot's manifest, or cut off")
    _, version, size = _HEAD.unpack_from(data)
    if version != FORMAT_VERSION:
        raise JournalDamagedError(other_format(f"{where}: the snapshot's manifest", version, (FORMAT_VERSION,)))
    if size > _MAX_BYTES or len(data) != _HEAD.size + size + 8:
        raise _damaged(where, f"{len(data)} bytes, expected {_HEAD.size + size + 8}")
    if xxhash.xxh3_64_intdigest(data[:-8]) != struct.unpack("<Q", data[-8:])[0]:
        raise _damaged(where, "its checksum does not match")
    try:
        fields = msgpack.unpackb(data[_HEAD.size : -8], max_array_len=_MAX_ITEMS, max_map_len=_MAX_ITEMS, max_bin_len=0, max_ext_len=0)
        return SnapshotManifest(_count(fields["cut"]), {str(name): _table(*table) for name, table in fields["tables"].items()})
    except Exception as error:  # whatever bad bytes do to msgpack and to the lines above
        raise _damaged(where, f"{type(error).__name__}: {error}") from error


def _table(schema: Any, record_bytes: Any, runs: Any) -> TableRuns:
    return TableRuns(_count(schema), _count(record_bytes), tuple(RunEntry(_count(n), _count(size)) for n, size in runs))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a number, got {value!r}")
    return value


def _damaged(where: str, why: str) -> JournalDamagedError:
    return JournalDamagedError(f"{where}: offset 0: the snapshot's manifest is damaged ({why}). Put a good copy of the file back.")
