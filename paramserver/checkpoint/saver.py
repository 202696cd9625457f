"""Saves of one shard: takes the cut between two batches.

One save at a time. The work on rows is in `save_job`. The client puts the shards' shares together (`kvemb.checkpoint.save`).

An observer is told by the engine of rows about to be written over or erased, for the save under way and for later ones. It is made before
the engine, and outlives every save. A bounded log in memory says which rows were erased since when, for incremental checkpoints.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import Cut
from kvemb.checkpoint.format.parquet_blocks import require_extra
from kvemb.checkpoint.writer import Fragment, read_fragment
from kvemb.errors import CheckpointError, DeadlineExceededError
from kvemb.net.deadline import Deadline
from kvemb.schema.move_plan import SHARDS
from kvemb.schema.record import split_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.store import Store

from ..engine.engine import Engine
from ..model.tables import Tables
from .save_job import Restore, SaveFigures, SaveJob, SaveOrder, TableCut

Ids = NDArray[np.uint64]
_MAX_IDS = 1 << 24


class ErasedLog:
    """The ids that batches erased, of all tables of one shard. Thread-safe.

    Args:
        since: version as of which nothing is missing in it: that of the last batch before this process's first.
    """

    def __init__(self, since: int) -> None:
        self._since = since
        self._entries: list[tuple[int, str, Ids]] = []
        self._n_ids = 0
        self._lock = threading.Lock()

    def add(self, version: int, table: str, ids: Ids) -> None:
        """Note the ids that the batch of this version erased, unless it is older than the log; past the bound the oldest are forgotten."""
        if version <= self._since:  # a batch of an earlier process, which is replayed
            return
        with self._lock:
            self._entries.append((version, table, ids.copy()))
            self._n_ids += len(ids)
            while self._n_ids > _MAX_IDS:
                self._since, _, gone = self._entries.pop(0)
                self._n_ids -= len(gone)

    def forget(self, version: int) -> None:
        """Forget batches up to this version: slots come back whose rows another shard may have erased meanwhile."""
        with self._lock:
            self._since, self._entries, self._n_ids = max(self._since, version), [], 0

    def after(self, version: int, table: str) -> Ids | None:
        """Return the ids erased by batches after this version (ascending, unique; they may exist again); None if it is not known."""
        with self._lock:
            if version < self._since:
                return None
            some = [ids for at, name, ids in self._entries if name == table and at > version]
        return np.unique(np.concatenate(some)) if some else np.empty(0, np.uint64)


class SaveObserver:
    """The `WriteObserver` of one shard: hands rows to the save under way before they change, and notes erased ids.

    Args:
        since: version as of which no erase is missing: that of the last batch before this process's first.
    """

    def __init__(self, since: int) -> None:
        self.erased_log = ErasedLog(since)
        self.job: SaveJob | None = None  # the newest save that was cut
        self.reads = False  # whether it may still be running

    @property
    def running(self) -> bool:
        """Whether a save reads rows now. Any thread."""
        return self.job is not None and self.job.running

    def follow(self, job: SaveJob | None) -> None:
        """Let this save hear of rows from now on, and no other; between two batches."""
        self.job, self.reads = job, job is not None

    def overwriting(self, definition: TableDef, ids: Ids, versions: Ids, records: NDArray[np.uint8]) -> None:
        """Hear of rows that exist and are about to change: versions uint64 [n], whole records uint8 [n, record bytes]. Apply thread."""
        job = self.job
        if job is not None and job.running:
            job.keep(definition, ids, versions, records)
        else:
            self.reads = False  # it has ended

    def erased(self, definition: TableDef, ids: Ids, version: int) -> None:
        """Hear of rows that a batch has erased. Apply thread."""
        self.erased_log.add(version, definition.key, ids)


_POLL_S = 0.002


class Saver:
    """Begins one shard's saves, and says how far they are. Thread-safe.

    Args:
        shard: number.
        store: open.
        tables: the shard's.
        engine: whose batches are cut.
        observer: the engine's.
        committed_k: the k of the last batch that may have been acknowledged.
        restore: has rows restored that storage has lost.
        definitions: every table that the cluster has, also those that this shard has not met.
        folder: the shard's data folder.
        timeout_s: of one storage call.
    """

    def __init__(
        self,
        shard: int,
        store: Store,
        tables: Tables,
        engine: Engine,
        *,
        observer: SaveObserver,
        committed_k: Callable[[], int],
        restore: Restore,
        definitions: Callable[[], list[TableDef]],
        folder: Path,
        timeout_s: float,
    ) -> None:
        self._shard, self._store, self._tables, self._engine = shard, store, tables, engine
        self._definitions, self._folder, self._timeout_s = definitions, folder, timeout_s
        self._observer, self._committed_k, self._restore = observer, committed_k, restore
        self._finished: Fragment | None = None
        self._beginning = threading.Lock()
        self.figures = SaveFigures(folder)

    def begin(self, order: SaveOrder, deadline: Deadline) -> None:
        """Cut the shard and start to save it; called again with the same order, it goes on with the save begun or finished.

        Raises:
            CheckpointError: another save is under way, or the URL cannot be used.
            DeadlineExceededError: acknowledged pushes are not applied in time; nothing was begun.
        """
        with self._beginning:
            self._begin(order, deadline)

    def _begin(self, order: SaveOrder, deadline: Deadline) -> None:
        before = self._observer.job
        if before is not None and before.order == order and not before.error:
            return
        if before is not None and before.running:
            raise CheckpointError(f"shard {self._shard}: a save to {before.order.url} is under way; wait for its end")
        require_extra("pyarrow.parquet")
        storage = CheckpointStorage(order.url)
        if self._store.nodes.cluster_map.plan is not None:
            self._store.nodes.refresh_map(deadline)  # a move that has just ended is not said to go on
        self._refuse_in_mid_move()
        self._observer.follow(None)
        self._finished = _finished(storage, order, self._shard)
        if self._finished is not None:
            self.figures.begin(order.save_id, resumable=not order.weights_only)
            return
        definitions = self._definitions()
        self._wait_applied(deadline)
        with self._engine.batch_boundary.between(deadline):
            job = self._cut(order, definitions)
            self._observer.follow(job)  # from here on no slot leaves the shard, or comes
            try:
                self._refuse_in_mid_move()
            except CheckpointError:
                self._observer.follow(None)
                raise
        self.figures.begin(order.save_id, resumable=not order.weights_only)
        job.thread.start()

    def _refuse_in_mid_move(self) -> None:
        plan = self._store.nodes.cluster_map.plan
        if plan is not None and plan.kind == SHARDS:
            raise CheckpointError(
                f"shard {self._shard}: slots move between shards (phase {plan.phase}); nothing was saved. `kvemb moves` shows how "
                "far that is; save again when it is done."
            )

    def progress(self, save_id: str) -> tuple[str, str, int, int, int]:
        """Return (state, error, rows done, rows in all, bytes written) of a save; state is "running", "done", "failed" or "unknown"."""
        job, finished = self._observer.job, self._finished
        if finished is not None and finished.save_id == save_id:
            n_rows = sum(file.rows for file in finished.files)
            return "done", "", n_rows, n_rows, sum(file.size_bytes for file in finished.files)
        if job is None or job.order.save_id != save_id:
            return "unknown", "", 0, 0, 0
        state = "running" if job.running else "failed" if job.error else "done"
        return state, job.error, job.rows_done, job.n_rows, job.bytes_done

    def stop(self, timeout_s: float) -> None:
        """Give up the save under way, if any."""
        job = self._observer.job
        if job is not None:
            job.thread.stop(timeout_s)

    def _wait_applied(self, deadline: Deadline) -> None:
        """Wait until everything that was acknowledged before this call is applied."""
        k = self._committed_k()
        while self._engine.k < k:
            if deadline.expired:
                raise DeadlineExceededError(
                    f"shard {self._shard}: batch {k} is acknowledged, but only batch {self._engine.k} is applied yet"
                )
            time.sleep(_POLL_S)

    def _cut(self, order: SaveOrder, definitions: list[TableDef]) -> SaveJob:
        """Between two batches: take the index as it is. 16 bytes per row are copied, at the speed of memory."""
        cut = Cut(self._shard, self._engine.epoch, self._engine.k)
        if order.base_version > cut.version:
            raise CheckpointError(
                f"shard {self._shard}: the base was cut at {split_version(order.base_version)}, this shard is only at "
                f"{split_version(cut.version)}; it is not of this cluster's past. Save a full checkpoint."
            )
        tables = []
        for definition in definitions:
            state = self._tables.state(definition)
            erased = self._erased(definition, order.base_version) if order.incremental else np.empty(0, np.uint64)
            tables.append(TableCut(definition, state.step, *state.arrays(), erased))
        return SaveJob(order, cut, tables, self._store, self._folder, self._timeout_s, self._restore, self.figures)

    def _erased(self, definition: TableDef, base_version: int) -> Ids | None:
        """The ids erased since the base, None where that is not known; of slots that have gone since, their new shard tells."""
        erased = self._observer.erased_log.after(base_version, definition.key)
        if erased is None:
            return None
        own: NDArray[np.bool_] = self._store.nodes.cluster_map.shards_of(definition.placement.slots(erased)) == self._shard
        return erased[own]


def _finished(storage: CheckpointStorage, order: SaveOrder, shard: int) -> Fragment | None:
    """This shard's finished share of the very same save, if all of it is still there."""
    fragment = read_fragment(storage, shard)
    if fragment is None or not fragment.done or fragment.save_id != order.save_id:
        return None
    return fragment if all(storage.size(file.path) == file.size_bytes for file in fragment.files) else None
