"""Writes one shard's share of a checkpoint: rows in, files out, while the next rows are being read.

Encoding and uploading run on a few threads of the writer's own, with at most that many files in memory. Files that an earlier try of the
same save has finished with the same bytes are not sent again.

While the save is under way, shard-<i>.json beside the data (a `Fragment`) notes the files that a shard has finished: it makes a save
resumable. A shard that is done stays done when the save is tried again. Of an unfinished one, files whose bytes have not changed stay.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import ROWS, BaseCheckpoint, CheckpointManifest, Cut, FileEntry, SavedTable, fragment_path
from kvemb.checkpoint.format.manifest_json import MAX_FILES, file_fields, read_cut, read_file, read_hex
from kvemb.checkpoint.format.parquet_blocks import RowBlock, checksum, encode_ids, encode_rows, group_rows, row_bytes
from kvemb.checkpoint.format.strict_json import MAX_DOCUMENT_BYTES, decode, encode
from kvemb.errors import CheckpointError, InvalidInputError
from kvemb.schema.table_def import TableDef

FORMAT = "kvemb-checkpoint-shard-2"


@dataclass(frozen=True)
class Fragment:
    """The part of a save that one shard has finished."""

    save_id: str  # of the save
    cut: Cut  # where the shard was cut
    done: bool  # whether `files` has all files of the shard
    tables: tuple[tuple[TableDef, int], ...]  # definition and optimizer step of every table at the cut
    files: tuple[FileEntry, ...]  # finished files


@dataclass(frozen=True)
class SaveInfo:
    """The fields that all shards of a save share; see `CheckpointManifest`."""

    save_id: str
    cluster: str
    cluster_id: str
    created_s: int
    weights_only: bool
    base: BaseCheckpoint | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    slots: tuple[int, ...] = (0, 0)
    cut_s: int | None = None


def encode_fragment(fragment: Fragment) -> bytes:
    """Return the bytes of a fragment."""
    cut = fragment.cut
    return encode(
        {
            "format": FORMAT,
            "save_id": fragment.save_id,
            "cut": {"shard": cut.shard, "epoch": cut.epoch, "k": cut.k},
            "done": fragment.done,
            "tables": [{"definition": definition.to_dict(), "step": step} for definition, step in fragment.tables],
            "files": [file_fields(file) for file in fragment.files],
        }
    )


def decode_fragment(data: bytes, where: str) -> Fragment:
    """Read a fragment."""
    fields = decode(data, where).only("format", "save_id", "cut", "done", "tables", "files")
    if fields.text("format") != FORMAT:
        raise fields.wrong("format", repr(FORMAT))
    tables = []
    for item in fields.objects("tables", MAX_FILES):
        try:
            tables.append((TableDef.from_dict(item.only("definition", "step").object("definition")), item.integer("step", 0, 1 << 53)))
        except (InvalidInputError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise item.wrong("definition", f"a table definition ({error})") from error
    cut = fields.maybe("cut")
    if cut is None:
        raise fields.wrong("cut", "a cut")
    files = tuple(read_file(item) for item in fields.objects("files", MAX_FILES))
    return Fragment(read_hex(fields, "save_id"), read_cut(cut), fields.flag("done"), tuple(tables), files)


def assemble(info: SaveInfo, fragments: Iterable[Fragment]) -> CheckpointManifest:
    """Put the shards' shares together. A number without a fragment is of a shard that has left: it has no rows."""
    found = {share.cut.shard: share for share in fragments}
    some = min(found.values(), key=lambda share: share.cut.shard)
    gone = tuple((definition, 0) for definition, _ in some.tables)
    shares = [found.get(number, Fragment(info.save_id, Cut(number, 0, 0), True, gone, ())) for number in range(max(found) + 1)]
    for number, share in enumerate(shares):
        missing = number not in found and number in (info.slots[1::2] or range(len(shares)))
        if missing or not share.done or share.save_id != info.save_id:
            raise CheckpointError(f"save {info.save_id}: shard {number} is not done")
    by_name = [{definition.name: (definition, step) for definition, step in share.tables} for share in shares]
    names = sorted({name for tables in by_name for name in tables})
    for number, tables in enumerate(by_name):
        lacking = [name for name in names if name not in tables]
        if lacking:  # a table that was created while the save began
            raise CheckpointError(f"save {info.save_id}: shard {number} did not know table {lacking[0]!r} yet; save again")
        if any(tables[name][0].key != by_name[0][name][0].key for name in names):
            raise CheckpointError(f"save {info.save_id}: a table was dropped and created again while the save began; save again")
    return CheckpointManifest(
        save_id=info.save_id, cluster=info.cluster, cluster_id=info.cluster_id, created_s=info.created_s, weights_only=info.weights_only,
        cuts=tuple(share.cut for share in shares),
        tables=tuple(SavedTable(by_name[0][name][0], tuple(tables[name][1] for tables in by_name)) for name in names),
        files=tuple(sorted((file for share in shares for file in share.files), key=_file_order)),
        base=info.base, extra=dict(info.extra), slots=info.slots, cut_s=info.cut_s,
    )  # fmt: skip


def _file_order(file: FileEntry) -> tuple[str, str, int, int]:
    return file.table, file.role, file.shard, file.part


PART_BYTES = 64 << 20
_FIRST_PARTS = 3  # the first parts are smaller, so that a file is soon on its way while the next rows are read: 1/8, 1/4, 1/2 of a part
_NOTE_S = 1.0
MAX_IDS = 1 << 23
"""Of one file of ids alone."""
_N_THREADS = 2


