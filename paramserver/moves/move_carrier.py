"""Shard 0's part in a plan: it begins one, carries it from phase to phase, and ends it. docs/adr/0060 says why it may be one process.

What decides is the map in this shard's data folder: a phase is written there first, then followed, then given to the nodes. So a phase that
anybody has seen outlives the death of any process and any node. The next process of shard 0 goes on with the newest map that its folder and
the nodes have.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvemb.coordination.move_report import MoveReport, newest_report, report_name
from kvemb.coordination.shard_owners import newest_owner, owner_name
from kvemb.errors import MoveRefusedError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import GONE, ClusterMap, NodePlace
from kvemb.schema.move_plan import (
    ABORTING,
    CLEANING,
    DRAINING,
    FLIPPED,
    HOLDING,
    MAX_WHY,
    MOVING,
    NODES,
    SERVING,
    SHARDS,
    MovePlan,
)
from kvemb.stores.store import Store

from .left_sessions import LeftSessions
from .move_planner import MovePlanner, WantedMove

_LOOK_TIMEOUT_S = 2.0  # of what is asked again soon
_GIVE_AGAIN_S = 1.0  # to nodes that have lost it since
_AFTER = {
    NODES: {MOVING: FLIPPED, FLIPPED: CLEANING},
    SHARDS: {MOVING: DRAINING, HOLDING: DRAINING, DRAINING: FLIPPED, FLIPPED: SERVING},
}
"""Of each phase the next one; of the others the end of the plan. In sync jobs shards hold before they drain."""
_BEFORE_THE_FLIP = (MOVING, HOLDING, DRAINING)
_MAX_STEPS_APART = 64  # of shards: trainers have less than that on their way to any of them
log = logging.getLogger("paramserver")


class MoveCarrier:
    """Begins, carries on and ends plans; on shard 0 only. Any thread, one at a time.

    Args:
        store: open.
        keep: keeps a map in the data folder; raises once another process owns the shard.
        planner: of the same store.
        left: keeps what shards that leave had taken of trainers.
        sync: whether the job is one.
        changed: told when this process has changed the map.
        timeout_s: of one storage call.
    """

    def __init__(
        self,
        store: Store,
        *,
        keep: Callable[[ClusterMap], None],
        planner: MovePlanner,
        left: LeftSessions,
        sync: bool,
        changed: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._store, self._keep, self._planner, self._left, self._timeout_s = store, keep, planner, left, timeout_s
        self._sync, self._changed = sync, changed
        self._given: tuple[ClusterMap, float] | None = None  # what every node has, and since when
        self._heard: tuple[int, list[MoveReport | None]] = 0, []
        self._lock = threading.Lock()
        self._said = self._taken_back = ""

    # --- what operators ask for -------------------------------------------------------------------------------------------------

    def begin(self, wanted: WantedMove, deadline: Deadline) -> ClusterMap:
        """Begin a plan; return the map with it.

        Raises:
            MoveRefusedError: another plan is under way.
            MapChangedError: the map is another than the one that the request was worked out from.
            InvalidInputError: the request names nodes that there are not.
            StorageError: a new node cannot be used; nothing was changed.
        """
        with self._lock:
            planned = self._planner.plan(self._store.cluster_map, wanted, deadline)
            self._taken_back = ""
            self._follow(planned)
            log.info("a move of slots begins (map version %d)", planned.version)
            return planned

    @contextmanager
    def no_shard_move(self) -> Iterator[None]:
        """Keep slots with their shards while a block runs.

        Raises:
            MoveRefusedError: they are on their way.
        """
        with self._lock:
            plan = self._store.cluster_map.plan
            if plan is not None and plan.kind == SHARDS:
                raise MoveRefusedError(
                    f"slots are moving between shards (phase {plan.phase}), and nothing was changed. `kvemb moves` shows how far that is; "
                    "ask again when it is done."
                )
            yield

    def abort(self, why: str) -> ClusterMap:
        """Take a plan back that is not flipped yet; return the map. Calling it again changes nothing.

        Raises:
            MoveRefusedError: there is none, or it is past the point from which it can only go on.
        """
        with self._lock:
            now = self._store.cluster_map
            if now.plan is None:
                raise MoveRefusedError("no move is under way")
            if now.plan.phase in _BEFORE_THE_FLIP:
                self._abort(now, now.plan, why)
            elif now.plan.phase != ABORTING:
                raise MoveRefusedError(
                    "the slots have new nodes already: the move can only be brought to its end, which it does by itself. Move them back "
                    "then, if need be."
                )
            return self._store.cluster_map

    def replace_address(self, number: int, address: str, version: int, deadline: Deadline) -> ClusterMap:
        """Let a node that is gone for good be at another, empty address; the shards bring its rows back there, as after any loss.

        Raises:
            MoveRefusedError, MapChangedError, InvalidInputError: as `begin`.
            StorageError: the new one cannot be used; nothing was changed.
        """
        with self._lock:
            now = self._store.cluster_map
            changed = self._planner.exchanged(now, number, address, version, deadline)
            before = self._store.places[number]
            self._follow(changed)
            log.warning("node %d, which was at %s, is now at %s: its rows are brought back there", number, before, address)
            return self._store.cluster_map

    @property
    def taken_back(self) -> str:
        """Why the last move was taken back, as far as this process knows; "" where it was not."""
        return self._taken_back

    def left_session(self, shard: int, trainer: str, incarnation: int) -> int:
        """See `LeftSessions.find`."""
        return self._left.find(shard, trainer, incarnation)

    def left_sessions(self, shard: int) -> bytes:
        """See `LeftSessions.all_of`."""
        return self._left.all_of(shard)

    def heard(self, cluster_map: ClusterMap) -> list[MoveReport | None]:
        """Return what each shard has said of this map, by the last look; None where its present process has said nothing."""
        version, reports = self._heard
        return reports if version == cluster_map.version else [None] * cluster_map.n_shards

    # --- from phase to phase ----------------------------------------------------------------------------------------------------

    def carry(self) -> None:
        """Take the next step of the plan under way, if it can be taken."""
        with self._lock:
            now = self._store.cluster_map
            if now.plan is None:
                return
            if self._given is None or self._given[0] is not now or time.monotonic() - self._given[1] > _GIVE_AGAIN_S:
                self._publish(now)
            reports = self._reports(now)
            self._heard = now.version, reports
            troubles = [f"shard {shard}: {one.trouble}" for shard, one in enumerate(reports) if one is not None and one.trouble]
            if now.plan.phase in _BEFORE_THE_FLIP and troubles:
                self._abort(now, now.plan, troubles[0])
            elif all((one := reports[shard]) is not None and one.done for shard in _who_reports(now, now.plan, sync=self._sync)):
                if now.plan.phase == HOLDING:
                    self._let_drain(now, now.plan, [one.step for shard, one in enumerate(reports) if one and shard in now.writing_shards])
                else:
                    self._next(now, now.plan)

    def _let_drain(self, now: ClusterMap, plan: MovePlan, steps: Sequence[int]) -> None:
        """All hold: those behind are to come to the step of the furthest."""
        least, last = min(steps), max(steps)
        if last - least > _MAX_STEPS_APART:
            self._abort(now, plan, f"shards count the steps of the sync job otherwise ({least} and {last}): restart its trainers")
        else:
            self._follow(replace(now, version=now.version + 1, plan=replace(plan, phase=DRAINING, last_step=last)))

    def _next(self, now: ClusterMap, plan: MovePlan) -> None:
        """Everybody whose report the phase takes has done his part."""
        after = _AFTER[plan.kind].get(plan.phase)
        if self._sync and plan.kind == SHARDS and plan.phase == MOVING:
            after = HOLDING
        renews = plan.renews_markers and after != SERVING  # no shard writes a marker of before the flip any more
        if renews and (missed := self._store.renew_markers(Deadline.after(self._timeout_s))):
            self._say(f"a move waits until every node's marker names the new map: {'; '.join(missed)}")
            return
        if plan.phase == DRAINING and not self._left.keep(plan.leaving, now.version, self._deadline()):
            return
        if after is None:
            self._end(now, plan)
        elif after == FLIPPED:
            self._flip(now, plan)
        else:
            self._follow(replace(now, version=now.version + 1, plan=replace(plan, phase=after)))

    def _flip(self, now: ClusterMap, plan: MovePlan) -> None:
        n_moves = now.n_node_moves + 1 if plan.kind == NODES else 0
        flipped = replace(now, version=now.version + 1, serial=now.serial + 1, n_node_moves=n_moves)
        if plan.kind == NODES:
            self._follow(replace(flipped, slot_nodes=plan.slot_owners, plan=replace(plan, phase=FLIPPED, slot_owners=now.slot_nodes)))
        else:
            self._follow(replace(flipped, slot_shards=plan.slot_owners, plan=replace(plan, phase=FLIPPED, slot_owners=now.slot_shards)))

    def _end(self, now: ClusterMap, plan: MovePlan) -> None:
        version, done = now.version + 1, plan.phase not in (MOVING, HOLDING, ABORTING)
        gone = plan.leaving if done else plan.joining
        places = _without(now.places, gone if plan.kind == NODES else ())
        shards = _without(now.shards, gone if plan.kind == SHARDS else ())
        self._follow(replace(now, version=version, places=places, shards=shards, plan=None))
        log.info("the move is %s (map version %d)", "done" if done else "taken back", version)

    def _abort(self, now: ClusterMap, plan: MovePlan, why: str) -> None:
        log.warning("the move is taken back: %s", why)
        self._taken_back = why
        if plan.kind == SHARDS and plan.phase in (MOVING, HOLDING):  # nothing was taken over yet
            self._end(now, plan)
            return
        self._follow(replace(now, version=now.version + 1, plan=replace(plan, phase=ABORTING, why=why[:MAX_WHY])))

    def _follow(self, cluster_map: ClusterMap) -> None:
        self._keep(cluster_map)
        self._publish(cluster_map)
        self._changed()

    def _publish(self, cluster_map: ClusterMap) -> None:
        missed = self._store.publish_map(cluster_map, Deadline.after(self._timeout_s))
        self._given = None if missed else (self._store.cluster_map, time.monotonic())
        if missed:
            self._say(f"nodes do not have the newest map yet: {'; '.join(missed)}")

    def _say(self, text: str) -> None:
        if text != self._said:
            log.warning("%s", text)
        self._said = text

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _reports(self, now: ClusterMap) -> list[MoveReport | None]:
        """What each shard has said of this map; None where its present process has said nothing."""
        shards = range(now.n_shards)
        names = [name(shard) for name in (report_name, owner_name) for shard in shards]
        copies = self._store.metas_where_possible(names, self._deadline())
        found: list[MoveReport | None] = []
        for shard, reports, owners in zip(shards, copies, copies[now.n_shards :], strict=False):
            # Whoever claims a shard puts his record on every node before he begins: any of them will do.
            report, owner = newest_report(reports), newest_owner(owners, shard)
            ours = report is not None and owner is not None and (report.version, report.epoch) == (now.version, owner.epoch)
            found.append(report if ours else None)
        return found

    def _deadline(self) -> Deadline:
        return Deadline.after(min(self._timeout_s, _LOOK_TIMEOUT_S))


def _without(places: Sequence[NodePlace], gone: Sequence[int]) -> tuple[NodePlace, ...]:
    return tuple(NodePlace("", GONE) if at in gone else place for at, place in enumerate(places))


def _who_reports(now: ClusterMap, plan: MovePlan, *, sync: bool) -> list[int]:
    """The shards that must have done their part of the phase before it may end."""
    shards = now.shard_numbers
    if plan.kind == NODES or plan.phase in (MOVING, HOLDING, SERVING) or (sync and plan.phase == DRAINING):
        return list(shards)
    judge = now.gives if plan.phase == FLIPPED else now.takes
    return [shard for shard in shards if judge(shard).any()]
