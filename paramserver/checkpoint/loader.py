"""Loading a checkpoint into one shard. It happens while the shard starts: a shard that is told to load stops cleanly and starts again.

    reading    the checkpoint's rows that this shard owns become runs of its row log, and its other rows notes that they are gone. None
               of it counts yet: a checkpoint that turns out damaged leaves the shard as it was
    switch     a saved state names these runs, with the checkpoint's steps; the journal goes on after its old entries
    writing    every row goes to storage, unconditionally; rows that are gone are erased there
    done       the file `loaded` holds the decision's serial, and the saved state says of no load any more

Reading needs no row in memory, so it comes before the tables are made, if the saved state is all there is: nothing in the journal after
it, and for a load of some tables nothing after the row log. Else the shard recovers first, flushes what other tables need, and starts
once more.

A crash before the switch starts the reading again; after it the load goes on from the row log, without the checkpoint. Acknowledged changes
from before the load to its tables are gone with it, as a load intends.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import SLOT_SHIFT
from kvemb.checkpoint.chain import Chain, open_chain
from kvemb.checkpoint.format.checkpoint_manifest import CheckpointManifest, SavedTable
from kvemb.checkpoint.format.parquet_blocks import RowBlock
from kvemb.checkpoint.load import META_NAME, Decision, Report, decode_decision, newest_decision, report_name
from kvemb.coordination.replicated_values import DamagedCopyError, are_damaged
from kvemb.errors import CheckpointError, KvembError, NodeLostError, NodeSuspectError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.process.extras import require_extra
from kvemb.process.work_ahead import work_ahead
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.store import Store

from ..capability import StartStep
from ..engine.storage_pace import Pause, Tries
from ..journal import EventEntry
from ..journal.entry import LOAD
from ..model.table_registry import Registry
from ..recovery.shard_parts import ShardParts, StartAgainError, StartingShard, state_of
from ..row_log.log_flush import LogFlush, from_storage
from ..row_log.reconstruct import batches_behind
from ..row_log.run_merge import merged
from ..row_log.run_writer import NO_RECORDS, RunWriter
from ..row_log.sorted_run import ERASED, ROWS, Part
from ..row_log.state_file import LoggedTable
from ..shard_process.data_dir import DataDir
from .unconditional_writer import UnconditionalWriter, portions

LOADED = "loaded"
_REPORT_S = 1.0
_MOST_STREAMS = 16
_MOST_WAITING = 4 << 20  # keys from the journal, of which some may be there more than once
Ids = NDArray[np.uint64]
_NONE = np.empty(0, np.uint64)
log = logging.getLogger("paramserver")


def check(url: str, save_id: str, registry: Registry, tables: Sequence[str] = ()) -> Chain:
    """Open a checkpoint as this shard would load it, or some of its tables; nothing changes."""
    require_extra("pyarrow.parquet")
    chain = open_chain(url, tables)
    if chain.newest.save_id != save_id:
        raise CheckpointError(f"{url}: holds save {chain.newest.save_id} by now, the load is of {save_id}")
    known = {table.name: table for table in registry.reloaded()}
    for saved in chain.newest.tables:
        if saved.definition.name in known:
            known[saved.definition.name].require_same(saved.definition)
    return chain


def note_carried_out(data: DataDir, serial: int, still_ours: Callable[[], None]) -> None:
    """Note that a shard has nothing more to do for a decision: it has done it, has no slots, or takes rows that are loaded."""
    data.write(LOADED, [b"%d\n" % serial], still_ours)


def note_newest_carried_out(parts: ShardParts) -> None:
    """Note that a shard has nothing to do for the newest decision: it takes its first rows, which are loaded already."""
    copies = parts.store.values.get(META_NAME, Deadline.after(parts.timeout_s))
    if (decision := newest_decision(copies, parts.store.values.copies_on(META_NAME))) is not None:
        note_carried_out(parts.data, decision.serial, parts.claim.require)
        parts.ingest.loads.carried_out(decision.serial)


class Loader(StartStep):
    """Carries out the newest decision of a cluster on one shard that does not serve yet."""

    def __init__(self, shard: StartingShard, pause: Pause) -> None:
        self._shard, self._pause = shard, pause
        self._store, self._data, self._timeout_s = shard.store, shard.data, shard.timeout_s
        self._reported = 0.0
        self._done = self._rows = 0

    def how_far(self) -> tuple[int, int]:
        """Rows done, and of about how many. Any thread."""
        return self._done, self._rows

    def read(self) -> None:
        """Make the checkpoint's rows the shard's row log, if a load is decided. Nothing is in the journal after the saved state."""
        decision = self._undone()
        if decision is None:
            return
        with self._failing(decision.load_id):
            touched = self._touched()
            if not (touched and decision.tables):
                self._read(decision, touched)

    def finish(self, parts: ShardParts) -> None:
        """Write what was read to storage, for a shard that has recovered."""
        if (decision := self._undone()) is not None:
            with self._failing(decision.load_id):
                if decision.tables:
                    for attempt in Tries(self._pause, parts.repairer, _give_up):
                        with attempt:
                            self._flush(parts)
            raise StartAgainError
        if (begun := self._shard.saved.now.loading) is not None:
            with self._failing(begun[1]):
                self._write(parts, *begun)
        parts.ingest.loads.follow(partial(newest_load, self._store, self._timeout_s), carried_out(self._data))

    @contextmanager
    def _failing(self, load_id: str) -> Iterator[None]:
        try:
            yield
        except (KvembError, OSError) as error:
            self._report(load_id, "failed", f"{type(error).__name__}: {error}")
            raise

    def _undone(self) -> Decision | None:
        """Return the newest decision, if this shard is still to read it."""
        begun, decision = self._shard.saved.now.loading, newest_undone(self._store, self._data, self._timeout_s)
        if decision is not None and begun is None and self._shard.shard not in self._store.nodes.cluster_map.writing_shards:
            # None of its rows is this shard's, and it may be gone by now.
            note_carried_out(self._data, decision.serial, self._shard.claim.require)
            self._report(decision.load_id, "done")
            return None
        return decision if decision is not None and (begun is None or begun[1] != decision.load_id) else None

    def _touched(self) -> dict[str, Ids]:
        """Return the keys of the rows that the journal has changed or erased after the row log: ascending, by the table's key."""
        shard, waiting = self._shard, dict[str, list[Ids]]()
        for _, entry in batches_behind(shard.saved.now.cut, shard.fenced_log.journal, shard.registry.find_key):
            for rows in entry.batch.tables:
                some = waiting.setdefault(rows.definition.key, [_NONE])
                some.append(rows.definition.order.keys(rows.ids))
                if sum(map(len, some[1:])) > _MOST_WAITING + len(some[0]):
                    some[:] = [_unique(some)]
        return {key: _unique(some) for key, some in waiting.items()}

    def _flush(self, parts: ShardParts) -> None:
        """Bring the row log up to the journal's end, so that no table needs the journal."""
        end, applied = parts.fenced_log.journal.end, parts.engine.version
        flush = LogFlush(parts.runs, parts.tables, from_storage(self._store, self._timeout_s), lambda: applied)
        for _ in flush.steps(lambda: state_of(parts, end)):
            pass
        parts.fenced_log.discard_before(end)

    def _read(self, decision: Decision, touched: Mapping[str, Ids]) -> None:
        """Bring the rows that this shard owns from the checkpoint to its own disk, and let them be its row log."""
        log.info("loading %s", decision.url)
        shard, state = self._shard, self._shard.saved.now
        checkpoint, registry = check(decision.url, decision.save_id, shard.registry, decision.tables), shard.registry
        newest, version = checkpoint.newest, make_version(state.epoch, 0)
        n_rows = sum(level.manifest.n_rows for level in checkpoint.levels)
        self._done, self._rows = 0, n_rows // len(self._store.nodes.cluster_map.shard_numbers)
        saved = {registry.find_last(one.definition.name).key: one for one in newest.tables}
        there = [one for one in [*registry.tables, *registry.dropping] if not decision.tables or one.key in saved]
        writers: list[RunWriter] = []
        tables = [] if not decision.tables else [one for one in state.tables if one.definition.key not in saved]
        for definition in there:
            rows: list[RunWriter] = []
            if (found := saved.get(definition.key)) is not None:
                definition.require_same(found.definition)
                in_order = found.definition.order == definition.order
                rows = self._rows_of(checkpoint, definition, decision.load_id, in_order=in_order)
            writers += [*rows, self._gone(definition, rows, version, touched.get(definition.key, _NONE))]
            step = 0 if found is None else self._step(newest, found)
            tables.append(LoggedTable(definition, step, sum(one.n_rows for one in rows), erased_since=version))
        shard.claim.require()  # a process that was shut out while it read writes nothing more
        end, keys = shard.fenced_log.journal.end, {one.key for one in there}
        unwritten = () if state.loading is None else state.loading[2]  # of a load that was broken off
        loading = decision.serial, decision.load_id, tuple(sorted(keys.union(unwritten)))
        since = ((0, make_version(state.epoch, state.k)),)  # rows count as pushed when they were loaded
        new = replace(state, tables=tuple(tables), cut=version, loading=loading, journal=end, since=since)
        shard.runs.publish(writers, new, alone=keys)
        shard.fenced_log.discard_before(end)

    def _rows_of(self, checkpoint: Chain, definition: TableDef, load_id: str, *, in_order: bool) -> list[RunWriter]:
        """Write a table's rows as runs: as one where the checkpoint has them in the order of a run."""
        keys = definition.order.keys
        parts = self._own_rows(checkpoint, definition, load_id)
        if not in_order:
            return self._shard.runs.in_order(definition, parts)
        writer = self._shard.runs.begin(definition)
        for kind, ids, versions, records in parts:
            writer.add(kind, keys(ids), versions, records)
        return [writer]

    def _gone(self, definition: TableDef, rows: Sequence[RunWriter], version: int, touched: Ids) -> RunWriter:
        """Note that all other rows are gone: those that there were, and those that a load before this one was to erase.

        The journal after the row log may name rows of slots that are another shard's by now: those are not this shard's to erase.
        """
        runs, shards_of = self._shard.runs, self._store.nodes.cluster_map.shards_of
        gone = runs.begin(definition)
        known = [_Known(run.blocks(kind, records=False)) for run in runs.view.of(definition) for kind in (ROWS, ERASED)]
        if len(touched):
            known.append(_Known(iter([(ROWS, touched, np.zeros(len(touched), np.uint64), NO_RECORDS)])))
        if known:  # where a row is loaded, too, that is the newest
            for _, keys, versions, _ in merged([*known, *runs.written(rows).of(definition)], forget_up_to=0, records=False):
                others = keys[versions != np.uint64(version)]
                others = others[shards_of(definition.placement.slots(definition.order.ids(others))) == self._shard.shard]
                gone.add(ERASED, others, np.full(len(others), version, np.uint64), NO_RECORDS)
        return gone

    def _own_rows(self, checkpoint: Chain, definition: TableDef, load_id: str) -> Iterator[Part]:
        mine, cluster_map, version = self._shard.shard, self._store.nodes.cluster_map, make_version(self._shard.saved.now.epoch, 0)
        sources: Sequence[int] = [mine] if self._same_shards(checkpoint.newest) else range(checkpoint.newest.n_shards)

        def part(block: RowBlock) -> Part:
            own = cluster_map.shards_of(definition.placement.slots(block.ids)) == mine
            some = block if own.all() else block.take(own)
            return ROWS, some.ids, np.full(len(some), version, np.uint64), some.records(definition, version)

        with closing(work_ahead(part, checkpoint.rows_of(definition, sources), n_threads=1, name="kvemb-load")) as parts:
            for one in parts:
                yield one
                self._done += len(one[1])
                self._report(load_id, "reading")

    def _same_shards(self, manifest: CheckpointManifest) -> bool:
        """Whether the shard of our number wrote all of our rows, and no others."""
        return manifest.slots == self._store.nodes.cluster_map.shard_runs and self._shard.shard < manifest.n_shards

    def _step(self, manifest: CheckpointManifest, saved: SavedTable) -> int:
        """Docs/adr/0004: the same shard's, or where other shards have the rows now the largest."""
        return saved.steps[self._shard.shard] if self._same_shards(manifest) else max(saved.steps)

    def _write(self, parts: ShardParts, serial: int, load_id: str, keys: Collection[str]) -> None:
        """Bring storage to the state of the row log."""
        begun, tables = time.monotonic(), [one for one in self._shard.saved.now.tables if one.definition.key in keys]
        writer = UnconditionalWriter(self._store, self._timeout_s, self._pause, parts.repairer, parts.tables.known)
        self._done, self._rows, self._reported = 0, sum(table.n_rows for table in tables), 0.0
        log.info("writing %d rows to storage", self._rows)
        self._report(load_id, "writing")
        for table in tables:
            runs = parts.runs.view.of(table.definition)
            streams = [merged(runs, forget_up_to=0, low=low, high=high) for low, high in self._stretches()]
            blocks = portions(streams)  # read while those before are written
            store = partial(writer.store, table.definition)
            with closing(work_ahead(store, blocks, n_threads=1, name="kvemb-load")) as stored:
                for n_rows in stored:
                    self._done += n_rows
                    self._report(load_id, "writing")
        self._shard.claim.require()
        parts.fenced_log.append(EventEntry(LOAD))
        parts.fenced_log.commit()
        note_carried_out(self._data, serial, self._shard.claim.require)
        parts.runs.publish([], replace(state_of(parts, parts.fenced_log.journal.end), loading=None))
        log.info("loaded %d rows in %.1f s", self._done, time.monotonic() - begun)
        self._reported = 0.0
        self._report(load_id, "done")

    def _stretches(self) -> list[tuple[int, int]]:
        """Return ranges of keys, each from its first to the one after its last: as many of our slots in each, one for each node.

        Neighbouring slots lie on one node, so that rows in the order of their keys would let all other nodes wait.
        """
        own = np.flatnonzero(self._store.nodes.cluster_map.slot_shards == self._shard.shard)
        n = max(1, min(len(self._store.nodes.addresses), _MOST_STREAMS, len(own)))
        edges = [0, *(int(own[at * len(own) // n]) << SLOT_SHIFT for at in range(1, n)), 1 << 64]
        return list(pairwise(edges))

    def _report(self, load_id: str, state: str, error: str = "") -> None:
        """Report the load's state to the nodes, now and then; storage that does not answer is no reason to stop here."""
        now = time.monotonic()
        if not error and now - self._reported < _REPORT_S:
            return
        self._reported = now
        report = Report(load_id, state, error[:2000], self._done, self._rows, time.time_ns())
        with suppress(StorageError):
            self._store.values.put(report_name(self._shard.shard), report.encode(), Deadline.after(self._timeout_s))


@dataclass(frozen=True)
class _Known:
    """Keys of rows, or of erased ids, read once as rows of a run."""

    parts: Iterator[Part]

    def blocks(self, kind: int, low: int = 0, *, records: bool = True, above: int = 0) -> Iterator[Part]:
        """See `SortedRun.blocks`."""
        for _, keys, versions, _ in self.parts if kind == ROWS else ():
            yield kind, keys, versions, np.empty((len(keys), 0), np.uint8)


def newest_undone(store: Store, data: DataDir, timeout_s: float) -> Decision | None:
    """Return the newest decision, unless the shard of this folder has carried it out."""
    try:
        copies = store.values.get(META_NAME, Deadline.after(timeout_s))
        found = newest_decision(copies, store.values.copies_on(META_NAME))
    except (NodeLostError, NodeSuspectError):  # to be repaired first; a decision that only lost nodes held was never answered
        return None
    except DamagedCopyError as error:
        raise DamagedCopyError(
            f"{error} It said whether a checkpoint is to be loaded. If no load is under way, delete the key there, and start the shard "
            "again."
        ) from error
    damaged = are_damaged(copies, decode_decision)
    if found is not None and any(damaged):
        store.values.mend(META_NAME, copies, damaged, found.encode(), Deadline.after(timeout_s))
    return found if found is not None and found.serial > carried_out(data) else None


def newest_load(store: Store, timeout_s: float) -> tuple[int, tuple[str, ...]]:
    """Return the serial of the newest decision that nodes hold, and its tables, () for all; (0, ()) where there is none."""
    try:
        copies = store.values.get(META_NAME, Deadline.after(timeout_s))
    except (NodeLostError, NodeSuspectError):  # as above
        return 0, ()
    found = newest_decision(copies, store.values.copies_on(META_NAME))
    return (0, ()) if found is None else (found.serial, found.tables)


def carried_out(data: DataDir) -> int:
    """Return the serial of the last load that the shard of a folder has carried out; 0: none."""
    return int(data.read(LOADED) or b"0")


def _unique(keys: Sequence[Ids]) -> Ids:
    """Return all keys once, ascending (`np.unique` takes several times as long)."""
    joined = np.sort(np.concatenate(keys))
    return joined[np.append(True, joined[1:] != joined[:-1])] if len(joined) else joined


def _give_up(error: StorageError) -> None:
    raise error
