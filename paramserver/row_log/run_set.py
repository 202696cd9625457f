"""The row log of one shard: a folder of runs, of which the saved state names those that count.

New runs are written under their final names, synced, and named in a new state. That replaces the old one by a rename: at every moment one
whole log is in force. Remains of a crash are deleted at the next start. Readers take a `RunView`, which does not change; only the apply
thread publishes and merges.

A process that was shut out may wake up at any line here. It cannot replace the state any more, and its runs carry its epoch in their
numbers: it neither names nor deletes a file of its successor.
"""

import mmap
import os
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items
from kvemb.errors import JournalDamagedError
from kvemb.process import sync_folder
from kvemb.schema.table_def import TableDef

from ..journal import segment_files
from ..journal.segment import ReadAt
from ..shard_process.data_dir import make_folder
from .run_merge import merge_from, merged
from .run_writer import RunWriter, dropped_on_error, full
from .sorted_run import BLOCK_ROWS, ERASED, ROWS, Bytes, Each, Ids, Part, SortedRun
from .state_file import LoggedTable, RunEntry, SavedState, ShardState

_SUFFIX = ".run"
_N_READERS = 8
_SORTED_BYTES = 64 << 20  # of rows that are sorted at a time
_NEVER = (1 << 64) - 1
_EPOCH_SHIFT = 32  # of a run's number: the epoch of the process that wrote it comes before its own count


@dataclass(frozen=True, eq=False)
class FoundRows:
    """The row log's state of n ids.

    Args:
        records: uint8 [n, record bytes]; without meaning where the row does not exist.
        exists: bool [n].
        versions: uint64 [n]: the record's; of an erased row the version as of which it is gone; 0 of an id that no run has.
    """

    records: Bytes
    exists: NDArray[np.bool_]
    versions: Ids


@dataclass(frozen=True, eq=False)
class RunView:
    """The runs that one saved state names. They are read as long as somebody holds the view, whatever is published since. Any thread.

    Args:
        cut: version up to which they hold every change.
        runs: by the table's key, oldest first.
    """

    cut: int
    runs: Mapping[str, tuple[SortedRun, ...]]

    def of(self, definition: TableDef) -> tuple[SortedRun, ...]:
        """Return a table's runs, oldest first."""
        return self.runs.get(definition.key, ())

    def versions(self, definition: TableDef, ids: Ids) -> tuple[Ids, NDArray[np.bool_]]:
        """Return the versions of ids (uint64 [n]; 0: no run has heard of it), and which of them exist (bool [n]); see `find`."""
        rows = self.find(definition, ids, records=False)
        return rows.versions, rows.exists

    def between(self, definition: TableDef, low: int = 0, high: int = 1 << 64) -> Iterator[tuple[Ids, Ids]]:
        """Yield ids and versions of the rows that exist, in the order of their keys, some thousands at a time."""
        for _, keys, versions, _ in merged(self.of(definition), forget_up_to=_NEVER, low=low, high=high, records=False):
            yield definition.order.ids(keys), versions

    def find(self, definition: TableDef, ids: Ids, *, records: bool = True) -> FoundRows:
        """Return the state of ids: the newest among all runs.

        Args:
            ids: uint64 [n], unique, in any order.
        """
        n, record = len(ids), definition.record
        base = FoundRows(np.zeros((n, record.size_bytes if records else 0), np.uint8), np.zeros(n, bool), np.zeros(n, np.uint64))
        keys = definition.order.keys(ids)
        left = np.argsort(keys)  # intp [r]: places of the ids that no newer run has, in the order of their keys
        keys = keys[left]  # uint64 [r]
        for run in reversed(self.of(definition)):
            at, rows, versions = run.find(ROWS, keys)  # [m] each: of those that are here the places in `left`, row numbers, versions
            here = left[at]
            base.versions[here], base.exists[here] = versions, True
            if records and len(at):
                found = run.records(rows)  # uint8 [m, record bytes]
                record.check(found, ids[here], base.exists[here], lambda row: f"{run.where}: id {int(ids[here[row]])}")  # noqa: B023
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


