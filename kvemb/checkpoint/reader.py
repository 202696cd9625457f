"""Reads one checkpoint: its manifest, and its data files one behind the other while the next one is being fetched."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import CheckpointManifest, FileEntry
from kvemb.checkpoint.format.file_names import MANIFEST
from kvemb.checkpoint.format.manifest_json import decode_manifest
from kvemb.checkpoint.format.parquet_blocks import decode_ids, decode_rows
from kvemb.checkpoint.format.row_block import RowBlock
from kvemb.checkpoint.format.strict_json import MAX_DOCUMENT_BYTES
from kvemb.errors import CheckpointError
from kvemb.schema.table_def import TableDef


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A complete checkpoint: its folder and its manifest."""

    storage: CheckpointStorage
    manifest: CheckpointManifest

    def rows(self, definition: TableDef, shard: int) -> Iterator[RowBlock]:
        """Yield the rows that one shard saved of a table, ascending by id.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        last = -1
        for entry, data, where in self._contents(self.manifest.files_of(definition.name, shard)):
            for block in decode_rows(definition, data, entry, self.manifest.weights_only, where):
                last = _check_order(block.ids, last, where)
                yield block

    def ids(self, definition: TableDef, shard: int, role: str) -> Iterator[NDArray[np.uint64]]:
        """Yield the ids of one shard's files of this role, ascending; raises as `rows`."""
        last = -1
        for entry, data, where in self._contents(self.manifest.files_of(definition.name, shard, role)):
            for ids in decode_ids(definition, data, entry, where):
                last = _check_order(ids, last, where)
                yield ids

    def _contents(self, entries: Sequence[FileEntry]) -> Iterator[tuple[FileEntry, bytes, str]]:
        with ThreadPoolExecutor(1, thread_name_prefix="kvemb-read") as pool:
            coming: Future[bytes] | None = None
            for number, entry in enumerate(entries):
                data = self._read(entry) if coming is None else coming.result()
                coming = pool.submit(self._read, entries[number + 1]) if number + 1 < len(entries) else None
                yield entry, data, self.storage.where(entry.path)

    def _read(self, entry: FileEntry) -> bytes:
        return self.storage.read(entry.path, entry.size_bytes)


def open_checkpoint(url: str) -> Checkpoint:
    """Open a complete checkpoint.

    Raises:
        CheckpointError: there is none, its save did not finish, or its manifest is damaged.
    """
    storage = CheckpointStorage(url)
    if storage.size(MANIFEST) is None:
        unfinished = any(name.endswith(".parquet") for name in storage.names())
        why = "a save that did not finish; try it again with resume" if unfinished else "no checkpoint there"
        raise CheckpointError(f"{storage.where(MANIFEST)}: not there: {why}")
    return Checkpoint(storage, decode_manifest(storage.read(MANIFEST, MAX_DOCUMENT_BYTES), storage.where(MANIFEST)))


def _check_order(ids: NDArray[np.uint64], last: int, where: str) -> int:
    if len(ids) and int(ids[0]) <= last:
        raise CheckpointError(f"{where}: its ids are not behind those of the part before")
    return int(ids[-1]) if len(ids) else last
