"""A folder of runs, and the manifest that says which of them count. A file that the manifest does not name does not count.

New runs are written under their final names, synced, and named in a new manifest. That replaces the old one by a rename: at every moment
one whole snapshot is in force. Remains of a crash are deleted at the next start. Not thread-safe: for the apply thread.

A process that was shut out may wake up at any line here. It cannot replace the manifest any more, and its runs carry its epoch in their
numbers: it neither names nor deletes a file of its successor.
"""

import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items
from kvemb.errors import JournalDamagedError, ParameterServerError
from kvemb.process import sync_folder
from kvemb.schema.table_def import TableDef

from ..journal import segment_files
from ..shard_process.data_dir import make_folder, replace_privately, sweep
from .run_manifest import RunEntry, SnapshotManifest, decode_snapshot_manifest, encode_snapshot_manifest
from .run_merge import merge_from, merged
from .run_writer import RunWriter, full
from .sorted_run import BLOCK_ROWS, ERASED, ROWS, Bytes, Each, Ids, Part, ReadAt, SortedRun

_MANIFEST = "manifest"
_SUFFIX = ".run"
_N_READERS = 8
_SORTED_BYTES = 64 << 20  # of rows that are sorted at a time
_NEVER = (1 << 64) - 1
_EPOCH_SHIFT = 32  # of a run's number: the epoch of the process that wrote it comes before its own count


@dataclass(frozen=True, eq=False)
class SnapshotRows:
    """The snapshot's state of n ids.

    Args:
        records: uint8 [n, record bytes]; without meaning where the row does not exist.
        exists: bool [n].
        versions: uint64 [n]: the record's; of an erased row the version as of which it is gone; 0 of an id that no run has.
    """

    records: Bytes
    exists: NDArray[np.bool_]
    versions: Ids


