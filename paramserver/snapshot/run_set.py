"""A folder of runs, and the manifest that says which of them count. A file that the manifest does not name does not count.

New runs are written under their final names, synced, and named in a new manifest. That replaces the old one by a rename: at every moment
one whole snapshot is in force. Remains of a crash are deleted at the next start. Not thread-safe: for the apply thread.

A process that was shut out may wake up at any line here. It cannot replace the manifest any more, and its runs carry its epoch in their
numbers: it neither names nor deletes a file of its successor.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from .run_merge import erased_versions, merge_from, merged
from .sorted_run import ERASED, ROWS, Bytes, Ids, SortedRun
from .sorted_run_writer import RunWriter, full

_MANIFEST = "manifest"
_SUFFIX = ".run"
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
        self._open: dict[int, tuple[int, SortedRun]] = {}
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

    def _whereabouts(self, definition: TableDef, ids: Ids) -> Callable[[int], str]:
        return lambda row: f"{self._folder}: table {definition.name!r}, id {int(ids[row])}"

    def find(self, definition: TableDef, ids: Ids) -> SnapshotRows:
        """Return the snapshot's state of ids: the newest among all runs.

        Args:
            definition: the table.
            ids: uint64 [n], ascending and unique.

        Raises:
            JournalDamagedError: a block that was needed does not hold the bytes that were written.
        """
        n, record = len(ids), definition.record
        base = SnapshotRows(np.zeros((n, record.size_bytes), np.uint8), np.zeros(n, bool), np.zeros(n, np.uint64))
        left = np.arange(n)  # intp [r]: places of the ids that no newer run has
        for run in reversed(self._runs(definition, self._manifest.of(definition).runs)):
            for at, rows in run.find(ROWS, ids[left]):  # at: intp [m], places in `left`; rows: uint8 [m, record bytes]
                here = left[at]
                record.check(rows, ids[here], np.ones(len(at), bool), self._whereabouts(definition, ids[here]))
                as_items(base.records)[here], base.versions[here], base.exists[here] = as_items(rows), record.versions(rows), True
            for at, rest in run.find(ERASED, ids[left]):  # rest: uint8 [m, 8]
                versions = erased_versions(rest)
                later = versions > base.versions[left[at]]  # bool [m]: erased after this run's own record of the id
                base.versions[left[at[later]]], base.exists[left[at[later]]] = versions[later], False
            left = left[base.versions[left] == 0]  # an older run cannot be newer
            if len(left) == 0:
                break
        return base

    def ids(self, definition: TableDef) -> Iterator[Ids]:
        """Yield the ids of rows of every run, block by block; an id may come more than once."""
        for run in self._runs(definition, self._manifest.of(definition).runs):
            yield from run.ids(ROWS)

    def begin(self, definition: TableDef) -> RunWriter:
        """Begin a new run, which counts once it is published."""
        number, self._next_number = self._next_number, self._next_number + 1
        self._writing.add(number)
        return RunWriter(_path(self._folder, number), number, definition)

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
        writer = self.begin(definition)
        try:
            forget = 0 if first else self._manifest.cut  # the journal has nothing of rows that were gone by then
            for kind, ids, rest in merged(self._runs(definition, runs[first:]), definition.record.versions, forget_up_to=forget):
                writer.add(kind, ids, rest)
                yield
            entry = writer.finish()
        except BaseException:
            writer.drop()
            raise
        self._replace(self._manifest.with_runs(definition, (*runs[:first], *([entry] if entry else []))))

    def close(self) -> None:
        for descriptor, _ in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _runs(self, definition: TableDef, entries: Sequence[RunEntry]) -> list[SortedRun]:
        """Return open runs, oldest first."""
        for entry in entries:
            if entry.number not in self._open:
                self._open[entry.number] = _open_run(_path(self._folder, entry.number), entry, definition)
        return [self._open[entry.number][1] for entry in entries]

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
            os.close(self._open.pop(number)[0])
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


def _open_run(path: Path, entry: RunEntry, definition: TableDef) -> tuple[int, SortedRun]:
    try:
        descriptor = segment_files.open_to_read(path)
    except OSError as error:
        raise JournalDamagedError(f"{path}: {error.strerror}: this run of the local snapshot cannot be read") from error
    try:
        size = os.fstat(descriptor).st_size
        run = SortedRun(segment_files.reader(descriptor), size, str(path))
        if (size, run.record_bytes) != (entry.size_bytes, definition.record.size_bytes):
            raise JournalDamagedError(f"{path}: offset 0: {size} bytes with records of {run.record_bytes}, the manifest names another run")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, run
