"""One running shard: owns its parts' threads, and takes them down in order. No protocol, no maths; `start` beside it makes it."""

import logging
import platform
import threading
from collections.abc import Callable
from functools import partial

from kvemb.checkpoint.load import META_NAME as LOAD_NAME
from kvemb.checkpoint.load import newest_decision
from kvemb.client.all_shards import AllShards
from kvemb.coordination.registry_format import META_NAME
from kvemb.coordination.shard_notes import ShardNote
from kvemb.coordination.shard_owners import newest_owner, owner_name
from kvemb.errors import ClosedError, FencedError, JournalFullError, KvembError, NodeLostError, StorageError, UnsafeNodeError
from kvemb.net.deadline import Deadline
from kvemb.process.extras import missing_for_checkpoints
from kvemb.stores.storage_kinds import open_store
from kvemb.stores.store import Store

from ..apply.applier import Applier
from ..apply.background import BackgroundWork
from ..apply.changed_rows import ChangedRowsFinder
from ..apply.committer import Committer, Handover
from ..checkpoint.loader import newest_undone, note_carried_out
from ..checkpoint.saver import Saver
from ..eviction.evictor import EvictionPorts, Evictor
from ..feed.feed_events import FeedEvents
from ..ingest.admission import Admissions
from ..journal.write_ahead_log import AppliedMark
from ..moves.giver_questions import GiverQuestions
from ..moves.handover_work import HandoverPorts, HandoverWork
from ..moves.left_sessions import LeftSessions
from ..moves.map_follower import MapFollower
from ..moves.move_carrier import MoveCarrier
from ..moves.move_planner import MovePlanner
from ..moves.phase_runner import PhaseRunner
from ..moves.slot_entries import GivenRows
from ..moves.slot_giver import SlotGiver, SlotOffers
from ..moves.slot_mover import MoveFigures, SlotMover
from ..moves.slot_taker import SlotTaker
from ..recovery.high_water_mark import HighWaterMarkReporter
from ..recovery.shard_parts import ShardParts, state_of
from ..repair.node_watch import NodeWatch
from ..repair.scrub import Scrub
from ..row_log.log_flush import FlushSchedule, LogFlush, from_storage, without_cache
from ..row_log.state_file import ShardState
from ..rpc.feed_streams import FeedStreams
from ..rpc.handlers import CheckpointHandlers, Handlers, LoadPorts
from ..rpc.move_handlers import MoveHandlers
from ..rpc.shard_metrics import ShardMetrics
from ..shard_process.data_dir import DataDir, mend
from .front import Front
from .join_cluster import keep_map

_JOIN_S = 5.0
_LONG_START_BYTES = 256 << 20  # of the journal, which a start reads in a second (docs/adr/0095)
_FLUSH_S = 20.0  # at a stop: more than a start reads at most
_GRACE_S = 0.5  # for last replies on their way
log = logging.getLogger("paramserver")


