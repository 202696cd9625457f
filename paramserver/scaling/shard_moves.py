"""A shard's part in moves of slots, put together: its job, its thread, and on shard 0 what carries plans."""

import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

from kvemb.client.all_shards import AllShards
from kvemb.errors import MoveRefusedError
from kvemb.protocol.verb import Handled
from kvemb.schema.move_plan import PHASES

from ..capability import Capability, ShardKernel
from ..recovery.shard_parts import state_of
from ..row_log.log_flush import from_storage
from ..row_log.state_file import ShardState
from .giver_questions import GiverQuestions
from .handover_work import HandoverWork
from .map_follower import MapFollower
from .move_carrier import MoveCarrier
from .move_handlers import MoveHandlers
from .phase_runner import PhaseRunner
from .slot_entries import GivenRows
from .slot_giver import SlotGiver, SlotOffers
from .slot_mover import SlotMover
from .slot_taker import SlotTaker

if TYPE_CHECKING:
    from kvemb.process.metrics import MetricFamilies


class Scaling(Capability):
    """The moves of one shard: of slots between nodes, and between shards."""

    verbs: ClassVar[Handled] = MoveHandlers.verbs

    def __init__(self, kernel: ShardKernel) -> None:
        super().__init__(kernel)
        parts = self._parts
        servers, look = parts.config.servers, threading.Event()  # look: at map and reports, which have changed
        self._shards = AllShards(servers.shards, tls=servers.tls, maps=parts.maps)
        rows = GivenRows(parts.tables, lambda: parts.engine.version)
        offers, nodes = SlotOffers(parts, rows), SlotMover(parts)
        self._figures = nodes.figures

        def state() -> ShardState:
            return state_of(parts, kernel.mark.now[1])

        shards = HandoverWork(
            kernel,
            SlotGiver(parts.tables, parts.runs, rows, state),
            SlotTaker(
                parts.tables,
                parts.runs,
                from_storage(parts.store, parts.timeout_s),
                state,
                epoch=lambda: parts.engine.epoch,
                ages=parts.ages,
                raise_step=kernel.committer.raise_step,
            ),
            offers=offers,
            questions=GiverQuestions(parts.shard, self._shards),
        )
        job = PhaseRunner(parts, kernel.flushes, nodes, shards, look.set)
        self.jobs = (job,)
        self._carrier = MoveCarrier(parts, self._shards, look) if parts.shard == 0 else None
        self._follower = MapFollower(parts, job, self._carrier, shards=self._shards, look=look, wake=kernel.wake)
        self._handlers = MoveHandlers(parts, self._carrier, offers, look)

    @property
    def answering(self) -> MoveHandlers:
        return self._handlers

    def still(self) -> AbstractContextManager[None]:
        if self._carrier is None:
            raise MoveRefusedError(f"shard {self._parts.shard} carries no moves; ask shard 0. Nothing was changed.")
        return self._carrier.no_shard_move()

    def serve(self) -> None:
        self._follower.thread.start()

    def stop(self, timeout_s: float) -> None:
        self._follower.thread.stop(timeout_s)

    def close(self) -> None:
        self._shards.close()

    def add_metrics(self, to: "MetricFamilies") -> None:
        cluster_map, moved = self._parts.maps.cluster_map, self._figures
        rows = [({"what": "copied"}, float(moved.copied)), ({"what": "erased"}, float(moved.erased))]
        to.counter("kvemb_shard_moved_rows_total", "Rows copied to other nodes, and erased on nodes that they have left.", rows)
        to.counter("kvemb_shard_moved_bytes_total", "Bytes of the records copied.", moved.copied_bytes)
        to.gauge("kvemb_shard_map_version", "Version of the cluster map that the shard follows.", cluster_map.version)
        now = "" if cluster_map.plan is None else cluster_map.plan.phase
        text = "Whether slots move, as this shard knows; by phase."
        to.gauge("kvemb_shard_moving", text, [({"phase": phase}, float(phase == now)) for phase in PHASES])
