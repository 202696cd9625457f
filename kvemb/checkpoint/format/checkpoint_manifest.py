"""The content of a checkpoint as values: cuts, tables, files and their paths, its base. Pure; their bytes are in `manifest_json`.

Every path in a checkpoint follows from table, shard and part. So a manifest that names any other path is refused, and a path can neither
leave the checkpoint nor hide in it.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError
from kvemb.process.cached_property import cached_property
from kvemb.schema.record import make_version
from kvemb.schema.slots import from_runs
from kvemb.schema.table_def import TableDef

MANIFEST = "manifest.json"
SAVING = "saving.json"
ROWS, ERASED, IDS = "rows", "erased", "ids"
ROLES = (ROWS, ERASED, IDS)
_SUBFOLDERS = {ROWS: "", ERASED: "_erased/", IDS: "_ids/"}  # readers of whole folders (Arrow, Spark) pass over names with _
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
_LONGEST_FOLDER = 198  # bytes: file systems take names of 255, and shorter ones where they encrypt names
_NAME = re.compile(r"[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]{0,254}")


def table_folder(table: str) -> str:
    """Return the folder of a table: its name, with %XX for bytes that mean something else to file systems, URLs or readers of folders.

    No two tables share one. A name that is too long for a file system ends in a digest, after a "%-" that no other folder has.
    """
    escaped = "".join(letter if letter in _PLAIN else f"%{byte:02X}" for byte in table.encode() for letter in (chr(byte),))
    if table[0] in "._" or table.endswith(".json"):
        escaped = escaped if escaped[0] == "%" else f"%{ord(table[0]):02X}{escaped[1:]}"
    if len(escaped) <= _LONGEST_FOLDER:
        return escaped
    return f"{escaped[: _LONGEST_FOLDER - 50]}%-{sha256(table.encode()).hexdigest()[:32]}"


def part_path(table: str, shard: int, part: int, role: str = ROWS) -> str:
    """Return the path of a data file below the checkpoint's URL."""
    return f"{table_folder(table)}/{_SUBFOLDERS[role]}shard-{shard}-part-{part}.parquet"


def fragment_path(shard: int) -> str:
    """Return the path of a shard's finished part while a save is under way."""
    return f"shard-{shard}.json"


def check_name(name: object) -> str:
    """Return the name of a checkpoint among its siblings, or refuse it: one step of a path, without tricks."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInputError(f"checkpoint name {name!r}: use 1 to 255 characters out of A-Z a-z 0-9 . _ = + @ -, no dot in front")
    return name


@dataclass(frozen=True, order=True)
class Cut:
    """Where one shard was cut: every batch up to and including (epoch, k) is in the checkpoint, none after it."""

    shard: int
    epoch: int
    k: int

    @property
    def version(self) -> int:
        """The newest version that a row of this shard can have in the checkpoint."""
        return make_version(self.epoch, self.k)


@dataclass(frozen=True)
class FileEntry:
    """One data file. `rows` counts its rows (or ids), `checksum` is the xxh3-128 of its bytes, in hex."""

    table: str
    shard: int
    part: int
    role: str
    rows: int
    size_bytes: int
    checksum: str

    @property
    def path(self) -> str:
        """The file's path below the checkpoint's URL."""
        return part_path(self.table, self.shard, self.part, self.role)


SortKeys = Callable[[NDArray[np.uint64]], NDArray[np.uint64]]


@dataclass(frozen=True)
class SavedTable:
    """A table as it was: its definition and, per shard, the optimizer's step at the cut."""

    definition: TableDef
    steps: tuple[int, ...]


@dataclass(frozen=True)
class BaseCheckpoint:
    """The checkpoint that an incremental one is built on: its name beside this one, and the save that made it."""

    name: str
    save_id: str


@dataclass(frozen=True)
class CheckpointManifest:
    """The manifest of a whole checkpoint."""

    save_id: str  # 32 hex digits, of the save that made it
    cluster: str  # the saved cluster's name
    cluster_id: str  # 32 hex digits; versions compare within one cluster only
    created_s: int  # seconds since 1970 when the save began
    weights_only: bool  # whether the rows come without the optimizer's state
    cuts: tuple[Cut, ...]  # one per shard, by shard
    tables: tuple[SavedTable, ...]  # by name
    files: tuple[FileEntry, ...]  # data files, sorted by (table, role, shard, part)
    base: BaseCheckpoint | None = None  # of an incremental checkpoint; None: it is full
    extra: dict[str, Any] = field(default_factory=dict)  # the user's own values
    slots: tuple[int, ...] = (0, 0)  # which shard wrote which slot, as runs: of each its first slot and its shard
    # seconds since 1970 when every shard had been cut, rounded up: nothing that was pushed later is in it. None: not known.
    cut_s: int | None = None

    @cached_property
    def slot_shards(self) -> NDArray[np.uint16]:
        """The shard that wrote each slot: uint16 [16384]."""
        return from_runs(np.array(self.slots, dtype="<u2").tobytes(), self.n_shards)

    @property
    def n_shards(self) -> int:
        """Numbers given to shards of the cluster that was saved, those gone included."""
        return len(self.cuts)

    @property
    def n_writers(self) -> int:
        """Shards that had slots."""
        return len(np.unique(self.slot_shards))

    @cached_property
    def n_rows(self) -> int:
        """Rows in its own files (not its base's)."""
        return sum(file.rows for file in self.files if file.role == ROWS)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of its own files."""
        return sum(file.size_bytes for file in self.files)

    def only(self, tables: Collection[str]) -> "CheckpointManifest":
        """Return it as if it held these tables alone."""
        kept = tuple(table for table in self.tables if table.definition.name in tables)
        return replace(self, tables=kept, files=tuple(file for file in self.files if file.table in tables))

    def table(self, name: str) -> SavedTable | None:
        """Return a table, or None."""
        return next((table for table in self.tables if table.definition.name == name), None)

    def files_of(self, table: str, shard: int, role: str = ROWS) -> tuple[FileEntry, ...]:
        """Return the files of one table and shard, by part."""
        return self.streams.get((table, role, shard), ())

    @cached_property
    def streams(self) -> dict[tuple[str, str, int], tuple[FileEntry, ...]]:
        """Files by (table, role, shard), each by part."""
        streams: dict[tuple[str, str, int], list[FileEntry]] = {}
        for file in self.files:
            streams.setdefault((file.table, file.role, file.shard), []).append(file)
        return {key: tuple(sorted(files, key=lambda file: file.part)) for key, files in streams.items()}
