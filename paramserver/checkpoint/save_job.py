"""One save of one shard: the cut, and the thread that streams the rows as they were at the cut while training goes on.

Copy on write: rows are read from storage in the order of their ids. A row that a later batch writes over or erases before its turn is
handed to `CopyOnWriteRecords` first, and taken from there. The engine does that: it has the old record anyway. So the checkpoint is exact:
it holds every batch up to the cut and none after it, and needs no journal to be loaded.

`CopyOnWriteRecords` keeps the old records in a file without a name, and finds them by id. The page cache holds the file while there is
memory, else the disk does. So a long save of a busy table cannot use up the shard's memory: about 23 bytes a row stay there, for its place.
"""

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.row_index import RowIndex
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import ERASED, IDS, Cut
from kvemb.checkpoint.format.parquet_blocks import RowBlock, group_rows
from kvemb.checkpoint.format.strict_json import decode, encode
from kvemb.checkpoint.writer import Fragment, ShardWriter
from kvemb.errors import CheckpointError, LostRowError, StorageError, n_of
from kvemb.net.deadline import Deadline
from kvemb.process.work_ahead import work_ahead
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart
from kvemb.stores.store import Store

from ..engine.storage_pace import PASSING
from ..shard_process.data_dir import replace_privately
from ..shard_process.owned_thread import OwnedThread

Ids = NDArray[np.uint64]
Bytes = NDArray[np.uint8]


class CopyOnWriteRecords:
    """Keeps the records of one table as they were at a save's cut. Thread-safe.

    Args:
        folder: where the file lies.
        record_bytes: of one record.
    """

    def __init__(self, folder: Path, record_bytes: int) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed by `close`)
        self._record_bytes = record_bytes
        self._places = RowIndex()  # id -> 1 + number of its record in the file
        self._n = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._n

    def put(self, ids: Ids, records: Bytes) -> None:
        """Keep n records; an id that has one already keeps that one.

        Args:
            ids: uint64 [n], unique.
            records: uint8 [n, record bytes]; copied.

        Raises:
            OSError: nothing was kept.
        """
        with self._lock:
            new = self._places.get(ids) == 0
            data = np.ascontiguousarray(records[new]).reshape(-1).data
            at = self._n * self._record_bytes
            while len(data):
                written = os.pwrite(self._file.fileno(), data, at)
                data, at = data[written:], at + written
            n_new = int(new.sum())
            self._places.put(ids[new], np.arange(self._n + 1, self._n + 1 + n_new, dtype=np.uint64))
            self._n += n_new

    def find(self, ids: Ids) -> tuple[NDArray[np.bool_], Bytes]:
        """Return which ids have a record (bool [n]) and the records of those, in order (uint8 [found, record bytes])."""
        with self._lock:
            places = self._places.get(ids)
            found = places != 0
            rows = places[found].astype(np.int64) - 1
            if not len(rows):
                return found, np.empty((0, self._record_bytes), np.uint8)
            kept = np.memmap(self._file, np.uint8, "r", shape=(self._n, self._record_bytes))
            return found, np.asarray(kept[rows])

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


_N_READERS = 2  # while one reads from storage, the other makes columns of what it has read
_RETRY_S = 300.0
_PAUSE_S = 0.5
Restore = Callable[[TableDef, Ids], None]
"""Has rows compared with the index and restored. Returns when that is done, or takes longer; raises LostRowError where it cannot be."""
log = logging.getLogger("paramserver")


@dataclass(frozen=True, eq=False)
class TableCut:
    """The rows of one table that existed at the cut of a save, with their versions.

    Args:
        definition, step: of the table.
        ids, versions: uint64 [n], of every row that existed, in any order.
        erased: ids erased since the base's cut, None where that is not known; empty in a full save.
    """

    definition: TableDef
    step: int
    ids: Ids
    versions: Ids
    erased: Ids | None


