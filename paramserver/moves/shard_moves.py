"""A shard's part in moves of slots, put together: its job, its thread, and on shard 0 what carries plans."""

import threading
from collections.abc import Callable

from kvemb.client.all_shards import AllShards

from ..apply.committer import Committer
from ..checkpoint.saver import Saver
from ..feed.feed_events import FeedEvents
from ..journal.write_ahead_log import AppliedMark
from ..recovery.shard_parts import ShardParts, state_of
from ..row_log.log_flush import FlushSchedule, from_storage
from ..row_log.state_file import ShardState
from .giver_questions import GiverQuestions
from .handover_work import HandoverWork
from .map_follower import MapFollower
from .move_carrier import MoveCarrier
from .phase_runner import PhaseRunner
from .slot_entries import GivenRows
from .slot_giver import SlotGiver, SlotOffers
from .slot_mover import SlotMover
from .slot_taker import SlotTaker


class ShardMoves:
    """The moves of one shard.

    Attributes:
        look: at map and reports: set where they have changed.
        carrier: of plans; shard 0 has it.
    """

    def __init__(
        self,
        parts: ShardParts,
        mark: AppliedMark,
        *,
        committer: Committer,
        flushes: FlushSchedule,
        saver: Saver,
        events: FeedEvents,
        wake: Callable[[], None],
    ) -> None:
        servers = parts.config.servers
        self.shards, self.look = AllShards(servers.shards, tls=servers.tls, maps=parts.maps), threading.Event()
        rows = GivenRows(parts.tables, lambda: parts.engine.version)
        self.offers, nodes = SlotOffers(parts, rows), SlotMover(parts)
        self.figures = nodes.figures

        def state() -> ShardState:
            return state_of(parts, mark.now[1])

        shards = HandoverWork(
            parts,
            SlotGiver(parts.tables, parts.runs, rows, state),
            SlotTaker(
                parts.tables,
                parts.runs,
                from_storage(parts.store, parts.timeout_s),
                state,
                epoch=lambda: parts.engine.epoch,
                ages=parts.ages,
                raise_step=committer.raise_step,
            ),
            offers=self.offers,
            questions=GiverQuestions(parts.shard, self.shards),
            committer=committer,
            saver=saver,
            events=events,
        )
        self.job = PhaseRunner(parts, flushes, nodes, shards, self.look.set)
        self.carrier = MoveCarrier(parts, self.shards, self.look) if parts.shard == 0 else None
        self.follower = MapFollower(parts, self.job, self.carrier, shards=self.shards, look=self.look, wake=wake)