class Runs:
    """The local snapshot of one shard: its sorted runs, found by id, and the manifest that names them.

    Args:
        folder: made if it is not there.
        limit: runs of a table above which some are merged.
        epoch: of this process.
        still_ours: raises FencedError once another process owns the folder; asked right before a manifest is replaced.

    Raises:
        JournalDamagedError: the manifest, or a run that it names, does not hold the bytes that were written to it, or is missing.
    """

    def __init__(self, folder: Path, *, limit: int = 6, epoch: int = 0, still_ours: Callable[[], None] = lambda: None) -> None:
        self._folder, self._limit, self._epoch, self._still_ours = folder, limit, epoch, still_ours
        self._open: dict[int, SortedRun] = {}
        self._readers = ThreadPoolExecutor(_N_READERS, "kvemb-runs")  # while a block is read, another can be
        self._writing: set[int] = set()
        path = folder / _MANIFEST
        try:
            make_folder(folder)
            sweep(folder)  # before the manifest is read: from here on no older process can replace it
            self._manifest = decode_snapshot_manifest(path.read_bytes(), str(path)) if path.exists() else SnapshotManifest()
        except OSError as error:
            raise ParameterServerError(f"{path}: the local snapshot cannot be read: {error.strerror}") from error
        self._next_number = max(self._manifest.next_number, (epoch << _EPOCH_SHIFT) + 1)
        self._check_files()
        self._sweep()

    @property
    def cut(self) -> int:
        """The version up to which the runs hold every change of every table; they may hold later ones. 0: there is no snapshot."""
        return self._manifest.cut

    def upgrade(self, definition: TableDef) -> None:
        """Bring a table's runs of format 1 into the present one, once; without this the first use of the table does it.

        Raises:
            JournalFullError, JournalDamagedError, FencedError: the snapshot is the old one.
        """
        entries = self._manifest.of(definition).runs
        runs = self._opened(definition, entries)
        if all(run.format > 1 for run in runs):
            return
        new: list[RunEntry] = []
        writers: list[RunWriter] = []
        try:
            for entry, run in zip(entries, runs, strict=True):
                if run.format > 1:
                    new.append(entry)
                else:
                    writers = self.in_order(definition, merged([run], forget_up_to=0))
                    new += [one for writer in writers if (one := writer.finish()) is not None]
        except BaseException:
            for writer in writers:
                writer.drop()
            raise
        self._replace(self._manifest.with_runs(definition, tuple(new)))

    def find(self, definition: TableDef, ids: Ids) -> SnapshotRows:
        """Return the snapshot's state of ids, with records: the newest among all runs that have records.

        Args:
            definition: the table.
            ids: uint64 [n], unique, in any order.

        Raises:
            JournalDamagedError: a block that was needed does not hold the bytes that were written.
        """
        return self._find(definition, ids, records=True)

    def versions(self, definition: TableDef, ids: Ids) -> tuple[Ids, NDArray[np.bool_]]:
        """Return the versions of ids (uint64 [n]; 0: no run has heard of it), and which of them exist (bool [n]); see `find`."""
        rows = self._find(definition, ids, records=False)
        return rows.versions, rows.exists

    def _find(self, definition: TableDef, ids: Ids, *, records: bool) -> SnapshotRows:
        n, record = len(ids), definition.record
        base = SnapshotRows(np.zeros((n, record.size_bytes if records else 0), np.uint8), np.zeros(n, bool), np.zeros(n, np.uint64))
        keys = definition.order.keys(ids)
        left = np.argsort(keys)  # intp [r]: places of the ids that no newer run has, in the order of their keys
        keys = keys[left]  # uint64 [r]
        for run in reversed(self._runs(definition)):
            if records and not run.record_bytes:
                continue
            at, rows, versions = run.find(ROWS, keys)  # [m] each: of those that are here the places in `left`, row numbers, versions
            here = left[at]
            base.versions[here], base.exists[here] = versions, True
            if records and len(at):
                found = run.records(rows)  # uint8 [m, record bytes]
                record.check(found, ids[here], base.exists[here], self._whereabouts(definition, ids[here]))
                as_items(base.records)[here] = as_items(found)
            at, _, versions = run.find(ERASED, keys)
            later = versions > base.versions[left[at]]  # bool [m]: erased after this run's own record of the id
            here = left[at[later]]
            base.versions[here], base.exists[here] = versions[later], False
            rest = base.versions[left] == 0  # bool [r]; an older run cannot be newer
            left, keys = left[rest], keys[rest]
            if len(left) == 0:
                break
        return base

    def between(self, definition: TableDef, low: int = 0, high: int = 1 << 64) -> Iterator[tuple[Ids, Ids]]:
        """Yield ids and versions of the rows that exist, in the order of their keys, some thousands at a time.

        Runs that are published or merged meanwhile are not seen.

        Args:
            definition: the table.
            low, high: the first key, and the one behind the last (`TableDef.key_ranges`).
        """
        for kind, keys, versions, _ in merged(self._runs(definition), forget_up_to=_NEVER, low=low, records=False):
            assert kind == ROWS
            first, end = (int(np.searchsorted(keys, np.uint64(key))) if key < 1 << 64 else len(keys) for key in (low, high))
            if first < end:
                yield definition.order.ids(keys[first:end]), versions[first:end]
            if end < len(keys):
                return

    def begin(self, definition: TableDef, *, records: bool = True) -> RunWriter:
        """Begin a new run, which counts once it is published; or one of versions alone."""
        number, self._next_number = self._next_number, self._next_number + 1
        self._writing.add(number)
        return RunWriter(_path(self._folder, number), number, definition, definition.record.size_bytes if records else 0)

    def in_order(self, definition: TableDef, parts: Iterable[Part]) -> list[RunWriter]:
        """Write rows, or erased ids, that come in any order: into as many runs as it takes to sort them in bounded memory.

        Args:
            definition: the table.
            parts: as of `RunWriter.add`, but with ids in the place of keys, unique among all parts of a kind.

        Raises:
            JournalFullError: nothing is left of them.
        """
        writers: list[RunWriter] = []
        waiting: list[Part] = []
        try:
            for part in chain(parts, [None]):
                if part is not None:
                    waiting.append(part)
                if waiting and (part is None or sum(one[1].nbytes * 2 + one[3].nbytes for one in waiting) >= _SORTED_BYTES):
                    writers.append(self.begin(definition))
                    _write_sorted(writers[-1], waiting)
                    waiting = []
        except BaseException:
            for writer in writers:
                writer.drop()
            raise
        return writers

    def publish(self, writers: Sequence[RunWriter], cut: int, *, only: bool = False) -> None:
        """Make new runs, one a table at most, part of the snapshot, durably. Either all of it happens or nothing.

        Args:
            writers: begun here; those without rows are dropped.
            cut: see `cut`.
            only: whether the writers' tables are all there are; then the runs of other tables, which were dropped, go.

        Raises:
            JournalFullError, FencedError: the snapshot is the old one.
        """
        keys = {writer.definition.key for writer in writers}
        manifest = SnapshotManifest(cut, {key: runs for key, runs in self._manifest.tables.items() if key in keys or not only})
        for writer in writers:
            entry = writer.finish()
            if entry is not None:
                manifest = manifest.with_runs(writer.definition, (*manifest.of(writer.definition).runs, entry))
        self._replace(manifest)

    def merge(self, definition: TableDef) -> Iterator[None]:
        """Merge a table's runs if there are too many; a step at a time, each of one block.

        Raises:
            JournalFullError, JournalDamagedError, FencedError: the snapshot is the old one.
        """
        runs = self._manifest.of(definition).runs
        first = merge_from([run.size_bytes for run in runs], self._limit)
        if first is None:
            return
        old = self._runs(definition)[first:]
        writer = self.begin(definition, records=any(run.record_bytes for run in old))
        try:
            forget = 0 if first else self._manifest.cut  # the journal has nothing of rows that were gone by then
            for part in merged(old, forget_up_to=forget):
                writer.add(*part)
                yield
            entry = writer.finish()
        except BaseException:
            writer.drop()
            raise
        self._replace(self._manifest.with_runs(definition, (*runs[:first], *([entry] if entry else []))))

    def close(self) -> None:
        """Close the runs; those that somebody still reads are closed when that ends."""
        self._open.clear()
        self._readers.shutdown()

    def _whereabouts(self, definition: TableDef, ids: Ids) -> Callable[[int], str]:
        return lambda row: f"{self._folder}: table {definition.name!r}, id {int(ids[row])}"

    def _runs(self, definition: TableDef) -> list[SortedRun]:
        """Return a table's runs, oldest first."""
        self.upgrade(definition)
        return self._opened(definition, self._manifest.of(definition).runs)

    def _opened(self, definition: TableDef, entries: Sequence[RunEntry]) -> list[SortedRun]:
        for entry in entries:
            if entry.number not in self._open:
                self._open[entry.number] = _open_run(_path(self._folder, entry.number), entry, definition, self._readers.map)
        return [self._open[entry.number] for entry in entries]

    def _replace(self, manifest: SnapshotManifest) -> None:
        path = self._folder / _MANIFEST
        try:
            replace_privately(path, [encode_snapshot_manifest(manifest)], self._still_ours)
        except OSError as error:
            raise full(path, error) from error
        self._manifest = manifest
        try:
            sync_folder(self._folder)
        except OSError as error:  # after a power failure it may be the old one again, so its files stay until a later manifest is durable
            raise full(path, error) from error
        self._sweep()

    def _named(self) -> set[int]:
        return {run.number for table in self._manifest.tables.values() for run in table.runs}

    def _sweep(self) -> None:
        """Delete runs that the manifest does not name and this process does not write; the next call tries again what cannot be deleted.

        A run of a later epoch is a successor's, and is not touched: this process does not know the successor's manifest.
        """
        named = self._named()
        self._writing -= named
        for number in self._open.keys() - named:
            del self._open[number]  # closed when nobody reads it any more
        for path in self._folder.glob(f"*{_SUFFIX}"):
            number = int(path.stem) if path.stem.isdecimal() else 0
            if number not in named | self._writing and number >> _EPOCH_SHIFT <= self._epoch:
                with suppress(OSError):
                    path.unlink()

    def _check_files(self) -> None:
        for number in self._named():
            if not _path(self._folder, number).exists():
                raise JournalDamagedError(f"{_path(self._folder, number)}: this run of the local snapshot is missing. Put it back.")


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:012d}{_SUFFIX}"