class SaveFigures:
    """The outcomes of the saves in which a shard had a share; kept in its data folder, so that a restart forgets none. Thread-safe.

    A save is done when its manifest is written, which the shard is told. It has failed when the shard's share has, when the shard stopped
    before it was told, and when another save begins before that. Times are seconds since 1970, 0.0 for none. A figure that cannot be
    written does not fail the save.

    Args:
        folder: the shard's data folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / "saves.json", threading.Lock()
        self.done, self.failed, self.last_done_s, self.created_s = 0, 0, 0.0, time.time()
        self._begun, self._resumable = "", False
        self._read()
        self.end(self._begun, done=False)

    def begin(self, save_id: str, *, resumable: bool) -> None:
        """Note that the shard has a share in a save; `resumable`: with the optimizer's state, so that training can go on from it."""
        with self._lock:
            self.failed += self._begun not in ("", save_id)
            self._begun, self._resumable = save_id, resumable
            self._note()

    def end(self, save_id: str, *, done: bool) -> None:
        """Count the save that was begun; another one was counted before."""
        with self._lock:
            if save_id and save_id == self._begun:
                self.done, self.failed, self._begun = self.done + done, self.failed + (not done), ""
                if done and self._resumable:  # an export does not make the rows safe
                    self.last_done_s = time.time()
            self._note()

    def _read(self) -> None:
        try:
            fields = decode(self._path.read_bytes(), str(self._path))
            fields.integer("format", 1, 1)
            self.done, self.failed = (fields.integer(name, 0, 1 << 53) for name in ("done", "failed"))
            self.last_done_s, self.created_s = (float(fields.integer(name, 0, 1 << 53)) for name in ("last_done_s", "created_s"))
            self._begun, self._resumable = fields.text("begun"), fields.flag("resumable")
        except FileNotFoundError:
            return
        except (OSError, CheckpointError) as error:
            log.warning("the counts of saves begin again: %s", error)

    def _note(self) -> None:
        counts = {"done": self.done, "failed": self.failed, "begun": self._begun, "resumable": self._resumable}
        times = {"last_done_s": int(self.last_done_s), "created_s": int(self.created_s)}
        with suppress(OSError):
            replace_privately(self._path, [encode({"format": 1, **counts, **times})])


@dataclass(frozen=True)
class SaveOrder:
    """One shard's order to save: the URL, the base, with or without state.

    Args:
        save_id: 32 hex digits.
        url: of the checkpoint.
        base_version: this shard's cut in the base; 0: a full checkpoint.
        weights_only: whether the state is omitted.
    """

    save_id: str
    url: str
    base_version: int
    weights_only: bool

    @property
    def incremental(self) -> bool:
        """Whether only rows newer than a base are saved."""
        return self.base_version > 0


