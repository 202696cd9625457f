"""One shard's answers to saves and loads: messages in, messages out."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from kvemb.checkpoint.checkpoint_messages import (
    LOAD_CHECKPOINT,
    SAVE_CHECKPOINT,
    SAVE_STATUS,
    LoadRequest,
    SaveReply,
    SaveRequest,
    SaveStatusRequest,
)
from kvemb.checkpoint.load import Decision
from kvemb.errors import CheckpointError, ParameterServerError
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import Empty
from kvemb.protocol.verb import Handled
from kvemb.schema.move_plan import refuses
from kvemb.stores.store_nodes import StoreNodes

from ..capability import Capability, ShardKernel, StartStep
from ..engine.storage_pace import Pause
from ..model.table_registry import Registry
from ..recovery.shard_parts import StartingShard
from .loader import Loader, check, newest_undone, note_newest_carried_out
from .save_job import SaveOrder
from .saver import Saver

if TYPE_CHECKING:
    from kvemb.process.metrics import MetricFamilies

_DECIDED_WITHIN_S = 120.0  # of its check: two calls of a client; after that it is gone


@dataclass(frozen=True)
class LoadPorts:
    """What a load asks of the rest of the shard.

    Args:
        undone: returns the load that was decided and is still to be carried out here, if there is one.
        flush: has the shard flush to its row log; the event is set when it is done.
        on_load: called once when the shard is to start again, to load; None where no caller would start it.
        shard: number.
    """

    undone: Callable[[], Decision | None]
    flush: Callable[[], threading.Event]
    on_load: Callable[[], None] | None
    shard: int


class CheckpointHandlers:
    """Answers one shard's saves and loads. Thread-safe."""

    def __init__(self, saver: Saver, registry: Registry, nodes: StoreNodes, loads: LoadPorts) -> None:
        self._saver, self._registry, self._nodes, self._loads = saver, registry, nodes, loads
        self._lock, self._deciding = threading.Lock(), ("", 0.0)  # the load that was checked last, and until when its decision is awaited

    def save(self, request: SaveRequest, deadline: Deadline) -> SaveReply:
        """Cut the shard and begin to save it; answered once it is cut."""
        order = SaveOrder(request.save_id, request.url, request.base_version, request.weights_only)
        self._saver.begin(order, deadline.within(request.timeout_s))
        return SaveReply(*self._saver.progress(request.save_id))

    def status(self, request: SaveStatusRequest, deadline: Deadline) -> SaveReply:
        """Say how far a save is; hear that all of it is whole."""
        if request.whole:
            self._saver.figures.end(request.save_id, done=True)
        return SaveReply(*self._saver.progress(request.save_id))

    def load(self, request: LoadRequest, deadline: Deadline) -> Empty:
        """Check whether this shard could load a checkpoint, or begin; it stops serving then and starts again."""
        if self._loads.on_load is None:
            raise ParameterServerError("this shard is not run by `kvemb shard`: stop and start it to load")
        if self._nodes.cluster_map.plan is not None:
            self._nodes.refresh_map(deadline)  # a move that has just ended is not said to go on
        if why := refuses(self._nodes.cluster_map.plan):
            raise CheckpointError(why)
        if request.begin:
            self._loads.on_load()
        elif self._awaits_decision(request):
            check(request.url, request.save_id, self._registry, request.tables)
            if self._registry.altering:
                raise CheckpointError(f"{self._registry.unfinished}; nothing was changed. Load when that is over")
            self._require_covered(request.tables)
            if request.tables:  # of the other tables the log is all that the load leaves; what comes behind this is flushed at the start
                self._loads.flush().wait(deadline.remaining_s() / 2)
        return Empty()

    def _awaits_decision(self, request: LoadRequest) -> bool:
        """Let one load at a time be between check and decision, where another one would displace it; False where it gives up.

        Shard 0 does: where several did, each of two loads might be refused by one of them.
        """
        with self._lock:
            load_id, until_s = self._deciding
            ours = load_id == request.load_id
            if not request.url:
                self._deciding = ("", 0.0) if ours else self._deciding
                return False
            if self._loads.shard == 0 and not ours and time.monotonic() < until_s:
                raise CheckpointError("another load is about to be decided; nothing was changed. Load again when that one is done")
            self._deciding = request.load_id, time.monotonic() + _DECIDED_WITHIN_S
            return True

    def _require_covered(self, tables: Sequence[str]) -> None:
        """Refuse a load of some tables that would take the place of one of others, which not all shards have carried out."""
        undone = self._loads.undone() if tables else None
        if undone is not None and not (undone.tables and set(undone.tables) <= set(tables)):
            what = f"of table {', '.join(undone.tables)}" if undone.tables else "of all tables"
            raise CheckpointError(
                f"a load {what} from {undone.url} is decided and not carried out here; nothing was changed. Start this shard again, which "
                "carries it out, and load then"
            )

    verbs: ClassVar[Handled] = {SAVE_CHECKPOINT: save, SAVE_STATUS: status, LOAD_CHECKPOINT: load}


class ShardCheckpoints(Capability):
    """Saves and loads of one shard."""

    verbs: ClassVar[Handled] = CheckpointHandlers.verbs

    def __init__(self, kernel: ShardKernel) -> None:
        super().__init__(kernel)
        parts, flush = self._parts, kernel.flushes.flush_behind
        self._saver = Saver(parts, parts.maps, lambda: kernel.committer.k, flush, parts.data.path)
        undone = partial(newest_undone, parts.store, parts.data, parts.timeout_s)
        self._handlers = CheckpointHandlers(
            self._saver, parts.registry, parts.maps, LoadPorts(undone, partial(flush, 0), kernel.on_load, parts.shard)
        )

    @classmethod
    def at_start(cls, shard: StartingShard, pause: Pause) -> StartStep:
        return Loader(shard, pause)

    @property
    def answering(self) -> CheckpointHandlers:
        return self._handlers

    @property
    def holds_journal(self) -> bool:
        return self._saver.reads_journal

    @property
    def holds_slots(self) -> bool:
        return self._saver.running  # its cut would be of one shard, and its rows of another

    def joins(self) -> None:
        note_newest_carried_out(self._parts)

    def stop(self, timeout_s: float) -> None:
        self._saver.stop(timeout_s)

    def add_metrics(self, to: "MetricFamilies") -> None:
        saves = self._saver.figures
        ended = [({"outcome": "done"}, float(saves.done)), ({"outcome": "failed"}, float(saves.failed))]
        text = "Saves that the shard had its share in and that have ended, by all its processes together."
        to.counter("kvemb_shard_saves_total", text, ended)
        to.gauge("kvemb_shard_saving", "Whether the shard saves a checkpoint now.", self._saver.running)
        last: list[tuple[dict[str, str], float]] = [({}, saves.last_done_s)] if saves.last_done_s else []
        to.gauge("kvemb_shard_last_save_timestamp_seconds", "When a checkpoint with state was last finished.", last)
        to.gauge("kvemb_shard_created_timestamp_seconds", "When the shard's data folder was made, as of the first start.", saves.created_s)
