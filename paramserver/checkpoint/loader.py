"""Loading a checkpoint into one shard. It happens while the shard starts: a shard that is told to load stops cleanly and starts again.

    reading    the checkpoint's rows that this shard owns become runs of its row log, which do not count yet; nothing else has changed,
               and a checkpoint that turns out damaged leaves the shard as it was
    plan       the file `load`: the rows to be erased
    switch     a saved state names these runs alone, with the checkpoint's steps; the journal goes on behind its old entries
    writing    every row goes to storage, unconditionally; rows that the checkpoint does not have are erased
    done       the file `loaded` holds the decision's serial, `load` is gone

A crash before the switch starts the reading again; after it the load goes on from the plan, without the checkpoint. Acknowledged changes
from before the load are gone with it, as a load intends.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvemb.checkpoint.chain import Chain, open_chain
from kvemb.checkpoint.format.checkpoint_manifest import CheckpointManifest, SavedTable
from kvemb.checkpoint.format.parquet_blocks import require_extra
from kvemb.checkpoint.load import META_NAME, Decision, Report, decode_decision, newest_decision, report_name
from kvemb.coordination.replicated_values import DamagedCopyError, are_damaged
from kvemb.errors import CheckpointError, KvembError, NodeLostError, NodeSuspectError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.store import Store

from ..engine.storage_pace import Pause
from ..model.table_registry import Registry
from ..recovery.shard_parts import ShardParts, state_of
from ..row_log.run_writer import RunWriter
from ..row_log.sorted_run import ROWS, Part
from ..row_log.state_file import LoggedTable
from ..shard_process.data_dir import DataDir
from . import unconditional_writer
from .load_plan import LoadPlan, decode_load_plan, encode_load_plan
from .unconditional_writer import UnconditionalWriter

PLAN, LOADED = "load", "loaded"
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
        plan = self._plan()
        decision = self._decision()
        if decision is not None and plan is None and self._parts.shard not in self._store.nodes.cluster_map.writing_shards:
            note_carried_out(self._data, decision, self._still_ours)  # none of its rows is this shard's, and it may be gone by now
            self._report(decision.load_id, "done")
            return
        if decision is None and plan is None:
            return
        load_id = decision.load_id if decision is not None else plan.load_id if plan is not None else ""
        try:
            if plan is None or plan.version > self._parts.runs.cut or (decision is not None and plan.load_id != decision.load_id):
                if decision is None:
                    return  # nodes are to be repaired first: without them it is not known whether the load is still wanted
                self._switch(*self._read(decision, {} if plan is None else plan.erase))
                raise LoadedError
            self._write(plan)
        except (KvembError, OSError) as error:
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

    def _plan(self) -> LoadPlan | None:
        raw = self._data.read(PLAN)
        return None if raw is None else decode_load_plan(raw, str(self._data.path / PLAN))

    def _read(self, decision: Decision, erase_too: dict[str, Ids]) -> tuple[LoadPlan, list[RunWriter]]:
        """Bring the rows that this shard owns from the checkpoint to its own disk.

        Args:
            decision: to be carried out.
            erase_too: ids of rows in storage from an unfinished load, beside those that the index knows.
        """
        log.info("loading %s", decision.url)
        chain = check(decision.url, decision.save_id, self._parts.registry)
        runs, version = self._parts.runs, make_version(self._parts.engine.epoch, 0)
        self._done, self._rows = 0, sum(level.manifest.n_rows for level in chain.levels) // len(self._store.nodes.cluster_map.shard_numbers)
        writers: list[RunWriter] = []
        loaded: dict[str, list[Ids]] = {}
        for saved in chain.newest.tables:
            definition = self._parts.registry.find_last(saved.definition.name)
            definition.require_same(saved.definition)
            parts = self._own_rows(chain, definition, version)
            ids = loaded[definition.key] = []
            writers += runs.in_order(definition, self._counted(parts, decision.load_id, ids))
        erase = {}
        for definition in [*self._parts.registry.tables, *self._parts.registry.dropping]:
            left = erase_too.get(definition.key, np.empty(0, np.uint64))
            ids = loaded.get(definition.key, [])
            there = np.sort(np.concatenate([left[:0], *ids]))
            erase[definition.key] = _without([self._parts.tables.state(definition).arrays()[0], left], there)
        newest = chain.newest
        steps = {self._parts.registry.find_last(saved.definition.name).key: self._step(newest, saved) for saved in newest.tables}
        plan = LoadPlan(decision.serial, decision.load_id, version, steps, erase)
        self._data.write(PLAN, encode_load_plan(plan), self._still_ours)
        return plan, writers

    def _own_rows(self, chain: Chain, definition: TableDef, version: int) -> Iterator[Part]:
        mine, cluster_map = self._parts.shard, self._store.nodes.cluster_map
        sources: Sequence[int] = [mine] if self._same_shards(chain.newest) else range(chain.newest.n_shards)
        for block in chain.rows_of(definition, sources):
            own = cluster_map.shards_of(definition.placement.slots(block.ids)) == mine
            some = block if own.all() else block.take(own)
            if len(some):
                yield ROWS, some.ids, np.full(len(some), version, np.uint64), some.records(definition, version)

    def _counted(self, parts: Iterator[Part], load_id: str, ids: list[Ids]) -> Iterator[Part]:
        for part in parts:
            yield part
            ids.append(part[1])
            self._done += len(part[1])
            self._report(load_id, "reading")

    def _same_shards(self, manifest: CheckpointManifest) -> bool:
        """Whether the shard of our number wrote all of our rows, and no others."""
        return manifest.slots == self._store.nodes.cluster_map.shard_runs and self._parts.shard < manifest.n_shards

    def _step(self, manifest: CheckpointManifest, saved: SavedTable) -> int:
        """Docs/adr/0004: the same shard's, or where other shards have the rows now the largest."""
        return saved.steps[self._parts.shard] if self._same_shards(manifest) else max(saved.steps)

    def _switch(self, plan: LoadPlan, writers: Sequence[RunWriter]) -> None:
        """Let the runs that were read be the row log."""
        self._still_ours()  # a process that was shut out while it read writes nothing more
        tables, end = [], self._parts.fenced_log.journal.end
        for key, step in plan.steps.items():
            n_rows = sum(writer.n_rows for writer in writers if writer.definition.key == key)
            tables.append(LoggedTable(self._parts.registry.find_key(key), step, n_rows, erased_since=plan.version))
        state = replace(state_of(self._parts, end), tables=tuple(tables), cut=plan.version)
        self._parts.runs.publish(writers, state, alone=True)
        self._parts.fenced_log.discard_before(end)

    def _write(self, plan: LoadPlan) -> None:
        """Bring storage to the state of the index."""
        begun, runs = time.monotonic(), self._parts.runs
        states = [self._parts.tables.state(self._parts.registry.find_key(key)) for key in plan.steps]
        self._done, self._rows = 0, sum(state.n_rows for state in states)
        for state in states:
            step = max(1, unconditional_writer.BLOCK_BYTES // state.definition.record.size_bytes)
            for some, _ in state.portions(n_rows=step):
                self._writer.write(state.definition, some, runs.find(state.definition, some).records)
                self._done += len(some)
                self._report(plan.load_id, "writing")
        for key, ids in plan.erase.items():
            self._writer.erase(self._parts.registry.find_key(key), ids)
        self._data.write(LOADED, [b"%d\n" % plan.serial], self._still_ours)
        self._data.remove(PLAN)
        log.info("loaded %d rows in %.1f s", self._done, time.monotonic() - begun)
        self._reported = 0.0
        self._report(plan.load_id, "done")

    def _report(self, load_id: str, state: str, error: str = "") -> None:
        """Report the load's state to the nodes, now and then; storage that does not answer is no reason to stop here."""
        now = time.monotonic()
        if not error and now - self._reported < _REPORT_S:
            return
        self._reported = now
        report = Report(load_id, state, error[:2000], self._done, self._rows, time.time_ns())
        with suppress(StorageError):
            self._store.values.put(report_name(self._parts.shard), report.encode(), Deadline.after(self._timeout_s))


def _without(arrays: Sequence[Ids], loaded: Ids) -> Ids:
    """Return the unique ids of these arrays that are not among `loaded` (ascending): uint64 [n], ascending.

    Example:
        >>> _without([np.array([7, 1, 9], np.uint64), np.array([9, 4], np.uint64)], np.array([1, 2, 4], np.uint64)).tolist()
        [7, 9]
    """
    ids: Ids = np.sort(np.concatenate(arrays))  # np.union1d and np.setdiff1d take 4 µs an id (NumPy 2.4)
    ids = ids[np.append(True, ids[1:] != ids[:-1])[: len(ids)]]
    at = np.searchsorted(loaded, ids)
    there: NDArray[np.bool_] = (at < len(loaded)) & (np.append(loaded, np.uint64(0))[at] == ids)
    left: Ids = ids[~there]
    return left
