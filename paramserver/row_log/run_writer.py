"""Writing one run to its file, in one pass. Nothing of it counts before the saved state names it (`run_set`)."""

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import xxhash

from kvemb.arrays.id_filter import filter_of
from kvemb.errors import JournalFullError
from kvemb.schema.table_def import TableDef

from ..journal import segment_files
from ..shard_process.data_dir import mend
from . import sorted_run
from .sorted_run import COLUMNS, END_MAGIC, ERASED, HEAD, MAGIC, ROWS, TAIL, Bytes, Ids, rows_of_a_block
from .state_file import RunEntry

Later = Callable[[Callable[[int], None], int], "Future[None]"]
_SYNC_BYTES = 8 << 20
NO_RECORDS = np.empty((0, 0), np.uint8)  # of erased ids


class RunWriter:
    """Writes one sorted run, rows in the order of their keys; made by `Runs.begin`."""

    def __init__(self, path: Path, number: int, definition: TableDef, later: Later | None = None) -> None:
        self.definition, record_bytes = definition, definition.record.size_bytes
        self._later, self._syncing, self._synced_bytes = later, _done(), 0
        self._path, self._number = path, number
        self._block_rows, self._fence_rows = rows_of_a_block(record_bytes), sorted_run.FENCE_ROWS
        self._descriptor: int | None = None
        self._finished: RunEntry | None = None
        self._blocks: list[list[int]] = []
        self._fences: list[list[Ids]] = [[], []]
        # Of each kind less than a block: pairs uint64 [n, 2], records uint8 [n, record bytes].
        self._waiting = [(np.empty((0, 2), np.uint64), np.empty((0, width), np.uint8)) for width in (record_bytes, 0)]
        self._last, self._newest, self.n_rows = [-1, -1], 0, 0
        head = HEAD.pack(MAGIC, sorted_run.FORMAT_VERSION, record_bytes, self._block_rows, self._fence_rows)
        self._head = head.ljust(16 * self._fence_rows, b"\0")
        self.size_bytes = 0

    def add_rows(self, ids: Ids, records: Bytes) -> None:
        """Add rows behind those before: ids uint64 [n] in the order of their keys, records uint8 [n, record bytes]. Raises like `add`."""
        self.add(ROWS, self.definition.order.keys(ids), self.definition.record.versions(records), records)

    def add_erased(self, ids: Ids, versions: Ids | int) -> None:
        """Add erased ids, uint64 [n] in any order, with the versions as of which they are gone, or the one of all. Raises like `add`."""
        keys = self.definition.order.keys(ids)
        order = np.argsort(keys)
        self.add(ERASED, keys[order], np.broadcast_to(np.asarray(versions, np.uint64), len(keys))[order], NO_RECORDS)

    def add(self, kind: int, keys: Ids, versions: Ids, records: Bytes) -> None:
        """Add rows, or erased ids, after those of the same kind that were added before."""
        if not len(keys):
            return
        assert int(keys[0]) > self._last[kind]
        assert bool((keys[1:] > keys[:-1]).all())
        if self._descriptor is None:
            self._create()
        self._last[kind], self._newest = int(keys[-1]), max(self._newest, int(versions.max()))
        self.n_rows += len(keys) if kind == ROWS else 0
        pairs, rest = np.stack([keys, versions], axis=1), records if kind == ROWS else np.empty((len(keys), 0), np.uint8)
        if len(self._waiting[kind][0]):
            before, behind = self._waiting[kind]
            pairs, rest = np.concatenate([before, pairs]), np.concatenate([behind, rest])
        n_whole = len(pairs) // self._block_rows * self._block_rows
        for start in range(0, n_whole, self._block_rows):
            self._block(kind, pairs[start : start + self._block_rows], rest[start : start + self._block_rows])
        self._waiting[kind] = pairs[n_whole:].copy(), rest[n_whole:].copy()

    def finish(self) -> RunEntry | None:
        """Make the file durable; None when nothing was added. Called again it does nothing."""
        if self._finished is not None or self._last == [-1, -1]:
            return self._finished
        for kind, (pairs, rest) in enumerate(self._waiting):
            if len(pairs):
                self._block(kind, pairs, rest)
        blocks = np.array(self._blocks, "<u8").reshape(-1, COLUMNS)
        footer = b"".join([blocks.tobytes(), *(some.tobytes() for fences in self._fences for some in fences)])
        place = struct.pack("<QQ", self.size_bytes, len(blocks))
        checksum = xxhash.xxh3_64_intdigest(self._head + footer + place)
        self._write([footer, TAIL.pack(self.size_bytes, len(blocks), checksum, END_MAGIC)])
        self.sync()
        assert self._descriptor is not None
        os.close(self._descriptor)
        self._descriptor, self._finished = None, RunEntry(self._number, self.size_bytes, self._newest)
        return self._finished

    def sync(self) -> None:
        """Make the blocks written so far durable."""
        try:
            self._syncing.result()
            if self._descriptor is not None:
                segment_files.sync(self._descriptor)
        except OSError as error:
            raise full(self._path, error) from error

    def drop(self) -> None:
        """Give the run up. A finished one stays: a state may name it, and if none does, `Runs` deletes it later."""
        if self._descriptor is not None:
            self._syncing.exception()  # its descriptor may be another file's when it is closed
            os.close(self._descriptor)
            self._descriptor = None
            with suppress(OSError):
                self._path.unlink()

    def _block(self, kind: int, pairs: Ids, rest: Bytes) -> None:
        raw, behind = _raw(pairs.astype("<u8", copy=False)), _raw(rest)
        filters = _raw(filter_of(pairs[:, 0], self._fence_rows))
        zeros = bytes(-(len(raw) + len(filters) + len(behind)) % len(self._head))
        rest_sum = xxhash.xxh3_64(behind)
        rest_sum.update(zeros)
        sums = xxhash.xxh3_64_intdigest(raw), rest_sum.intdigest(), xxhash.xxh3_64_intdigest(filters)
        self._blocks.append([kind, self.size_bytes, len(pairs), int(pairs[0, 0]), int(pairs[-1, 0]), *sums])
        self._fences[kind].append(pairs[:: self._fence_rows, 0].astype("<u8"))
        self._write([raw, filters, behind, zeros])

    def _create(self) -> None:
        try:
            self._descriptor = segment_files.create(self._path)
        except OSError as error:
            raise full(self._path, error) from error
        self._write([self._head])

    def _write(self, pieces: list[bytes | memoryview]) -> None:
        assert self._descriptor is not None
        try:
            segment_files.write_all(self._descriptor, pieces, self.size_bytes)
            if self._later is not None and self.size_bytes - self._synced_bytes > _SYNC_BYTES and self._syncing.done():
                self._syncing.result()
                self._syncing, self._synced_bytes = self._later(segment_files.sync, self._descriptor), self.size_bytes
        except OSError as error:
            raise full(self._path, error) from error
        self.size_bytes += sum(len(piece) for piece in pieces)


@contextmanager
def dropped_on_error(writers: Sequence[RunWriter]) -> Iterator[Sequence[RunWriter]]:
    """Drop runs, also those that come to the list meanwhile, when a block does not come to its end."""
    try:
        yield writers
    except BaseException:
        for writer in writers:
            writer.drop()
        raise


def _done() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future


def full(path: Path, error: OSError) -> JournalFullError:
    """Return the error for a file of the row log that could not be written."""
    return JournalFullError(f"{path}: {error.strerror}; the row log is the old one: {mend(error)}.")


def _raw(array: Ids | Bytes) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