class SaveJob:
    """Owns the thread of one save; told to end, it gives the save up.

    Args:
        order: of the client.
        cut: where the shard was cut.
        tables: as of the cut.
        store: open; read from the job's own thread.
        folder: for the records of rows that change meanwhile.
        timeout_s: of one storage call.
        restore: has rows restored that another program deleted or wrote over in storage.
        figures: told when it fails.
    """

    def __init__(
        self,
        order: SaveOrder,
        cut: Cut,
        tables: Sequence[TableCut],
        store: Store,
        folder: Path,
        timeout_s: float,
        restore: Restore,
        figures: SaveFigures,
    ) -> None:
        self._figures = figures
        self.order, self.cut, self.error = order, cut, ""
        self.fragment: Fragment | None = None
        self._tables, self._store, self._timeout_s, self._restore = tables, store, timeout_s, restore
        self._kept = {table.definition.key: CopyOnWriteRecords(folder, table.definition.record.size_bytes) for table in tables}
        self._reached = {table.definition.key: -1 for table in tables}  # the last id that needs no record kept any more
        self._lock = threading.Lock()
        self.n_rows = sum(int((table.versions > np.uint64(order.base_version)).sum()) for table in tables)
        self.rows_done = self.bytes_done = 0
        self.thread = OwnedThread(self._run, name="kvemb-save")

    @property
    def running(self) -> bool:
        """Whether it has not come to an end."""
        return not self.error and self.fragment is None

    def keep(self, definition: TableDef, ids: Ids, versions: Ids, records: NDArray[np.uint8]) -> None:
        """Hear of rows that are about to be written over or erased; apply thread. Never raises: training goes on, the save fails."""
        if not self.running or definition.key not in self._kept:
            return
        with self._lock:
            reached = self._reached[definition.key]
            wanted = (versions <= np.uint64(self.cut.version)) & (versions > np.uint64(self.order.base_version))
            if reached >= 0:
                wanted &= ids > np.uint64(reached)
            if not wanted.any():
                return
            try:
                self._kept[definition.key].put(ids[wanted], records[wanted])
            except (OSError, ValueError) as error:  # ValueError: the file was closed, the job has just ended
                self._fail(f"rows that were written over could not be kept: {error}")

    def _run(self) -> None:
        begun = time.monotonic()
        try:
            storage = CheckpointStorage(self.order.url)
            with ShardWriter(storage, self.order.save_id, self.cut, weights_only=self.order.weights_only) as writer:
                for table in self._tables:
                    self._save_table(table, writer)
                fragment = writer.finish([(table.definition, table.step) for table in self._tables])
                self.bytes_done = writer.n_bytes
            self.fragment = fragment
            took_s, n_kept = time.monotonic() - begun, sum(map(len, self._kept.values()))
            log.info("saved %d rows in %.1f s; %d were written over meanwhile", self.rows_done, took_s, n_kept)
        except Exception as error:
            self._figures.end(self.order.save_id, done=False)
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            for kept in self._kept.values():
                kept.close()

    def _fail(self, text: str) -> None:
        if not self.error:
            self.error = text
            log.error("save %s to %s failed: %s", self.order.save_id, self.order.url, text)

    def _save_table(self, table: TableCut, writer: ShardWriter) -> None:
        definition, base = table.definition, np.uint64(self.order.base_version)
        if self.order.incremental and table.erased is None:
            writer.add_ids(definition, IDS, np.sort(table.ids))
        elif table.erased is not None and len(table.erased):
            writer.add_ids(definition, ERASED, table.erased)
        changed = table.versions > base
        ids, versions = table.ids[changed], table.versions[changed]
        order = np.argsort(ids)
        parts = writer.parts_of(definition)
        step = group_rows(definition, self.order.weights_only)

        def block(some: NDArray[np.intp]) -> RowBlock:
            self._require_wanted()
            records = self._records(definition, ids[some], versions[some])
            return RowBlock.of_records(definition, ids[some], records, self.order.weights_only)

        slices = (order[at : at + step] for at in range(0, len(order), step))
        with closing(work_ahead(block, slices, n_threads=_N_READERS, name="kvemb-save-read")) as blocks:
            for rows in blocks:
                parts.add(rows)
                with self._lock:
                    self._reached[definition.key] = int(rows.ids[-1])
                self.rows_done += len(rows)
                self.bytes_done = writer.n_bytes
                self._require_wanted()
        parts.close()
        with self._lock:
            self._reached[definition.key] = (1 << 64) - 1

    def _require_wanted(self) -> None:
        if self.error or self.thread.told_to_end:
            raise CheckpointError(self.error or "the shard was stopped")

    def _records(self, definition: TableDef, ids: Ids, versions: Ids) -> NDArray[np.uint8]:
        """Return the rows as they were at the cut, waiting for storage nodes that are away, and for the repair of nodes and rows."""
        until = time.monotonic() + _RETRY_S
        while True:
            try:
                records, lost = self._read(definition, ids, versions)
                if not len(lost):
                    return records
                waiting: StorageError = LostRowError(
                    f"table {definition.name!r}: storage lacks {n_of(len(lost), 'row')} as the shard's index has them, the first is id "
                    f"{definition.shown_id(int(lost[0]))}, and they were not restored in time"
                )
                self._restore(definition, lost)
            except PASSING as error:
                waiting = error
            if time.monotonic() > until or self.thread.wait(_PAUSE_S):
                raise waiting

    def _read(self, definition: TableDef, ids: Ids, versions: Ids) -> tuple[NDArray[np.uint8], Ids]:
        """Return the records as of the cut, as far as they are found, and the ids of those that storage should have and has not."""
        record = definition.record
        keys = definition.keys(ids, pages=self._store.capabilities.pages)
        wanted_bytes = record.prefix_bytes if self.order.weights_only else record.size_bytes
        part = ReadPart(keys, record.size_bytes, wanted_bytes, foreign=True)
        read = self._store.rows.read([part], Deadline.after(self._timeout_s))[0].in_key_order()
        ours = read.found & record.belong(read.records, ids)
        stored = np.where(ours, record.versions(read.records), np.uint64(0))
        late = np.flatnonzero(stored != versions)
        if not len(late):
            return read.records, ids[late]
        records = read.records.copy()
        found, kept = self._kept[definition.key].find(ids[late])
        records[late[found]] = kept[:, :wanted_bytes]
        return records, ids[late[~found]]
