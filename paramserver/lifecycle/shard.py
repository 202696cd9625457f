"""One running shard: owns its parts' threads, and takes them down in order. No protocol, no maths; `start` beside it makes it."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from kvemb.errors import ClosedError, FencedError, JournalFullError, KvembError, NodeLostError, StorageError, UnsafeNodeError
from kvemb.net.deadline import Deadline
from kvemb.process.extras import missing_for_checkpoints
from kvemb.stores.storage_kinds import open_store

from ..apply.applier import Applier
from ..apply.background import BackgroundWork, Job
from ..apply.changed_rows import ChangedRowsFinder
from ..apply.committer import Committer, Handover
from ..apply.shard_events import ShardEvents
from ..capabilities import CAPABILITIES
from ..capability import ShardKernel
from ..journal.write_ahead_log import AppliedMark
from ..recovery.high_water_mark import HighWaterMarkReporter
from ..recovery.shard_parts import ShardParts, state_of
from ..repair.node_watch import NodeWatch
from ..repair.repair_jobs import Comparisons, Repairs
from ..repair.scrub import Scrub
from ..row_log.log_flush import FlushSchedule, LogFlush, from_storage
from ..rpc.handlers import Handlers, answers_of
from ..rpc.shard_metrics import ShardMetrics
from ..rpc.table_drops import TableDrops
from ..shard_process.data_dir import mend
from .front import Front

_JOIN_S = 5.0
_LONG_START_BYTES = 256 << 20  # of the journal, which a start reads in a second (docs/adr/0095)
_FLUSH_S = 20.0  # at a stop: more than a start reads at most
_GRACE_S = 0.5  # for last replies on their way
log = logging.getLogger("paramserver")


class Shard:
    """A shard that serves; made by `start`."""

    def __init__(
        self, parts: ShardParts, front: Front, *, on_fenced: Callable[[], None] = lambda: None, on_load: Callable[[], None] | None = None
    ) -> None:
        self._parts, self._front, self._on_fenced, self.fenced, self.address = parts, front, on_fenced, False, front.address
        handover, self._mark = Handover(), AppliedMark(parts.engine.k, parts.fenced_log.journal.end)
        events = ShardEvents(parts.shard, parts.fenced_log, self._mark, parts.maps, parts.data, parts.claim.require)
        self._committer, self._flushes = self._make_committer(handover, events), self._make_flushes(handover)
        kernel = ShardKernel(parts, self._mark, events, self._committer, self._flushes, handover.wake, on_load, lambda: self._capabilities)
        self._capabilities = tuple(one(kernel) for one in CAPABILITIES)
        self._judges = [judge for one in self._capabilities for judge in one.judges]
        self._repairs, comparisons = Repairs(parts.repairer, handover.wake), Comparisons(parts.repairer, handover.wake, parts.timeout_s)
        scrub = Scrub(parts.repairer, parts.tables, parts.maps, timeout_s=parts.timeout_s)
        jobs = (*(job for one in self._capabilities for job in one.jobs), self._repairs, comparisons, self._flushes, scrub)
        self._applier = self._make_applier(handover, jobs)
        self._watch = self._make_watch()
        self._progress = HighWaterMarkReporter(parts)
        self._rolling_back = self._repairs.ask(parts.repairer.addresses) if parts.timeline.roll_back else None
        self._handlers, self._drops = Handlers(parts, self._repairs, comparisons, scrub, handover.wake), TableDrops(kernel)

    def _make_committer(self, handover: Handover, events: ShardEvents) -> Committer:
        parts = self._parts
        return Committer(
            parts.ingest,
            parts.tables,
            parts.fenced_log,
            handover,
            judges=lambda: self._judges,
            sync=parts.sync,
            epoch=parts.engine.epoch,
            k=parts.engine.k,
            maps=parts.maps,
            look=events.look,
            failed=self._failed,
        )

    def _make_flushes(self, handover: Handover) -> FlushSchedule:
        parts = self._parts
        return FlushSchedule(
            parts.fenced_log,
            LogFlush(parts.runs, parts.tables, from_storage(parts.store, parts.timeout_s), lambda: parts.engine.version),
            parts.tables,
            self._mark,
            repair=parts.repairer,
            state=partial(state_of, parts),
            max_bytes=parts.config.servers.journal_max_mb << 20,
            held=lambda: any(one.holds_journal for one in self._capabilities),
            wake=handover.wake,
        )

    def _make_applier(self, handover: Handover, jobs: Sequence[Job]) -> Applier:
        parts = self._parts
        return Applier(
            parts.ingest,
            parts.engine,
            parts.tables,
            handover,
            finder=ChangedRowsFinder(parts.store, parts.tables, parts.timeout_s),
            background=BackgroundWork(jobs),
            mark=self._mark,
            failed=self._failed,
            registry=parts.registry,
        )

    def _make_watch(self) -> NodeWatch:
        parts = self._parts
        return NodeWatch(
            parts.store,
            parts.timeout_s,
            evicted=self._evicted,
            unsafe=parts.ingest.fail_from_outside,
            moves_only=parts.config.storage.allow_row_loss,
            lost=self._repairs.ask,
            away=parts.ingest.attendance.excuse,
            copies=self._look_at_registry,
            whole=self._tell_progress,
            still_ours=parts.claim.require,
            looking=parts.ingest.state.trouble.looking,
            fenced=self._failed,
        )

    def _look_at_registry(self) -> None:
        """Shard 0 completes what was broken off; another one that holds pushes may not have been told that it is to hold them no more."""
        if self._parts.shard == 0 or self._parts.registry.altering:
            self._parts.registry.load()

    def serve(self) -> None:
        """Start the threads; returns at once."""
        self._applier.thread.start()
        self._committer.thread.start()
        capabilities = self._capabilities
        answers = answers_of(
            *((one.verbs, one) for one in (self._handlers, self._drops)), *((one.verbs, one.answering) for one in capabilities)
        )
        subscribed = {verb: stream for one in capabilities for verb, stream in one.serving.items()}
        figures = ShardMetrics(self._parts, self._applier.figures, self._watch, capabilities)
        self._front.serve(self._handlers.open_stream, answers, subscribed, figures)
        self._watch.look_for_lost_nodes()
        self._watch.start()
        for one in capabilities:
            one.serve()
        _log_serving(self._parts, self.address)

    def stop(self, drain_timeout_s: float) -> str:
        """Drain, save the state, end every thread; return "" or a description of unapplied work (the state is not saved then)."""
        self._front.stop_serving()
        self._watch.thread.stop(_JOIN_S)
        for one in self._capabilities:
            one.stop(_JOIN_S)
        deadline = Deadline.after(drain_timeout_s)
        drained = self._parts.ingest.backlog.drain(deadline)
        if drained and not self.fenced:
            self._shorten_start(deadline)
        ended = [one.thread.stop(_JOIN_S + self._parts.timeout_s) for one in (self._committer, self._applier)]
        trouble = "" if drained and all(ended) else self._trouble()
        if not trouble:
            trouble = self._save()
        if trouble and not self.fenced:
            self._parts.data.leave_words(f"not drained: {trouble}")
        for one in self._capabilities:
            one.close()
        self._front.close(_GRACE_S)
        self._parts.store.close()
        self._parts.fenced_log.journal.close()
        self._parts.runs.close()
        self._parts.data.close()
        return trouble

    def _tell_progress(self) -> None:
        """Note on the nodes how far the shard is; while rows are still to be set back, the older note must refuse another start."""
        ticket = self._rolling_back
        if ticket is None or (ticket.finished and ticket.error is None):
            self._progress.tell()

    def _evicted(self, address: str, error: NodeLostError) -> None:
        storage = self._parts.config.storage
        try:
            with open_store(storage, role="trainer") as probe:  # a new connection checks the settings
                probe.open(Deadline.after(storage.timeout_s))
        except UnsafeNodeError as unsafe:
            self._parts.ingest.fail_from_outside(UnsafeNodeError(f"{error} {unsafe}"))
            return
        except StorageError:
            pass  # other shards may be repairing already
        self._repairs.ask({address})

    def _trouble(self) -> str:
        text = self._parts.ingest.state.why_failed or self._parts.ingest.backlog.describe()
        if self.fenced:
            return text
        return f"{text.rstrip('.')}. Accepted pushes are in the journal: the next start applies them."

    def _shorten_start(self, deadline: Deadline) -> None:
        """Flush where the next start would read the journal for long, within the time to drain. A flush that is cut off leaves nothing."""
        self._flushes.flush_behind(_LONG_START_BYTES).wait(min(_FLUSH_S, deadline.remaining_s()))

    def _save(self) -> str:
        # Not the journal's end: a step that was journaled while the threads were told to end is replayed at the next start.
        try:
            self._parts.fenced_log.commit()  # else a folder that was put in the place of ours would get our state
            self._parts.runs.publish([], state_of(self._parts, self._mark.now[1]))
        except ClosedError:
            return ""  # it has stopped before
        except JournalFullError as error:
            return f"everything is applied, but the state was not saved: {error}"
        except OSError as error:
            return f"everything is applied, but the state could not be saved in {self._parts.data.path}: {error.strerror}; {mend(error)}."
        except FencedError as error:
            return str(error)
        log.info("drained; state saved in %s at k %d", self._parts.data.path, self._parts.engine.k)
        return ""

    def _failed(self, error: BaseException) -> None:
        log.error("failed because %s: %s", type(error).__name__, error, exc_info=not isinstance(error, KvembError))
        self._parts.ingest.outcomes.fail(error)
        self._front.stop_serving()
        if isinstance(error, FencedError):
            self.fenced = True
            self._on_fenced()


def _log_serving(parts: ShardParts, address: str) -> None:
    shard, cluster_map = parts.shard, parts.maps.cluster_map
    if lacks := missing_for_checkpoints():
        log.warning("%s", lacks)
    log.info("serving on %s: %d shards, epoch %d, k %d", address, len(cluster_map.shard_numbers), parts.engine.epoch, parts.engine.k)
    if shard >= cluster_map.n_shards:
        log.info("this shard is none of the cluster's yet: `kvemb shards add` gives it its share")
    elif shard not in cluster_map.shard_numbers:
        log.info(
            "this shard has left the cluster, or waits to join it: it answers for what it took, and may be stopped when no trainer waits "
            "for it; `kvemb shards add` gives it a share again"
        )
