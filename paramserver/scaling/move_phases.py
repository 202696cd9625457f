"""The way of a plan from phase to phase: map in force and events give the next map, and the tasks to be done before it is followed.

Pure: `move_carrier` is the shell that asks, keeps and gives. `tests/models` searches these transitions; docs/adr/0058 and 0062 say why they
are right. Phases are those of `kvemb.schema.move_plan`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvemb.coordination.shard_notes import MoveReport
from kvemb.errors import MoveRefusedError
from kvemb.schema.cluster_map import GONE, ClusterMap, NodePlace
from kvemb.schema.move_plan import ABORTING, CLEANING, DRAINING, FLIPPED, HOLDING, MAX_WHY, MOVING, NODES, SERVING, SHARDS, MovePlan

RENEW_MARKERS, KEEP_SESSIONS = "renew markers", "keep sessions"
_AFTER = {
    NODES: {MOVING: FLIPPED, FLIPPED: CLEANING},
    SHARDS: {MOVING: DRAINING, DRAINING: FLIPPED, FLIPPED: SERVING},
}
"""The next phase of each; after any other phase the plan ends. In sync jobs shards hold before they drain."""
_BEFORE_THE_FLIP = (MOVING, HOLDING, DRAINING)
_MAX_STEPS_APART = 64  # of shards: trainers have less than that on their way to any of them


@dataclass(frozen=True, eq=False)
class Transition:
    """The next map, and the tasks before it.

    Args:
        map: the next one.
        first: tasks to be done before it is followed: `RENEW_MARKERS` has every node's marker name the map in force, `KEEP_SESSIONS` keeps
            the sessions of shards that leave.
        taken_back: why the plan is taken back with this map; "" where it is not.
    """

    map: ClusterMap
    first: tuple[str, ...] = ()
    taken_back: str = ""


def on_reports(now: ClusterMap, reports: Sequence[MoveReport | None], *, sync: bool) -> Transition | None:
    """Return the transition that the shards' reports allow; None while they allow none."""
    plan = now.plan
    if plan is None:
        return None
    troubles = [f"shard {shard}: {one.trouble}" for shard, one in enumerate(reports) if one is not None and one.trouble]
    if plan.phase in _BEFORE_THE_FLIP and troubles:
        return _taken_back(now, plan, troubles[0])
    if not all((one := reports[shard]) is not None and one.done for shard in _who_reports(now, plan, sync=sync)):
        return None
    if plan.phase == HOLDING:
        return _let_drain(now, plan, [one.step for shard, one in enumerate(reports) if one and shard in now.writing_shards])
    after = HOLDING if sync and plan.kind == SHARDS and plan.phase == MOVING else _AFTER[plan.kind].get(plan.phase)
    if after == FLIPPED:
        return Transition(_flipped(now, plan), (KEEP_SESSIONS,) if plan.kind == SHARDS else ())
    first = (RENEW_MARKERS,) if plan.renews_markers and after != SERVING else ()  # no shard writes a marker of before the flip any more
    return Transition(_ended(now, plan) if after is None else _next(now, replace(plan, phase=after)), first)


def on_abort(now: ClusterMap, why: str) -> Transition | None:
    """Return the transition that takes a plan back; None where it is being taken back already."""
    plan = now.plan
    if plan is None:
        raise MoveRefusedError("no move is under way")
    if plan.phase in _BEFORE_THE_FLIP:
        return _taken_back(now, plan, why)
    if plan.phase == ABORTING:
        return None
    raise MoveRefusedError(
        "the slots have new nodes already: the move can only be brought to its end, which it does by itself. Move them back then, if need "
        "be."
    )


def _who_reports(now: ClusterMap, plan: MovePlan, *, sync: bool) -> list[int]:
    """The shards that must have done their part of the phase before it may end."""
    shards = now.shard_numbers
    if plan.kind == NODES or plan.phase in (MOVING, HOLDING, SERVING) or (sync and plan.phase == DRAINING):
        return list(shards)
    judge = now.gives if plan.phase == FLIPPED else now.takes
    return [shard for shard in shards if judge(shard).any()]


def _let_drain(now: ClusterMap, plan: MovePlan, steps: Sequence[int]) -> Transition:
    """All hold: shards that are behind go on to the step of the furthest."""
    least, last = min(steps), max(steps)
    if last - least > _MAX_STEPS_APART:
        return _taken_back(now, plan, f"shards count the steps of the sync job otherwise ({least} and {last}): restart its trainers")
    return Transition(_next(now, replace(plan, phase=DRAINING, last_step=last)))


def _flipped(now: ClusterMap, plan: MovePlan) -> ClusterMap:
    n_moves = now.n_node_moves + 1 if plan.kind == NODES else 0
    flipped = replace(_next(now, plan), serial=now.serial + 1, n_node_moves=n_moves)
    if plan.kind == NODES:
        return replace(flipped, slot_nodes=plan.slot_owners, plan=replace(plan, phase=FLIPPED, slot_owners=now.slot_nodes))
    return replace(flipped, slot_shards=plan.slot_owners, plan=replace(plan, phase=FLIPPED, slot_owners=now.slot_shards))


def _taken_back(now: ClusterMap, plan: MovePlan, why: str) -> Transition:
    if plan.kind == SHARDS and plan.phase in (MOVING, HOLDING):  # nothing was taken over yet
        return Transition(_ended(now, plan), taken_back=why)
    return Transition(_next(now, replace(plan, phase=ABORTING, why=why[:MAX_WHY])), taken_back=why)


def _ended(now: ClusterMap, plan: MovePlan) -> ClusterMap:
    gone = plan.leaving if plan.flipped else plan.joining
    places = _without(now.places, gone if plan.kind == NODES else ())
    shards = _without(now.shards, gone if plan.kind == SHARDS else ())
    return replace(_next(now, None), places=places, shards=shards)


def _next(now: ClusterMap, plan: MovePlan | None) -> ClusterMap:
    return replace(now, version=now.version + 1, plan=plan)


def _without(places: Sequence[NodePlace], gone: Sequence[int]) -> tuple[NodePlace, ...]:
    return tuple(NodePlace("", GONE) if at in gone else place for at, place in enumerate(places))
