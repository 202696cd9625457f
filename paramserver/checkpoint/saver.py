"""Saves of one shard: takes the cut between two batches.

One save at a time. The work on rows is in `save_job`. The client puts the shards' shares together (`kvemb.checkpoint.save`).

Before the cut the shard flushes to its row log, so that little is left for the journal to bring forward.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import Cut
from kvemb.checkpoint.writer import Fragment, read_fragment
from kvemb.errors import BaseOutdatedError, CheckpointError, ConfigError, DeadlineExceededError
from kvemb.net.deadline import Deadline
from kvemb.process.extras import missing_for_checkpoints
from kvemb.schema.move_plan import refuses
from kvemb.schema.record import split_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.store_nodes import StoreNodes

from ..model.tables import all_of
from ..recovery.shard_parts import ShardParts
from ..row_log import Reconstructor
from .save_job import SaveFigures, SaveJob, SaveOrder, TableCut

Ids = NDArray[np.uint64]
_POLL_S = 0.002


class Saver:
    """Begins one shard's saves, and says how far they are. Thread-safe."""

    def __init__(
        self, parts: ShardParts, nodes: StoreNodes, committed_k: Callable[[], int], flush: Callable[[], threading.Event], folder: Path
    ) -> None:
        self._parts, self._nodes, self._committed_k, self._flush = parts, nodes, committed_k, flush
        self._job: SaveJob | None = None  # the newest save that was cut
        self._finished: Fragment | None = None
        self._beginning = threading.Lock()
        self._folder, self.figures = folder.resolve(), SaveFigures(folder)

    @property
    def running(self) -> bool:
        """Whether a save is under way."""
        return self._job is not None and self._job.running

    @property
    def reads_journal(self) -> bool:
        """Whether a save needs the journal as it was at its cut."""
        return self._job is not None and self._job.reads_journal

    def begin(self, order: SaveOrder, deadline: Deadline) -> None:
        """Cut the shard and start to save it; called again with the same order, it goes on with the save begun or finished.

        A save under way to the same URL is given up for it.

        Raises:
            DeadlineExceededError: acknowledged pushes are not applied in time; nothing was begun.
        """
        with self._beginning:
            self._begin(order, deadline)

    def _begin(self, order: SaveOrder, deadline: Deadline) -> None:
        before = self._job
        if before is not None and before.order == order and not before.error:
            return
        # One to the same place was begun anew, since its command has ended: nothing comes of the former any more.
        if before is not None and before.running and not (before.order.url == order.url and before.thread.stop(deadline.remaining_s() / 2)):
            raise CheckpointError(f"shard {self._parts.shard}: a save to {before.order.url} is under way; wait for its end")
        if lacks := missing_for_checkpoints():
            raise ConfigError(f"shard {self._parts.shard}: {lacks}")
        storage = CheckpointStorage(order.url)
        _refuse_data_folders(order.url, self._folder.parent)
        if self._nodes.cluster_map.plan is not None:
            self._nodes.refresh_map(deadline)  # a move that has just ended is not said to go on
        self._refuse_in_mid_move()
        self._job = None
        self._finished = _finished(storage, order, self._parts.shard)
        if self._finished is None:
            definitions = self._parts.registry.reloaded()
            self._wait_applied(deadline)
            self._flush().wait(deadline.remaining_s() / 2)  # where it takes longer, more is brought forward by the journal
            with self._parts.engine.batch_boundary.between(deadline):
                self._job = self._cut(order, definitions)  # from here on no slot leaves the shard, or comes
                try:
                    self._refuse_in_mid_move()
                except CheckpointError:
                    self._job = None
                    raise
        self.figures.begin(order.save_id, resumable=not order.weights_only)
        if self._job is not None:
            self._job.thread.start()

    def _refuse_in_mid_move(self) -> None:
        if why := refuses(self._nodes.cluster_map.plan):
            raise CheckpointError(f"shard {self._parts.shard}: {why}")

    def progress(self, save_id: str) -> tuple[str, str, int, int, int]:
        """Return (state, error, rows done, rows in all, bytes written) of a save; state is "running", "done", "failed" or "unknown"."""
        job, finished = self._job, self._finished
        if finished is not None and finished.save_id == save_id:
            n_rows = sum(file.rows for file in finished.files)
            return "done", "", n_rows, n_rows, sum(file.size_bytes for file in finished.files)
        if job is None or job.order.save_id != save_id:
            return "unknown", "", 0, 0, 0
        state = "running" if job.running else "failed" if job.error else "done"
        return state, job.error, job.rows_done, job.n_rows, job.bytes_done

    def stop(self, timeout_s: float) -> None:
        """Give up the save under way, if any."""
        job = self._job
        if job is not None:
            job.thread.stop(timeout_s)

    def _wait_applied(self, deadline: Deadline) -> None:
        """Wait until everything that was acknowledged before this call is applied."""
        k, engine = self._committed_k(), self._parts.engine
        while engine.k < k:
            if deadline.expired:
                raise DeadlineExceededError(
                    f"shard {self._parts.shard}: batch {k} is acknowledged, but only batch {engine.k} is applied yet"
                )
            time.sleep(_POLL_S)

    def _cut(self, order: SaveOrder, definitions: list[TableDef]) -> SaveJob:
        """Between two batches: note which rows are newer than the row log, and take that as it is."""
        parts, slots = self._parts, self._nodes.cluster_map.slot_shards == self._parts.shard
        # Every acknowledged batch is applied; rows that the shard took over have versions up to its own epoch.
        cut, view = Cut(parts.shard, parts.engine.epoch, parts.engine.k), parts.runs.view
        based = split_version(order.base_version)
        if order.base_version > cut.version or (based[0] < cut.epoch and based[1] > parts.timeline.k):
            raise BaseOutdatedError(
                f"shard {parts.shard}: the base was cut at {based}, this shard is at {split_version(cut.version)}, and its epoch began "
                f"behind batch {parts.timeline.k}; it is not of this cluster's past. Save a full checkpoint."
            )
        tables = []
        for definition in definitions:
            state, logged = parts.tables.state(definition), parts.saved.now.of(definition)
            late = all_of(state.portions(above=view.cut))
            tables.append(TableCut(state, state.step, state.n_rows, late, all_of(state.gone()), order.base_version >= logged.erased_since))
        reconstruct = Reconstructor(lambda: view, parts.fenced_log.journal, parts.registry.find_key).records
        return SaveJob(order, cut, tables, view, reconstruct, slots=slots, figures=self.figures)


def _refuse_data_folders(url: str, data_dir: Path) -> None:
    """Refuse what lies in a shard's own folder, this one's or, as far as this machine has it, another's: all shards refuse alike."""
    for folder in Path(url).resolve().parents if "://" not in url else ():
        if folder.parent == data_dir and folder.name.startswith("shard-"):
            raise CheckpointError(
                f"{url}: lies in the data folder of a shard ({folder}): what loses the one loses the other. Save to a folder outside "
                "that all shards reach, or to a store (s3://bucket/run/step-1000)"
            )


def _finished(storage: CheckpointStorage, order: SaveOrder, shard: int) -> Fragment | None:
    """This shard's finished share of the very same save, if all of it is still there."""
    fragment = read_fragment(storage, shard)
    if fragment is None or not fragment.done or fragment.save_id != order.save_id:
        return None
    return fragment if all(storage.size(file.path) == file.size_bytes for file in fragment.files) else None