def _open_run(path: Path, entry: RunEntry, definition: TableDef, each: Each) -> SortedRun:
    try:
        descriptor = segment_files.open_to_read(path)
    except OSError as error:
        raise JournalDamagedError(f"{path}: {error.strerror}: this run of the local snapshot cannot be read") from error
    try:
        size = os.fstat(descriptor).st_size
        words = np.frombuffer(_mapped(descriptor), "<u8", size // 8) if size else np.empty(0, "<u8")
        run = SortedRun(_checked_reader(path, descriptor), words, size, str(path), each)
        if size != entry.size_bytes or run.record_bytes not in (0, definition.record.size_bytes):
            raise JournalDamagedError(f"{path}: offset 0: {size} bytes with records of {run.record_bytes}, the manifest names another run")
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(run, os.close, descriptor)
    return run


def _mapped(descriptor: int) -> mmap.mmap:
    mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    return mapped


def _checked_reader(path: Path, descriptor: int) -> ReadAt:
    read = segment_files.reader(descriptor)

    def read_at(offset: int, size: int) -> bytes:
        try:
            return read(offset, size)
        except OSError as error:
            raise JournalDamagedError(
                f"{path}: offset {offset}: {error.strerror}: this run of the local snapshot cannot be read"
            ) from error

    return read_at


def _write_sorted(writer: RunWriter, parts: Sequence[Part]) -> None:
    """Write parts with ids in the place of keys, as `Runs.in_order` takes them."""
    for kind in (ROWS, ERASED):
        some = [part[1:] for part in parts if part[0] == kind]
        if some:
            ids, versions, records = (np.concatenate(columns) for columns in zip(*some, strict=True))
            keys = writer.definition.order.keys(ids)
            order = np.argsort(keys)
            for start in range(0, len(order), BLOCK_ROWS):
                at = order[start : start + BLOCK_ROWS]
                writer.add(kind, keys[at], versions[at], records[at])
