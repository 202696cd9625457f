"""Loading a checkpoint into one shard. It happens while the shard starts: a shard that is told to load stops cleanly and starts again.

    reading    the checkpoint's rows that this shard owns become runs of its row log, and its other rows notes that they are gone. None
               of it counts yet: a checkpoint that turns out damaged leaves the shard as it was
    switch     a saved state names these runs alone, with the checkpoint's steps; the journal goes on behind its old entries
    writing    every row goes to storage, unconditionally; rows that are gone are erased there
    done       the file `loaded` holds the decision's serial, and the saved state says of no load any more

A crash before the switch starts the reading again; after it the load goes on from the row log, without the checkpoint. Acknowledged changes
from before the load are gone with it, as a load intends.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvemb.checkpoint.chain import Chain, open_chain
from kvemb.checkpoint.format.checkpoint_manifest import CheckpointManifest, SavedTable
from kvemb.checkpoint.format.parquet_blocks import require_extra
from kvemb.checkpoint.load import META_NAME, Decision, Report, decode_decision, newest_decision, report_name
from kvemb.coordination.replicated_values import DamagedCopyError, are_damaged
from kvemb.errors import CheckpointError, KvembError, NodeLostError, NodeSuspectError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.process.work_ahead import work_ahead
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.store import Store

from ..engine.storage_pace import Pause
from ..journal import EventEntry
from ..journal.entry import LOAD
from ..model.table_registry import Registry
from ..model.tables import PORTION_ROWS
from ..recovery.shard_parts import ShardParts, state_of
from ..row_log.run_merge import merged
from ..row_log.run_writer import RunWriter
from ..row_log.sorted_run import ERASED, ROWS, Bytes, Part
from ..row_log.state_file import LoggedTable
from ..shard_process.data_dir import DataDir
from . import unconditional_writer
from .unconditional_writer import UnconditionalWriter

LOADED = "loaded"
_REPORT_S = 1.0
Ids = NDArray[np.uint64]
log = logging.getLogger("paramserver")


class LoadedError(Exception):
    """The shard's state is the checkpoint's now; it must be started again. Internal: no caller outside sees it."""


def check(url: str, save_id: str, registry: Registry) -> Chain:
    """Open a checkpoint as this shard would load it; nothing changes.

    Raises:
        CheckpointError: it cannot be read from here, or is another one by now.
        TableMismatchError: a table exists with another identity.
        ConfigError: pyarrow or fsspec is missing on this machine.
    """
    require_extra("pyarrow.parquet")
    chain = open_chain(url)
    if chain.newest.save_id != save_id:
        raise CheckpointError(f"{url}: holds save {chain.newest.save_id} by now, the load is of {save_id}")
    known = {table.name: table for table in registry.reloaded()}
    for table in chain.newest.tables:
        if table.definition.name in known:
            known[table.definition.name].require_same(table.definition)
    return chain


def note_carried_out(data: DataDir, decision: Decision | None, still_ours: Callable[[], None]) -> None:
    """Note that a shard has nothing more to do for the newest decision, if there is one: it has no slots, or takes rows that are loaded."""
    if decision is not None:
        data.write(LOADED, [b"%d\n" % decision.serial], still_ours)


class Loader:
    """Replaces one shard's rows by a checkpoint's, step by step, so that a crash at any step can be gone on from.

    Args:
        parts: of a shard that has recovered and does not serve yet.
        store: open.
        data: the shard's folder.
        pause: between tries of storage calls; raises to give up.
    """

    def __init__(self, parts: ShardParts, store: Store, data: DataDir, pause: Pause) -> None:
        self._parts, self._store, self._data = parts, store, data
        self._servers, self._timeout_s = parts.config.servers, parts.config.storage.timeout_s
        self._writer = UnconditionalWriter(store, self._timeout_s, pause, parts.repairer)
        self._still_ours = parts.claim.require
        self._reported = 0.0
        self._done = self._rows = 0

    def how_far(self) -> tuple[int, int]:
        """Rows done, and of about how many. Any thread."""
        return self._done, self._rows

    def run(self) -> None:
        """Carry out the newest decision, if this shard has not yet.

        Raises:
            LoadedError: the state was replaced; start again (and call this again).
            KvembError: the decision cannot be carried out; the shard must not serve. The next start tries again.
        """
        begun, decision = self._parts.saved.now.loading, self._decision()
        if decision is not None and begun is None and self._parts.shard not in self._store.nodes.cluster_map.writing_shards:
            note_carried_out(self._data, decision, self._still_ours)  # none of its rows is this shard's, and it may be gone by now
            self._report(decision.load_id, "done")
            return
        try:
            if decision is not None and (begun is None or begun[1] != decision.load_id):
                self._read(decision)
                raise LoadedError
            if begun is not None:
                self._write(*begun)
        except (KvembError, OSError) as error:
            load_id = decision.load_id if decision is not None else begun[1] if begun is not None else ""
            self._report(load_id, "failed", f"{type(error).__name__}: {error}")
            raise

    def _decision(self) -> Decision | None:
        """The newest decision, unless it was carried out."""
        try:
            copies = self._store.values.get(META_NAME, Deadline.after(self._timeout_s))
            found = newest_decision(copies, self._store.values.copies_on(META_NAME))
        except (NodeLostError, NodeSuspectError):  # to be repaired first; a decision that only lost nodes held was never answered
            return None
        except DamagedCopyError as error:
            raise DamagedCopyError(
                f"{error} It said whether a checkpoint is to be loaded. If no load is under way, delete the key there, and start the shard "
                "again."
            ) from error
        damaged = are_damaged(copies, decode_decision)
        if found is not None and any(damaged):
            self._store.values.mend(META_NAME, copies, damaged, found.encode(), Deadline.after(self._timeout_s))
        done = int(self._data.read(LOADED) or b"0")
        return found if found is not None and found.serial > done else None

    def _read(self, decision: Decision) -> None:
        """Bring the rows that this shard owns from the checkpoint to its own disk, and let them be its row log."""
        log.info("loading %s", decision.url)
        checkpoint, parts = check(decision.url, decision.save_id, self._parts.registry), self._parts
        newest, version = checkpoint.newest, make_version(parts.engine.epoch, 0)
        n_rows = sum(level.manifest.n_rows for level in checkpoint.levels)
        self._done, self._rows = 0, n_rows // len(self._store.nodes.cluster_map.shard_numbers)
        saved = {parts.registry.find_last(one.definition.name).key: one for one in newest.tables}
        writers: list[RunWriter] = []
        tables: list[LoggedTable] = []
        for definition in [*parts.registry.tables, *parts.registry.dropping]:
            rows: list[RunWriter] = []
            if (found := saved.pop(definition.key, None)) is not None:
                definition.require_same(found.definition)
                in_order = newest.by_key and found.definition.order == definition.order
                rows = self._rows_of(checkpoint, definition, decision.load_id, in_order=in_order)
            writers += [*rows, self._gone(definition, rows, version)]
            step = 0 if found is None else self._step(newest, found)
            tables.append(LoggedTable(definition, step, sum(one.n_rows for one in rows), erased_since=version))
        self._still_ours()  # a process that was shut out while it read writes nothing more
        end = parts.fenced_log.journal.end
        loading = decision.serial, decision.load_id
        parts.runs.publish(writers, replace(state_of(parts, end), tables=tuple(tables), cut=version, loading=loading), alone=True)
        parts.fenced_log.discard_before(end)

    def _rows_of(self, checkpoint: Chain, definition: TableDef, load_id: str, *, in_order: bool) -> list[RunWriter]:
        """Write a table's rows as runs: as one where the checkpoint has them in the order of a run."""
        version, keys = make_version(self._parts.engine.epoch, 0), definition.order.keys
        parts = self._counted(self._own_rows(checkpoint, definition, version), load_id)
        if not in_order:
            return self._parts.runs.in_order(definition, parts)
        writer = self._parts.runs.begin(definition)
        for kind, ids, versions, records in parts:
            writer.add(kind, keys(ids), versions, records)
        return [writer]

    def _gone(self, definition: TableDef, rows: Sequence[RunWriter], version: int) -> RunWriter:
        """Note that all other rows are gone: those that there were, and those that a load before this one was to erase."""
        loaded, gone = self._parts.runs.written(rows), self._parts.runs.begin(definition)
        for ids in self._known(definition):
            others = ids[~loaded.versions(definition, ids)[1]]
            gone.add_erased(others, np.full(len(others), version, np.uint64))
        return gone

    def _known(self, definition: TableDef) -> Iterator[Ids]:
        if self._parts.saved.now.loading is None:
            return (ids for ids, _ in self._parts.tables.state(definition).portions())
        runs = self._parts.runs.view.of(definition)  # of the load that was broken off, from which nothing has gone on
        keys = np.sort(np.concatenate([np.empty(0, np.uint64), *(part[1] for part in merged(runs, forget_up_to=0, records=False))]))
        return (definition.order.ids(keys[at : at + PORTION_ROWS]) for at in range(0, len(keys), PORTION_ROWS))

    def _own_rows(self, checkpoint: Chain, definition: TableDef, version: int) -> Iterator[Part]:
        mine, cluster_map = self._parts.shard, self._store.nodes.cluster_map
        sources: Sequence[int] = [mine] if self._same_shards(checkpoint.newest) else range(checkpoint.newest.n_shards)
        for block in checkpoint.rows_of(definition, sources):
            own = cluster_map.shards_of(definition.placement.slots(block.ids)) == mine
            some = block if own.all() else block.take(own)
            if len(some):
                yield ROWS, some.ids, np.full(len(some), version, np.uint64), some.records(definition, version)

    def _counted(self, parts: Iterator[Part], load_id: str) -> Iterator[Part]:
        for part in parts:
            yield part
            self._done += len(part[1])
            self._report(load_id, "reading")

    def _same_shards(self, manifest: CheckpointManifest) -> bool:
        """Whether the shard of our number wrote all of our rows, and no others."""
        return manifest.slots == self._store.nodes.cluster_map.shard_runs and self._parts.shard < manifest.n_shards

    def _step(self, manifest: CheckpointManifest, saved: SavedTable) -> int:
        """Docs/adr/0004: the same shard's, or where other shards have the rows now the largest."""
        return saved.steps[self._parts.shard] if self._same_shards(manifest) else max(saved.steps)

    def _write(self, serial: int, load_id: str) -> None:
        """Bring storage to the state of the row log."""
        begun, parts, tables = time.monotonic(), self._parts, self._parts.saved.now.tables
        self._done, self._rows = 0, sum(table.n_rows for table in tables)
        for table in tables:
            blocks = _blocks(merged(parts.runs.view.of(table.definition), forget_up_to=0))  # read while those before are written
            with closing(work_ahead(partial(self._store_block, table.definition), blocks, n_threads=1, name="kvemb-load")) as stored:
                for n_rows in stored:
                    self._done += n_rows
                    self._report(load_id, "writing")
        self._still_ours()
        parts.fenced_log.append(EventEntry(LOAD))
        parts.fenced_log.commit()
        self._data.write(LOADED, [b"%d\n" % serial], self._still_ours)
        parts.runs.save(replace(state_of(parts, parts.fenced_log.journal.end), loading=None))
        log.info("loaded %d rows in %.1f s", self._done, time.monotonic() - begun)
        self._reported = 0.0
        self._report(load_id, "done")

    def _store_block(self, definition: TableDef, block: tuple[int, Ids, Bytes]) -> int:
        """Write or erase rows; return how many were written."""
        kind, keys, records = block
        ids = definition.order.ids(keys)
        if kind != ROWS:
            self._writer.erase(definition, ids)
            return 0
        self._writer.write(definition, ids, records)
        return len(ids)

    def _report(self, load_id: str, state: str, error: str = "") -> None:
        """Report the load's state to the nodes, now and then; storage that does not answer is no reason to stop here."""
        now = time.monotonic()
        if not error and now - self._reported < _REPORT_S:
            return
        self._reported = now
        report = Report(load_id, state, error[:2000], self._done, self._rows, time.time_ns())
        with suppress(StorageError):
            self._store.values.put(report_name(self._parts.shard), report.encode(), Deadline.after(self._timeout_s))


def _blocks(states: Iterator[Part]) -> Iterator[tuple[int, Ids, Bytes]]:
    """Yield kind, keys and records of states in larger portions: as much as is written at once."""
    waiting: dict[int, list[Part]] = {ROWS: [], ERASED: []}
    n_bytes = 0
    for part in chain(states, [None]):
        if part is not None:
            waiting[part[0]].append(part)
            n_bytes += part[1].nbytes + part[3].nbytes
        if part is None or n_bytes >= unconditional_writer.BLOCK_BYTES:
            for kind, parts in waiting.items():
                if parts:
                    yield kind, np.concatenate([one[1] for one in parts]), np.concatenate([one[3] for one in parts])
            waiting, n_bytes = {ROWS: [], ERASED: []}, 0
