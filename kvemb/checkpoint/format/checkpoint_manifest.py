"""What a checkpoint holds, as values: cuts, tables, files, and what it is built on. Pure; their bytes are in manifest_codec."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.cached_property import cached_property
from kvemb.checkpoint.format.file_names import ROWS, part_path
from kvemb.schema.record import make_version
from kvemb.schema.slots import from_runs
from kvemb.schema.table_def import TableDef


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
        """Where it lies below the checkpoint's URL."""
        return part_path(self.table, self.shard, self.part, self.role)


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
    """What a whole checkpoint consists of.

    Args:
        save_id: 32 hex digits, of the save that made it.
        cluster: the saved cluster's name.
        cluster_id: 32 hex digits; versions compare within one cluster only.
        created_s: seconds since 1970 when the save began.
        weights_only: whether the rows come without the optimizer's state.
        cuts: one per shard, by shard.
        tables: by name.
        files: data files, sorted by (table, role, shard, part).
        base: of an incremental checkpoint; None: it is full.
        extra: the user's own values.
        slots: which shard wrote which slot, as runs: of each its first slot and its shard; () where that is not known: of an earlier
            release, whose shards owned ranges of a hash.
    """

    save_id: str
    cluster: str
    cluster_id: str
    created_s: int
    weights_only: bool
    cuts: tuple[Cut, ...]
    tables: tuple[SavedTable, ...]
    files: tuple[FileEntry, ...]
    base: BaseCheckpoint | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    slots: tuple[int, ...] = ()

    @cached_property
    def slot_shards(self) -> NDArray[np.uint16] | None:
        """The shard that wrote each slot: uint16 [16384]; None of an earlier release."""
        return from_runs(np.array(self.slots, dtype="<u2").tobytes(), self.n_shards) if self.slots else None

    @property
    def n_shards(self) -> int:
        """Numbers given to shards of the cluster that was saved, those gone included."""
        return len(self.cuts)

    @property
    def n_writers(self) -> int:
        """Shards that had slots."""
        return self.n_shards if self.slot_shards is None else len(np.unique(self.slot_shards))

    @cached_property
    def n_rows(self) -> int:
        """Rows in its own files (not its base's)."""
        return sum(file.rows for file in self.files if file.role == ROWS)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of its own files."""
        return sum(file.size_bytes for file in self.files)

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
