"""A shard's work for a plan that moves slots between shards, phase by phase (docs/adr/0062). Apply thread only, between two batches.

Each phase is repeated after an error, and after a restart; parts of it that are done already are found done.
"""

import logging
from collections.abc import Generator, Iterator

import numpy as np

from kvemb.errors import LostRowError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.move_plan import ABORTING, DRAINING, FLIPPED, HOLDING, MOVING, SHARDS

from ..capability import ShardKernel
from ..ingest.sync_steps import AT_LAST, ENDED, UNKNOWN, HeldSteps
from .giver_questions import GivenEntries, GiverQuestions
from .phase_runner import PhaseProgress, PhaseWork
from .slot_giver import SlotGiver, SlotOffers
from .slot_taker import SlotTaker

_POLL_S, _RETRY_S = 0.01, 0.2
_STARTED_ANEW = (
    "the shard was restarted while all stopped at one step of a sync job, and does not know which: begin again once training goes on"
)
_LEFT_BEFORE = "this process has had slots and has left: start it again, then add it"  # its knowledge of trainers and steps is old
_JOB_ENDED = "the trainers of a sync job have gone while its shards came to one step: begin again once they train"
_READS_AHEAD, _FEW_ROWS, _LESS = 5, 4096, 0.8  # rows change while they are read ahead, and are read again
_LOOK_TIMEOUT_S = 20.0  # a Redis Cluster has thousands of markers; there is no other work meanwhile
log = logging.getLogger("paramserver")


