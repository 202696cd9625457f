"""Writes one shard's share of a checkpoint: rows in, files out, while the next rows are being read.

Encoding and uploading run on a few threads of the writer's own, with at most that many files in memory. What an earlier try of the same
save has finished with the same bytes is not sent again.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import ROWS, Cut, FileEntry, fragment_path
from kvemb.checkpoint.format.parquet_blocks import RowBlock, checksum, encode_ids, encode_rows, group_rows, row_bytes
from kvemb.checkpoint.format.shard_fragment import Fragment, decode_fragment, encode_fragment
from kvemb.checkpoint.format.strict_json import MAX_DOCUMENT_BYTES
from kvemb.errors import CheckpointError
from kvemb.schema.table_def import TableDef

PART_BYTES = 64 << 20
_MAX_IDS = 1 << 23
_N_THREADS = 2


class ShardWriter:
    """One shard's files of one save. A context manager; its methods are for one thread.

    Args:
        storage: the checkpoint's folder.
        save_id: 32 hex digits.
        cut: where the shard was cut.
        weights_only: leave the state out.
        part_bytes: about the size of a data file.
    """

    def __init__(self, storage: CheckpointStorage, save_id: str, cut: Cut, *, weights_only: bool, part_bytes: int = PART_BYTES) -> None:
        self._storage, self._save_id, self._cut, self._weights_only, self._part_bytes = storage, save_id, cut, weights_only, part_bytes
        self._pool = ThreadPoolExecutor(_N_THREADS, thread_name_prefix="kvemb-save")
        self._running: list[Future[FileEntry]] = []
        self._files: list[FileEntry] = []
        earlier = read_fragment(storage, cut.shard)
        self._earlier = {} if earlier is None or earlier.save_id != save_id else {file.path: file for file in earlier.files}
        self._parts: dict[tuple[str, str], int] = {}
        self.n_bytes = 0
        self.n_skipped = 0

    def add_rows(self, definition: TableDef, blocks: Sequence[RowBlock]) -> None:
        """Write a data file of these blocks, which must follow what was added of this table before, ascending by id."""
        self._submit(definition, ROWS, sum(map(len, blocks)), lambda: encode_rows(definition, blocks, self._weights_only))

    def add_ids(self, definition: TableDef, role: str, ids: NDArray[np.uint64]) -> None:
        """Write ids alone, ascending: those erased, or all there are (then also when there are none)."""
        for at in range(0, max(1, len(ids)), _MAX_IDS):
            some = ids[at : at + _MAX_IDS]
            self._submit(definition, role, len(some), lambda some=some: encode_ids(definition, some))  # type: ignore[misc]

    def parts_of(self, definition: TableDef) -> "PartBuffer":
        """Return a buffer that cuts a stream of rows of one table into data files."""
        return PartBuffer(self, definition, self._weights_only, self._part_bytes)

    def finish(self, tables: Sequence[tuple[TableDef, int]]) -> Fragment:
        """Wait for everything to be written; return and store the shard's share.

        Args:
            tables: definition and step of every table at the cut.

        Raises:
            CheckpointError: a file could not be written.
        """
        self._collect(0)
        return self._note(done=True, tables=tables)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=error is not None)

    def _submit(self, definition: TableDef, role: str, n_rows: int, encode: Callable[[], memoryview]) -> None:
        key = (definition.name, role)
        part = self._parts[key] = self._parts.get(key, -1) + 1
        self._collect(_N_THREADS - 1)
        self._running.append(self._pool.submit(self._write, definition.name, role, part, n_rows, encode))

    def _write(self, table: str, role: str, part: int, n_rows: int, encode: Callable[[], memoryview]) -> FileEntry:
        data = encode()
        entry = FileEntry(table, self._cut.shard, part, role, n_rows, len(data), checksum(data))
        if self._earlier.get(entry.path) == entry and self._storage.size(entry.path) == entry.size_bytes:
            self.n_skipped += 1
        else:
            self._storage.write(entry.path, data)
        return entry

    def _collect(self, limit: int) -> None:
        """Wait until at most so many files are on their way."""
        written = False
        while len(self._running) > limit:
            entry = self._running.pop(0).result()
            self._files.append(entry)
            self.n_bytes += entry.size_bytes
            written = True
        if written:
            self._note(done=False, tables=())

    def _note(self, *, done: bool, tables: Sequence[tuple[TableDef, int]]) -> Fragment:
        fragment = Fragment(self._save_id, self._cut, done, tuple(tables), tuple(self._files))
        self._storage.write(fragment_path(self._cut.shard), encode_fragment(fragment))
        return fragment


class PartBuffer:
    """Gathers blocks of rows of any size into row groups and data files. Add, then `close`."""

    def __init__(self, writer: ShardWriter, definition: TableDef, weights_only: bool, part_bytes: int) -> None:
        self._writer, self._definition = writer, definition
        self._part_rows = max(1, part_bytes // row_bytes(definition, weights_only))
        self._group_rows = min(self._part_rows, group_rows(definition, weights_only))
        self._small: list[RowBlock] = []
        self._groups: list[RowBlock] = []
        self._n_small = self._n_rows = 0

    def add(self, block: RowBlock) -> None:
        """Take rows; their arrays must not change any more."""
        self._small.append(block)
        self._n_small += len(block)
        if self._n_small >= self._group_rows:
            self._group()
        if self._n_rows >= self._part_rows:
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
        self._groups, self._n_rows = [], 0


def read_fragment(storage: CheckpointStorage, shard: int) -> Fragment | None:
    """Return what a shard has noted of a save, or None when there is nothing that can be used."""
    path = fragment_path(shard)
    if storage.size(path) is None:
        return None
    try:
        return decode_fragment(storage.read(path, MAX_DOCUMENT_BYTES), storage.where(path))
    except CheckpointError:  # written by half: what it told of is written again
        return None