class Runs:
    """The runs of one shard's row log: written here, and named in its saved state. Apply thread only, but for `view`."""

    def __init__(self, folder: Path, saved: SavedState, *, limit: int = 6, epoch: int = 0) -> None:
        self._folder, self._saved, self._limit, self._epoch = folder, saved, limit, epoch
        self._open: dict[int, SortedRun] = {}
        self._readers = ThreadPoolExecutor(_N_READERS, "kvemb-runs")  # while a block is read, another can be
        self._writing: set[int] = set()
        make_folder(folder)
        self._next_number = max([epoch << _EPOCH_SHIFT, *self._named()]) + 1
        self.view = self._viewed()
        self._sweep()

    @property
    def cut(self) -> int:
        """The version up to which the runs hold every change of every table; they may hold later ones. 0: there are none."""
        return self._saved.now.cut

    def versions(self, definition: TableDef, ids: Ids) -> tuple[Ids, NDArray[np.bool_]]:
        """See `RunView.versions`."""
        return self.view.versions(definition, ids)

    def between(self, definition: TableDef, low: int = 0, high: int = 1 << 64) -> Iterator[tuple[Ids, Ids]]:
        """See `RunView.between`."""
        return self.view.between(definition, low, high)

    def begin(self, definition: TableDef) -> RunWriter:
        """Begin a new run, which counts once it is published."""
        number, self._next_number = self._next_number, self._next_number + 1
        self._writing.add(number)
        return RunWriter(_path(self._folder, number), number, definition, self._readers.submit)

    def in_order(self, definition: TableDef, parts: Iterable[Part]) -> list[RunWriter]:
        """Write rows, or erased ids, that come in any order: into as many runs as it takes to sort them in bounded memory.

        Raises:
            JournalFullError: nothing is left of them.
        """
        writers: list[RunWriter] = []
        waiting: list[Part] = []
        with dropped_on_error(writers):
            for part in chain(parts, [None]):
                if part is not None:
                    waiting.append(part)
                if waiting and (part is None or sum(one[1].nbytes * 2 + one[3].nbytes for one in waiting) >= _SORTED_BYTES):
                    writers.append(self.begin(definition))
                    _write_sorted(writers[-1], waiting)
                    waiting = []
        return writers

    def written(self, writers: Sequence[RunWriter]) -> RunView:
        """Return a view of runs of one table that are whole and do not count yet."""
        runs = []
        for writer in writers:
            if (entry := writer.finish()) is not None:
                runs.append(_open_run(_path(self._folder, entry.number), entry, writer.definition, self._readers.map))
        return RunView(0, {writer.definition.key: tuple(runs) for writer in writers})

    def publish(self, writers: Sequence[RunWriter], state: ShardState, *, alone: Collection[str] = ()) -> None:
        """Make new runs part of the log, durably, together with a state of the shard. Either all of it happens or nothing."""
        tables = {
            one.definition.key: replace(one, runs=() if one.definition.key in alone else self._runs_of(one.definition))
            for one in state.tables
        }
        for writer in writers:
            key = writer.definition.key
            if key not in tables:  # dropped since the run was begun
                writer.drop()
            elif (entry := writer.finish()) is not None:
                tables[key] = replace(tables[key], runs=(*tables[key].runs, entry))
        self._replace(replace(state, tables=tuple(tables.values())))

    def merge(self, definition: TableDef) -> Iterator[None]:
        """Merge a table's runs if there are too many; a step at a time, each of one block."""
        entries = self._runs_of(definition)
        first = merge_from([run.size_bytes for run in entries], self._limit)
        if first is None:
            return
        writer, forget = self.begin(definition), 0 if first else self.cut  # the journal has nothing of rows that were gone by then
        forgotten = np.uint64(0)  # the newest note of an erased row that is left out
        with dropped_on_error([writer]):
            for kind, keys, versions, rest in merged(self.view.of(definition)[first:], forget_up_to=0):
                if kind == ERASED and forget:
                    kept = versions > np.uint64(forget)
                    forgotten = max(forgotten, versions[~kept].max(initial=np.uint64(0)))
                    keys, versions, rest = keys[kept], versions[kept], rest[kept]
                if len(keys):
                    writer.add(kind, keys, versions, rest)
                yield
            entry = writer.finish()
        table, behind = self._saved.now.of(definition), self._runs_of(definition)[len(entries) :]
        runs = (*entries[:first], *([entry] if entry else []), *behind)
        self._replace(self._saved.now.with_table(replace(table, runs=runs, erased_since=max(table.erased_since, int(forgotten)))))

    def close(self) -> None:
        """Close the runs; those that somebody still reads are closed when that ends."""
        self._open.clear()
        self.view = RunView(0, {})
        self._readers.shutdown()

    def _runs_of(self, definition: TableDef) -> tuple[RunEntry, ...]:
        return self._saved.now.of(definition).runs

    def _viewed(self) -> RunView:
        state = self._saved.now
        return RunView(state.cut, {table.definition.key: self._opened(table) for table in state.tables if table.runs})

    def _opened(self, table: LoggedTable) -> tuple[SortedRun, ...]:
        for entry in table.runs:
            if entry.number not in self._open:
                self._open[entry.number] = _open_run(_path(self._folder, entry.number), entry, table.definition, self._readers.map)
        return tuple(self._open[entry.number] for entry in table.runs)

    def _replace(self, state: ShardState) -> None:
        try:
            sync_folder(self._folder)  # the runs' names
            self._saved.replace(state)
        except OSError as error:
            raise full(self._folder, error) from error
        self.view = self._viewed()
        self._sweep()

    def _named(self) -> set[int]:
        return {run.number for table in self._saved.now.tables for run in table.runs}

    def _sweep(self) -> None:
        """Delete runs that the state does not name and this process does not write; the next call tries again what cannot be deleted.

        A run of a later epoch is a successor's, and is not touched: this process does not know the successor's state.
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


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:012d}{_SUFFIX}"


def _open_run(path: Path, entry: RunEntry, definition: TableDef, each: Each) -> SortedRun:
    try:
        descriptor = segment_files.open_to_read(path)
    except OSError as error:
        raise _unreadable(path, 0, error) from error
    try:
        size, words = os.fstat(descriptor).st_size, np.empty(0, "<u8")
        if size:
            mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
            mapped.madvise(mmap.MADV_RANDOM)
            words = np.frombuffer(mapped, "<u8", size // 8)
        run = SortedRun(_checked_reader(path, descriptor), words, size, str(path), each, entry.newest)
        if size != entry.size_bytes or run.record_bytes != definition.record.size_bytes:
            raise JournalDamagedError(f"{path}: offset 0: {size} bytes with records of {run.record_bytes}, the state names another run")
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(run, os.close, descriptor)
    return run


def _checked_reader(path: Path, descriptor: int) -> ReadAt:
    read = segment_files.reader(descriptor)

    def read_at(offset: int, size: int) -> bytes:
        try:
            return read(offset, size)
        except OSError as error:
            raise _unreadable(path, offset, error) from error

    return read_at


def _unreadable(path: Path, offset: int, error: OSError) -> JournalDamagedError:
    why = "it is missing" if isinstance(error, FileNotFoundError) else error.strerror
    return JournalDamagedError(f"{path}: offset {offset}: {why}: the run cannot be read. Put it back, or load a checkpoint.")


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
