"""The apply thread: takes committed batches, has the engine apply them, and answers. The only thread that changes rows."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import StorageError
from kvemb.process.metrics import BATCHES, SECONDS, BucketCounts
from kvemb.protocol.message_format import ChangedRowsBlock
from kvemb.protocol.messages import PushReply
from kvemb.schema.record import MAX_K, split_version

from ..engine.batch_records import PreparedRows
from ..engine.engine import Engine
from ..ingest.ingest import Ingest
from ..ingest.ingest_state import AbandonedError
from ..journal.write_ahead_log import AppliedMark
from ..model.batch import ReceivedPart, RefusedStep, RowsWork
from ..model.table_registry import Registry
from ..model.tables import Tables
from ..shard_process.owned_thread import OwnedThread
from .background import BackgroundWork
from .changed_rows import ChangedRowsFinder
from .committer import Committed, Handover


@dataclass(frozen=True)
class ApplyFigures:
    """Counted by the apply thread since the shard started; read by any thread."""

    seconds: BucketCounts = field(default_factory=lambda: BucketCounts(SECONDS))
    staleness: BucketCounts = field(default_factory=lambda: BucketCounts(BATCHES))

    def count_staleness(self, parts: Iterable[tuple[float, int]]) -> None:
        """Count the `staleness` of a batch's parts, of those that carry the versions of their pull."""
        for changed, elapsed in parts:
            if changed >= 0:
                self.staleness.add(elapsed)


def part_staleness(part: ReceivedPart, tables: Tables) -> tuple[float, int]:
    """Return the `staleness` of a part that is to be applied next. Apply thread only."""
    seen = [rows for rows in part.tables if len(rows.versions)]
    return staleness((rows.versions, tables.state(rows.definition).versions(rows.ids, keep=True)) for rows in seen)


def staleness(pairs: Iterable[tuple[NDArray[np.uint64], NDArray[np.uint64]]]) -> tuple[float, int]:
    """Compare the versions that a pull saw with those in force when its push is applied.

    Args:
        pairs: (seen, current) per table: uint64 [n] each, 0 = the row does not exist; seen is [0] where the push carried none.

    Returns:
        (fraction of rows that changed since, batches of the shard that went by). The fraction is -1.0 when no table carried versions.
        Batches are counted from the newest version that the pull saw to the newest one now, at least 1 where a row changed and 0 where
        none did: when the pull was made is not known, but it was behind the newest batch that it saw. (A row's own two versions would also
        count the batches before the pull that did not touch the row.) Where the rows are from several pulls, the newest counts. Where no
        row existed, it is 1.
    """
    n_rows = n_changed = newest_seen = newest_now = 0
    for seen, current in pairs:
        if len(seen) != len(current) or not len(seen):
            continue
        n_rows += len(seen)
        n_changed += int(np.count_nonzero(seen != current))
        newest_seen, newest_now = max(newest_seen, int(seen.max())), max(newest_now, int(current.max()))
    if not n_changed:
        return (0.0 if n_rows else -1.0), 0
    elapsed = (newest_now & MAX_K) - (newest_seen & MAX_K) if newest_seen else 1
    return n_changed / n_rows, max(1, elapsed)


log = logging.getLogger("paramserver")