class ShardWriter:
    """One shard's files of one save. A context manager; its methods are for one thread."""

    def __init__(self, storage: CheckpointStorage, save_id: str, cut: Cut, *, weights_only: bool, part_bytes: int = PART_BYTES) -> None:
        self._storage, self._save_id, self._cut, self._weights_only, self._part_bytes = storage, save_id, cut, weights_only, part_bytes
        self._pool = ThreadPoolExecutor(_N_THREADS, thread_name_prefix="kvemb-save")
        self._running: list[Future[FileEntry]] = []
        self._files: list[FileEntry] = []
        earlier = read_fragment(storage, cut.shard)
        self._earlier = {} if earlier is None or earlier.save_id != save_id else {file.path: file for file in earlier.files}
        self._parts: dict[tuple[str, str], int] = {}
        self._noted = 0.0
        self.n_bytes = 0
        self.n_skipped = 0

    def add_rows(self, definition: TableDef, blocks: Sequence[RowBlock]) -> None:
        """Write a data file of these blocks, in order, also after the blocks added of this table before."""
        self._submit(definition, ROWS, sum(map(len, blocks)), lambda: encode_rows(definition, blocks, self._weights_only))

    def add_ids(self, definition: TableDef, role: str, ids: NDArray[np.uint64]) -> None:
        """Write ids alone, in order: those erased, or all existing ones (then also when there are none)."""
        for at in range(0, max(1, len(ids)), MAX_IDS):
            some = ids[at : at + MAX_IDS]
            self._submit(definition, role, len(some), lambda some=some: encode_ids(definition, some))  # type: ignore[misc]

    def parts_of(self, definition: TableDef) -> "PartBuffer":
        """Return a buffer that cuts a stream of rows of one table into data files."""
        return PartBuffer(self, definition, self._weights_only, self._part_bytes)

    def finish(self, tables: Sequence[tuple[TableDef, int]]) -> Fragment:
        """Wait for everything to be written; return and store the shard's share."""
        self._collect(0)
        return self._note(done=True, tables=tables)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=error is not None)

    def _submit(self, definition: TableDef, role: str, n_rows: int, encode: Callable[[], list[bytes | memoryview]]) -> None:
        key = (definition.name, role)
        part = self._parts[key] = self._parts.get(key, -1) + 1
        self._collect(_N_THREADS - 1)
        self._running.append(self._pool.submit(self._write, definition.name, role, part, n_rows, encode))

    def _write(self, table: str, role: str, part: int, n_rows: int, encode: Callable[[], list[bytes | memoryview]]) -> FileEntry:
        pieces = encode()
        entry = FileEntry(table, self._cut.shard, part, role, n_rows, sum(map(len, pieces)), checksum(*pieces))
        if self._earlier.get(entry.path) == entry and self._storage.size(entry.path) == entry.size_bytes:
            self.n_skipped += 1
        else:
            self._storage.write(entry.path, *pieces)
        return entry

    def _collect(self, limit: int) -> None:
        """Wait until at most so many files are on their way."""
        written = False
        while len(self._running) > limit:
            entry = self._running.pop(0).result()
            self._files.append(entry)
            self.n_bytes += entry.size_bytes
            written = True
        if written and time.monotonic() - self._noted >= _NOTE_S:
            self._note(done=False, tables=())

    def _note(self, *, done: bool, tables: Sequence[tuple[TableDef, int]]) -> Fragment:
        fragment = Fragment(self._save_id, self._cut, done, tuple(tables), tuple(self._files))
        self._storage.write(fragment_path(self._cut.shard), encode_fragment(fragment))
        self._noted = time.monotonic()
        return fragment


class PartBuffer:
    """Gathers blocks of rows of any size into row groups and data files. Add, then `close`."""

    def __init__(self, writer: ShardWriter, definition: TableDef, weights_only: bool, part_bytes: int) -> None:
        self._writer, self._definition = writer, definition
        self._part_rows = max(1, part_bytes // row_bytes(definition, weights_only))
        self._group_rows = min(self._part_rows, group_rows(definition, weights_only))
        self._small: list[RowBlock] = []
        self._groups: list[RowBlock] = []
        self._n_small = self._n_rows = self._n_parts = 0

    def add(self, block: RowBlock) -> None:
        """Take rows; their arrays must not change any more."""
        self._small.append(block)
        self._n_small += len(block)
        if self._n_small >= self._group_rows:
            self._group()
        if self._n_rows >= self._part_rows >> max(0, _FIRST_PARTS - self._n_parts):
            self._send()

    def close(self) -> None:
        """Hand the last rows to the writer."""
        self._group()
        self._send()

    def _group(self) -> None:
        if self._n_small:
            self._groups.append(RowBlock.concatenate(self._small))
            self._n_rows += self._n_small
        self._small, self._n_small = [], 0

    def _send(self) -> None:
        if self._n_rows:
            self._writer.add_rows(self._definition, self._groups)
            self._n_parts += 1
        self._groups, self._n_rows = [], 0


def read_fragment(storage: CheckpointStorage, shard: int) -> Fragment | None:
    """Return the fragment that a shard has noted of a save, or None when there is no usable one."""
    path = fragment_path(shard)
    if storage.size(path) is None:
        return None
    try:
        return decode_fragment(storage.read(path, MAX_DOCUMENT_BYTES), storage.where(path))
    except CheckpointError:  # half written: the files that it named are written again
        return None
