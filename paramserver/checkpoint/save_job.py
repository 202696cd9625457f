"""One save of one shard: the cut, and the thread that writes the rows as they were at the cut while training goes on.

The row log and the journal hold every row of the cut, so storage is asked for nothing. The log's runs stay as they are for this reader.
Rows that changed after the log's cut are brought forward by the journal first (`Reconstructor`), and take part as one more run, the
newest. So the checkpoint is exact: it holds every batch up to the cut and none after it, and needs no journal to be loaded.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import ERASED, IDS, Cut
from kvemb.checkpoint.format.parquet_blocks import RowBlock
from kvemb.checkpoint.format.strict_json import decode, encode
from kvemb.checkpoint.writer import MAX_IDS, Fragment, ShardWriter
from kvemb.errors import CheckpointError
from kvemb.process.work_ahead import work_ahead
from kvemb.schema.table_def import TableDef

from ..model.tables import TableState
from ..repair.repairer import Reconstruct
from ..row_log import RunView, WantedVersions, sorted_run
from ..row_log.run_merge import Blocks, merged
from ..row_log.sorted_run import ROWS, Bytes, Ids, Part
from ..shard_process import freed_memory
from ..shard_process.data_dir import replace_privately
from ..shard_process.owned_thread import OwnedThread

_NEVER = (1 << 64) - 1
_FIGURES = "done", "failed", "last_done_s", "created_s"
log = logging.getLogger("paramserver")


@dataclass(frozen=True, eq=False)
class TableCut:
    """One table at the cut of a save.

    Args:
        table: its definition and optimizer are used.
        step: applies so far.
        n_rows: rows that existed.
        late: rows that are newer than in the row log, uint64 [n] ids and versions, in the order of their keys.
        gone: rows that were erased since the log was written, likewise, with the versions as of which they are gone.
        erased_known: whether log and `gone` note every row that was erased since the base.
    """

    table: TableState
    step: int
    n_rows: int
    late: tuple[Ids, Ids]
    gone: tuple[Ids, Ids]
    erased_known: bool

    @property
    def definition(self) -> TableDef:
        """The table."""
        return self.table.definition


class _LateRun:
    """The rows of a table that changed after the row log, as one more run."""

    def __init__(self, table: TableCut, records: Bytes) -> None:
        self._order, self._table, self._records = table.definition.order, table, records

    def blocks(self, kind: int, low: int = 0, *, records: bool = True, above: int = 0) -> Iterator[Part]:
        """See `SortedRun.blocks`."""
        ids, versions = self._table.late if kind == ROWS else self._table.gone
        step, rest = sorted_run.BLOCK_ROWS, self._records if kind == ROWS and records else np.empty((len(ids), 0), np.uint8)
        for at in range(0, len(ids), step):
            some = slice(at, at + step)
            yield kind, self._order.keys(ids[some]), versions[some], rest[some]


class SaveFigures:
    """The outcomes of the saves in which a shard had a share; kept in its data folder, so that a restart forgets none. Thread-safe.

    A save is done when its manifest is written, which the shard is told. It has failed when the shard's share has, when the shard stopped
    before it was told, and when another save begins before that. Times are seconds since 1970, 0.0 for none. A figure that cannot be
    written does not fail the save.
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
            self.done, self.failed, self.last_done_s, self.created_s = (fields.integer(name, 0, 1 << 53) for name in _FIGURES)
            self._begun, self._resumable = fields.text("begun"), fields.flag("resumable")
        except FileNotFoundError:
            return
        except (OSError, CheckpointError) as error:
            log.warning("the counts of saves begin again: %s", error)

    def _note(self) -> None:
        figures = dict(zip(_FIGURES, (self.done, self.failed, int(self.last_done_s), int(self.created_s)), strict=True))
        with suppress(OSError):
            replace_privately(self._path, [encode({"format": 1, "begun": self._begun, "resumable": self._resumable, **figures})])


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
        slots: bool [16384], those that this shard owned at the cut.
    """

    def __init__(
        self,
        order: SaveOrder,
        cut: Cut,
        tables: Sequence[TableCut],
        view: RunView,
        reconstruct: Reconstruct,
        *,
        slots: NDArray[np.bool_],
        figures: SaveFigures,
    ) -> None:
        self._figures, self._slots = figures, slots
        self.order, self.cut, self.error = order, cut, ""
        self.fragment: Fragment | None = None
        self._tables, self._view, self._reconstruct = tables, view, reconstruct
        self.n_rows = sum(self._about(table) for table in tables)
        self.rows_done = self.bytes_done = 0
        self.reads_journal = True
        self.thread = OwnedThread(self._run, name="kvemb-save")

    @property
    def running(self) -> bool:
        """Whether it has not come to an end."""
        return not self.error and self.fragment is None

    def _about(self, table: TableCut) -> int:
        """Rows to be saved: exactly in a full save, at most in an increment."""
        if not self.order.incremental:
            return table.n_rows
        return min(table.n_rows, len(table.late[0]) + sum(run.n_rows[ROWS] for run in self._runs(table, self.order.base_version)))

    def _runs(self, table: TableCut, above: int) -> list[sorted_run.SortedRun]:
        """Return the runs that may hold versions above one."""
        return [run for run in self._view.of(table.definition) if run.newest > above]

    def _run(self) -> None:
        begun = time.monotonic()
        try:
            self.fragment = self._saved()
            log.info("saved %d rows in %.1f s", self.rows_done, time.monotonic() - begun)
        except Exception as error:
            self._figures.end(self.order.save_id, done=False)
            self.error = f"{type(error).__name__}: {error}"
            log.error("save %s to %s failed: %s", self.order.save_id, self.order.url, self.error)
        finally:
            self.reads_journal, self._tables, self._view, self._reconstruct = False, (), RunView(0, {}), lambda wanted: []
            freed_memory.give_back()

    def _saved(self) -> Fragment:
        with ShardWriter(CheckpointStorage(self.order.url), self.order.save_id, self.cut, weights_only=self.order.weights_only) as writer:
            late = self._reconstruct([WantedVersions(table.table, *table.late) for table in self._tables])
            self.reads_journal = False
            for table, records in zip(self._tables, late, strict=True):
                self._save_table(table, _LateRun(table, records), writer)
            fragment = writer.finish([(table.definition, table.step) for table in self._tables])
            self.bytes_done = writer.n_bytes
        return fragment

    def _save_table(self, table: TableCut, late: _LateRun, writer: ShardWriter) -> None:
        base = self.order.base_version
        if self.order.incremental and not table.erased_known:
            self._save_ids(table, late, writer)
        runs: list[Blocks] = [*self._runs(table, base), late]
        parts, gone, keep = writer.parts_of(table.definition), [np.empty(0, np.uint64)], table.erased_known and self.order.incremental
        states = merged(runs, forget_up_to=base if keep else _NEVER, above=base)
        with closing(work_ahead(lambda part: self._block(table, part), states, n_threads=1, name="kvemb-save-read")) as blocks:
            for kind, rows in blocks:
                self._require_wanted()
                if kind == ROWS and len(rows):
                    parts.add(rows)
                    self.rows_done += len(rows)
                    self.bytes_done = writer.n_bytes
                elif kind != ROWS:
                    gone.append(rows.ids)
        parts.close()
        erased = np.concatenate(gone)
        erased = erased[self._slots[table.definition.placement.slots(erased)]]  # of slots that have gone since, their new shard tells
        if len(erased):
            writer.add_ids(table.definition, ERASED, erased)

    def _block(self, table: TableCut, part: Part) -> tuple[int, RowBlock]:
        """Return one kind's rows that are newer than the base; of erased ones the ids alone."""
        kind, keys, versions, records = part
        definition = table.definition
        newer = versions > np.uint64(self.order.base_version)
        if not newer.all():
            keys, versions, records = keys[newer], versions[newer], records[newer]
        ids = definition.order.ids(keys)
        if kind != ROWS:
            return kind, RowBlock(ids, versions, np.empty((len(ids), 0)), None)
        definition.record.check(records, ids, np.ones(len(ids), bool), lambda row: f"the row log, id {int(ids[row])}")
        return kind, RowBlock.of_records(definition, ids, records, self.order.weights_only)

    def _save_ids(self, table: TableCut, late: _LateRun, writer: ShardWriter) -> None:
        """Write the ids of all rows, since not all erased ones are known."""
        waiting, n = [np.empty(0, np.uint64)], 0
        for _, keys, _, _ in merged([*self._view.of(table.definition), late], forget_up_to=_NEVER, records=False):
            self._require_wanted()
            waiting.append(table.definition.order.ids(keys))
            n += len(keys)
            if n >= MAX_IDS:
                writer.add_ids(table.definition, IDS, np.concatenate(waiting))
                waiting, n = [waiting[0]], 0
        if n or not table.n_rows:
            writer.add_ids(table.definition, IDS, np.concatenate(waiting))

    def _require_wanted(self) -> None:
        if self.thread.told_to_end:
            raise CheckpointError("the shard was stopped")