class Applier:
    """Owns the thread that applies committed batches, one after the other, and answers.

    Told to end, it gives up the batch that waits for storage, if any.
    """

    def __init__(
        self,
        ingest: Ingest,
        engine: Engine,
        tables: Tables,
        handover: Handover,
        *,
        finder: ChangedRowsFinder,
        background: BackgroundWork,
        mark: AppliedMark,
        failed: Callable[[BaseException], None],
        registry: Registry,
    ) -> None:
        self._registry = registry
        self._ingest, self._engine, self._tables, self._handover = ingest, engine, tables, handover
        self._finder, self._background, self._failed = finder, background, failed
        self.thread = OwnedThread(self._run, name="kvemb-apply", wakes=(ingest.state.stop, handover.close))
        self._mark = mark
        self.figures = ApplyFigures()

    def _run(self) -> None:
        busy = False
        while not self._handover.closed:
            batch = self._handover.get(timeout_s=0.0 if busy else None if self._ingest.state.why_failed else self._background.due_in_s())
            busy = False
            if self._ingest.state.why_failed:
                continue  # its pushes have their answer
            try:
                if batch is not None:
                    started_s = time.perf_counter()
                    replies = self._apply(batch)
                    self.figures.seconds.add(time.perf_counter() - started_s)
                    self._mark.reach(split_version(batch.version)[1], batch.end)
                    self._ingest.outcomes.settle(batch.work, replies)
                busy = self._background.step(self.pause)
                self._ingest.state.trouble.storage_works()  # no task is tried again now
            except AbandonedError:
                return
            except Exception as error:
                self._failed(error)

    def _apply(self, batch: Committed) -> dict[int, PushReply]:
        """Apply one batch; return the reply of each part, by id() of its ticket."""
        work = batch.work
        if isinstance(work, RowsWork):
            begun_s = time.perf_counter()
            n_existed = self._engine.run(batch.batch, batch.version, self.pause, between=self._between).n_existed
            work.finish(n_existed, time.perf_counter() - begun_s)
            return {}
        pushes = work.pushes if isinstance(work, RefusedStep) else work
        parts = [(push, part) for push in pushes for part in push.parts]
        stale = [part_staleness(part, self._tables) for _, part in parts]
        self.figures.count_staleness(stale)
        k_and_epoch = split_version(batch.version)[::-1]
        holding = {id(push) for push, part in parts if part.prefetched}  # a trainer goes on when all parts of its push are released
        asked = [(part, of) for (push, part), of in zip(parts, stale, strict=True) if id(push) in holding]

        def release(computed: Sequence[PreparedRows]) -> None:
            replies = [self._reply(part, "released", of, k_and_epoch, self._changed_rows(part, computed)) for part, of in asked]
            self._ingest.outcomes.release([(part.ticket, reply) for (part, _), reply in zip(asked, replies, strict=True)])

        computed, between = release if asked else None, self._between
        applied = self._engine.run(batch.batch, batch.version, self.pause, computed=computed, between=between)
        if isinstance(work, RefusedStep):
            return {id(part.ticket): PushReply(part.ticket.sequence, "failed", error=dict(work.error)) for _, part in parts}
        replies = {}
        for (_, part), of in zip(parts, stale, strict=True):
            changed_rows = self._changed_rows(part, applied.written) if part.prefetched and not part.ticket.released else []
            replies[id(part.ticket)] = self._reply(part, "applied", of, k_and_epoch, changed_rows)
        return replies

    def _reply(
        self, part: ReceivedPart, state: str, stale: tuple[float, int], k_and_epoch: tuple[int, int], changed_rows: list[ChangedRowsBlock]
    ) -> PushReply:
        ticket, (changed, elapsed), (k, epoch) = part.ticket, stale, k_and_epoch
        known = self._registry.serial, ticket.held_back
        return PushReply(ticket.sequence, state, k, changed, elapsed, {}, epoch, changed_rows, *known)

    def _changed_rows(self, part: ReceivedPart, batch: Sequence[PreparedRows]) -> list[ChangedRowsBlock]:
        """Those of a part's prefetched rows that this batch changed."""
        return [] if not part.prefetched else self._finder.answer(part.prefetched, batch)

    def _between(self) -> None:
        """Between two pieces of a batch: record that storage has taken one, and stop if the shard was told to stop."""
        self._ingest.outcomes.written()
        if self.thread.told_to_end:
            raise AbandonedError

    def pause(self, error: StorageError, pause_s: float) -> None:
        """Wait before the next try of a write that storage did not take, and record why; apply thread only."""
        text = f"{type(error).__name__}: {error}"
        if self._ingest.state.trouble.storage_waits(text):
            log.warning("retrying because %s", text)
        if self.thread.wait(pause_s):
            raise AbandonedError from error