class Shard:
    """A shard that serves; made by `start`."""

    def __init__(
        self,
        parts: ShardParts,
        store: Store,
        data: DataDir,
        front: Front,
        *,
        on_fenced: Callable[[], None] = lambda: None,
        on_load: Callable[[], None] | None = None,
    ) -> None:
        handover, self._mark = Handover(), AppliedMark(parts.engine.k, parts.fenced_log.journal.end)
        self._parts, self._store, self._data, self._on_fenced = parts, store, data, on_fenced
        sync, timeout_s, engine = parts.config.servers.mode == "sync", parts.config.storage.timeout_s, parts.engine
        self.fenced = False
        self._shards = AllShards(parts.config.servers.shards, tls=parts.config.servers.tls, maps=store.nodes)
        look = threading.Event()  # at map and reports: set where they have changed
        rows = GivenRows(parts.tables, lambda: engine.version)
        offers = SlotOffers(store.nodes, rows, parts.shard, lambda: engine.epoch, parts.ingest.attendance.members)
        self._moved = MoveFigures()
        self._events = FeedEvents(parts.shard, parts.fenced_log, self._mark, parts.maps, data, parts.claim.require)
        self._mover = self._make_mover(offers, rows, look.set)
        self._evictor = self._make_evictor()
        self._background = self._make_background(handover.wake)
        self._applier = Applier(
            parts.ingest,
            engine,
            parts.tables,
            handover,
            finder=ChangedRowsFinder(store, parts.tables, timeout_s),
            background=self._background,
            mark=self._mark,
            failed=self._failed,
            tables_serial=lambda: parts.registry.serial,
        )
        versions = {"epoch": engine.epoch, "k": engine.k}
        admissions = Admissions(parts.registry.policies, parts.tables, sync=sync)
        self._committer = Committer(
            parts.ingest,
            parts.tables,
            parts.fenced_log,
            handover,
            admissions=admissions,
            sync=sync,
            **versions,
            maps=parts.maps,
            look=self._events.look,
            failed=self._failed,
        )
        self._saver = Saver(parts, store.nodes, lambda: self._committer.k, self._background.flush_behind, data.path)
        undone = partial(newest_undone, store, data, parts.config.storage.timeout_s)
        loads = LoadPorts(undone, partial(self._background.flush_behind, 0), on_load, parts.shard)
        checkpoints = CheckpointHandlers(self._saver, parts.registry, store.nodes, loads)
        still_ours = parts.claim.require
        keep = partial(keep_map, data, store.nodes, check=still_ours)
        planner = MovePlanner(store, self._metas, parts.config.servers.shards, parts.registry, timeout_s)
        left = LeftSessions(data, self._shards, still_ours)
        carrier = (
            MoveCarrier(store, keep=keep, planner=planner, left=left, sync=sync, changed=look.set, timeout_s=timeout_s)
            if parts.shard == 0
            else None
        )
        moves = MoveHandlers(parts, store, carrier, offers, look.set)
        feeds = FeedStreams(parts, self._mark, self._events)
        self._front, self._handlers = front, Handlers(parts, self._background, self._evictor, moves, checkpoints, feeds)
        self._follower = MapFollower(
            store,
            parts.shard,
            lambda: engine.epoch,
            self._mover,
            keep=keep,
            wake=handover.wake,
            look=look,
            shards=self._shards,
            carry=None if carrier is None else carrier.carry,
            timeout_s=timeout_s,
        )
        self._watch = NodeWatch(
            store,
            timeout_s,
            evicted=self._evicted,
            unsafe=parts.ingest.fail_from_outside,
            moves_only=parts.config.storage.allow_row_loss,
            lost=self._background.ask_repair,
            away=parts.ingest.attendance.excuse,
            copies=self._look_at_registry,
            whole=self._tell_progress,
            still_ours=still_ours,
            looking=parts.ingest.state.trouble.looking,
            fenced=self._failed,
        )
        about = ShardNote(engine.epoch, 0, parts.config.cluster, f"{platform.node()}:{data.path.resolve()}")
        self._progress = HighWaterMarkReporter(store, parts.shard, about, k=lambda: engine.k, timeout_s=timeout_s)
        self._rolling_back = self._background.ask_repair(parts.repairer.addresses) if parts.timeline.roll_back else None
        self._figures = ShardMetrics(
            parts,
            self._applier.figures,
            self._saver.figures,
            saving=lambda: self._saver.running,
            nodes=lambda: self._watch.seen,
            moves=self._moved,
            evictions=self._evictor,
            admissions=admissions,
        )
        self.address = front.address

    def _look_at_registry(self) -> None:
        """Shard 0 completes what was broken off; another one that holds pushes may not have been told that it is to hold them no more."""
        if self._parts.shard == 0 or self._parts.registry.altering:
            self._parts.registry.load()

    def serve(self) -> None:
        """Start the threads; returns at once."""
        self._applier.thread.start()
        self._committer.thread.start()
        self._front.serve(self._handlers, self._figures)
        self._watch.look_for_lost_nodes()
        self._watch.start()
        self._follower.thread.start()
        _log_serving(self._parts, self.address)

    def stop(self, drain_timeout_s: float) -> str:
        """Drain, save the state, end every thread; return "" or a description of unapplied work (the state is not saved then)."""
        self._front.stop_serving()
        self._watch.thread.stop(_JOIN_S)
        self._follower.thread.stop(_JOIN_S)
        self._saver.stop(_JOIN_S)
        deadline = Deadline.after(drain_timeout_s)
        drained = self._parts.ingest.backlog.drain(deadline)
        if drained and not self.fenced:
            self._shorten_start(deadline)
        ended = [one.thread.stop(_JOIN_S + self._parts.config.storage.timeout_s) for one in (self._committer, self._applier)]
        trouble = "" if drained and all(ended) else self._trouble()
        if not trouble:
            trouble = self._save()
        if trouble and not self.fenced:
            self._data.leave_words(f"not drained: {trouble}")
        self._front.close(_GRACE_S)
        self._shards.close()
        self._store.close()
        self._parts.fenced_log.journal.close()
        self._parts.runs.close()
        self._data.close()
        return trouble

    def _make_mover(self, offers: SlotOffers, rows: GivenRows, done: Callable[[], None]) -> PhaseRunner:
        parts, store, engine = self._parts, self._store, self._parts.engine
        timeout_s = parts.config.storage.timeout_s
        nodes = SlotMover(store, parts.tables, parts.repairer, self._moved, timeout_s=timeout_s)
        giver = SlotGiver(parts.tables, parts.runs, rows, self._state_now)
        taker = SlotTaker(
            parts.tables,
            parts.runs,
            from_storage(store, timeout_s),
            self._state_now,
            epoch=lambda: engine.epoch,
            ages=parts.ages,
            raise_step=lambda state, step: self._committer.raise_step(state, step),
        )
        ports = HandoverPorts(
            rise=lambda above: parts.claim.rise_above(above, self._risen),
            quiet=lambda: parts.ingest.backlog.quiet,
            saving=lambda: self._saver.running,
            steps=parts.ingest.steps.follow if parts.config.servers.mode == "sync" else None,
            expect=parts.ingest.steps.expect,
            joins=self._joins,
            leaves=parts.ingest.gate.leaves,
            flipped=self._events.look,
        )
        questions = GiverQuestions(parts.shard, self._shards)
        shards = HandoverWork(store, parts.shard, giver, taker, offers=offers, questions=questions, ports=ports)
        return PhaseRunner(store.nodes, nodes, shards, done)

    def _joins(self) -> None:
        """Begin to take rows; note that the newest load is carried out, since rows that come are loaded already."""
        copies = self._store.values.get(LOAD_NAME, Deadline.after(self._parts.config.storage.timeout_s))
        if (decision := newest_decision(copies, self._store.values.copies_on(LOAD_NAME))) is not None:
            note_carried_out(self._data, decision.serial, self._parts.claim.require)
            self._parts.ingest.loads.carried_out(decision.serial)
        self._parts.ingest.gate.joins()

    def _risen(self, epoch: int) -> None:
        """Write in a higher epoch from now on."""
        self._parts.engine.rise(epoch, self._committer.rise(epoch))
        log.info("epoch %d from now on, above that of the shards whose slots come", epoch)

    def _make_background(self, wake: Callable[[], None]) -> BackgroundWork:
        parts, timeout_s = self._parts, self._parts.config.storage.timeout_s
        scrub = Scrub(parts.repairer, parts.tables, lambda: len(parts.maps.cluster_map.shard_numbers), timeout_s=timeout_s)
        evictor = self._evictor
        return BackgroundWork(parts.repairer, self._flushes(), scrub, wake, mover=self._mover, evictor=evictor, timeout_s=timeout_s)

    def _make_evictor(self) -> Evictor:
        parts, timeout_s = self._parts, self._parts.config.storage.timeout_s
        ports = EvictionPorts(
            shard=parts.shard,
            policy=lambda definition: parts.registry.policies(definition.key).eviction,
            send=parts.ingest.evict,
            read=from_storage(self._store, timeout_s),
            read_stored=lambda table, ids: without_cache(self._store, timeout_s)(table, ids),
            applied_k=lambda: parts.engine.k,
            slot_shards=lambda: parts.maps.cluster_map.slot_shards,
        )
        return Evictor(parts.tables, parts.ages, ports)

    def _metas(self) -> dict[str, bytes]:
        """The small values that a node which joins gets copies of."""
        found, timeout_s = {META_NAME: self._parts.registry.encoded}, self._parts.config.storage.timeout_s
        for shard in range(self._store.nodes.cluster_map.n_shards):
            name = owner_name(shard)
            owner = newest_owner(self._store.values.get(name, Deadline.after(timeout_s)), shard, self._store.values.copies_on(name))
            if owner is not None:
                found[name] = owner.encode()
        return found

    def _tell_progress(self) -> None:
        """Note on the nodes how far the shard is; while rows are still to be set back, the older note must refuse another start."""
        ticket = self._rolling_back
        if ticket is None or (ticket.finished and ticket.error is None):
            self._progress.tell()

    def _flushes(self) -> FlushSchedule:
        parts = self._parts
        read = from_storage(self._store, parts.config.storage.timeout_s)
        return FlushSchedule(
            parts.fenced_log,
            LogFlush(parts.runs, parts.tables, read, lambda: parts.engine.version),
            parts.tables,
            state=lambda position: state_of(parts, position),
            max_bytes=parts.config.servers.journal_max_mb << 20,
            held=lambda: self._saver.reads_journal,
        )

    def _state_now(self) -> ShardState:
        """Return the state as of the last batch applied; between two batches, apply thread only."""
        position = self._background.applied
        assert position is not None
        return state_of(self._parts, position)

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
        self._background.ask_repair({address})

    def _trouble(self) -> str:
        text = self._parts.ingest.state.why_failed or self._parts.ingest.backlog.describe()
        if self.fenced:
            return text
        return f"{text.rstrip('.')}. Accepted pushes are in the journal: the next start applies them."

    def _shorten_start(self, deadline: Deadline) -> None:
        """Flush where the next start would read the journal for long, within the time to drain. A flush that is cut off leaves nothing."""
        self._background.flush_behind(_LONG_START_BYTES).wait(min(_FLUSH_S, deadline.remaining_s()))

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
            return f"everything is applied, but the state could not be saved in {self._data.path}: {error.strerror}; {mend(error)}."
        except FencedError as error:
            return str(error)
        log.info("drained; state saved in %s at k %d", self._data.path, self._parts.engine.k)
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