class HandoverWork(PhaseWork):
    """One shard's part in plans that move slots between shards."""

    def __init__(
        self,
        kernel: ShardKernel,
        giver: SlotGiver,
        taker: SlotTaker,
        *,
        offers: SlotOffers,
        questions: GiverQuestions,
    ) -> None:
        parts = self._parts = kernel.parts
        self._kernel, self._store, self._shard, self._ingest = kernel, parts.store, parts.shard, parts.ingest
        self._giver, self._taker, self._offers, self._questions = giver, taker, offers, questions
        self._never = ""
        self._had_slots = self._has_left = False  # this process

    @property
    def trouble(self) -> str:
        return self._never or self._questions.trouble

    @property
    def changes_runs(self) -> bool:
        plan = (now := self._store.nodes.cluster_map).plan
        moves = plan is not None and plan.kind == SHARDS and plan.phase in (DRAINING, FLIPPED, ABORTING)
        return moves and bool((now.gives(self._shard) | now.takes(self._shard)).any())

    def held_up(self, error: Exception) -> str:
        if isinstance(error, LostRowError):
            return "rows that move are not in storage as their shard knows them: a node is to be repaired first"
        return f"{type(error).__name__}: {error}"

    def follow(self, cluster_map: ClusterMap) -> None:
        plan = cluster_map.plan
        phase = "" if plan is None or plan.kind != SHARDS else plan.phase
        self._never = ""
        self._had_slots |= self._shard in cluster_map.writing_shards
        if self._shard in _gone(cluster_map):
            self._has_left = self._had_slots
            self._ingest.gate.leaves()
        if self._parts.sync:
            self._ingest.steps.follow()
        self._questions.give_up()
        self._offers.clear()
        if phase in ("", MOVING, ABORTING):
            self._giver.forget()
        if phase not in (MOVING, HOLDING, DRAINING):
            self._taker.give_up()

    def phase(self, cluster_map: ClusterMap, progress: PhaseProgress) -> Iterator[float]:
        assert cluster_map.plan is not None
        phases = {
            MOVING: self._read_ahead,
            HOLDING: self._hold,
            DRAINING: self._drain,
            FLIPPED: self._give,
            ABORTING: self._give_back,
        }
        work = phases.get(cluster_map.plan.phase)
        return iter(()) if work is None else work(cluster_map, progress)

    def _read_ahead(self, cluster_map: ClusterMap, progress: PhaseProgress) -> Iterator[float]:
        while any(one.holds_slots for one in self._kernel.capabilities()):
            yield _RETRY_S
        while (steps := self._steps_of(cluster_map)) is not None and steps.phase == UNKNOWN:  # until this process has handed one out
            yield _RETRY_S
        if not cluster_map.takes(self._shard).any():
            return
        while self._has_left:
            self._never = _LEFT_BEFORE
            yield _RETRY_S
        self._taker.give_up()
        n_before = 0
        for _ in range(_READS_AHEAD):
            given = yield from self._given(cluster_map)
            self._parts.claim.rise_above(given.epoch, self._risen)
            behind = self._taker.behind(given.entries)
            n_behind = sum(len(one.ids) for one in behind)
            if not n_behind or (n_before and not _FEW_ROWS < n_behind < _LESS * n_before):
                return  # trainers wait while the rest is read: it is small, or another round would not make it smaller
            progress.expect(n_behind)
            n_before = n_behind
            for n_rows in self._taker.read_ahead(behind):
                progress.gone_through(n_rows)
                yield 0.0

    def _hold(self, cluster_map: ClusterMap, progress: PhaseProgress) -> Iterator[float]:
        steps = self._steps_of(cluster_map)
        if steps is not None:
            while steps.phase == UNKNOWN:
                self._never = _STARTED_ANEW
                yield _RETRY_S
            progress.hold_at(steps.last)

    def _come_to_last_step(self, cluster_map: ClusterMap) -> Iterator[float]:
        while (steps := self._steps_of(cluster_map)) is not None and steps.phase != AT_LAST:
            self._never = {UNKNOWN: _STARTED_ANEW, ENDED: _JOB_ENDED}.get(steps.phase, "")
            yield _POLL_S

    def _steps_of(self, cluster_map: ClusterMap) -> HeldSteps | None:
        """How far this shard is in the steps of a sync job; None where it takes part in none."""
        writes = self._shard in cluster_map.writing_shards
        return self._ingest.steps.follow() if self._parts.sync and writes else None

    def _drain(self, cluster_map: ClusterMap, progress: PhaseProgress) -> Iterator[float]:
        assert cluster_map.plan is not None
        yield from self._come_to_last_step(cluster_map)
        if self._parts.sync or cluster_map.gives(self._shard).any() or self._shard in cluster_map.plan.leaving:
            while not self._ingest.backlog.quiet:
                yield _POLL_S
            self._offers.drained(cluster_map.version)
        if cluster_map.takes(self._shard).any():
            given = yield from self._given(cluster_map)
            self._parts.claim.rise_above(given.epoch, self._risen)  # the giver may have been restarted
            if self._shard not in cluster_map.writing_shards:
                self._ingest.steps.expect(given.members)  # durable with `take`, below
            self._taker.take(given.entries, given.epoch)
            if self._shard not in cluster_map.writing_shards:
                self._join()

    def _risen(self, epoch: int) -> None:
        """Write in a higher epoch from now on."""
        self._parts.engine.rise(epoch, self._kernel.committer.rise(epoch))
        log.info("epoch %d from now on, above that of the shards whose slots come", epoch)

    def _join(self) -> None:
        """Begin to take rows, which are loaded already, before the shard says so."""
        for one in self._kernel.capabilities():
            one.joins()
        self._ingest.gate.joins()

    def _give(self, cluster_map: ClusterMap, progress: PhaseProgress) -> Iterator[float]:
        self._kernel.events.look()
        slots = cluster_map.gives(self._shard)
        if not slots.any():
            return
        # The taker may have done its part of a repair before it knew these rows. But once they are forgotten here they cannot be
        # reconstructed here; so they are when no such repair is under way.
        while lost := self._store.repair.lost_nodes(Deadline.after(_LOOK_TIMEOUT_S)):
            yield _RETRY_S
            log.info("a move of slots waits for the repair of %s", ", ".join(node.address for node in lost))
        n_rows = self._giver.drop(slots)
        log.info("%d rows have gone to other shards", n_rows)

    def _give_back(self, cluster_map: ClusterMap, progress: PhaseProgress) -> Iterator[float]:
        if (slots := cluster_map.takes(self._shard)).any():
            self._giver.drop(slots)
        yield from ()

    def _given(self, cluster_map: ClusterMap) -> Generator[float, None, GivenEntries]:
        givers = cluster_map.slot_shards[cluster_map.takes(self._shard)]  # it is not flipped yet
        self._questions.ask(cluster_map.version, np.unique(givers).tolist())
        while (given := self._questions.answer) is None:
            yield _POLL_S
        return given


def _gone(cluster_map: ClusterMap) -> set[int]:
    """The shards that have left, or will when they follow this map."""
    plan, left = cluster_map.plan, set(range(cluster_map.n_shards)) - set(cluster_map.shard_numbers)
    if plan is None or plan.kind != SHARDS:
        return left
    return left | set(plan.leaving if plan.flipped else plan.joining if plan.phase == ABORTING else ())
