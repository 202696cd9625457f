"""Plans as the product's own transitions carry them: the searches of this folder take them for the steps of the carrier.

One slot moves, slot 0: between nodes from 0 to 1; between shards from 0 to the last one. A plan is told by its phase; "none" is before it
begins, "done" and "aborted" after it has ended.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from kvemb.coordination.shard_notes import MoveReport
from kvemb.errors import MoveRefusedError
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.move_plan import HOLDING, MOVING, NODES, MovePlan
from kvemb.schema.slots import N_SLOTS
from paramserver.scaling.move_phases import Transition, on_abort, on_reports

NONE, DONE, ABORTED = "none", "done", "aborted"
OVER = (DONE, ABORTED)


class Plan(NamedTuple):
    """A kind of move: "nodes" or "shards", how many of them there are, and whether in a sync job."""

    kind: str
    n_owners: int
    sync: bool = False


class Following(NamedTuple):
    """The phase that follows, the tasks before it, and the last step of the old map."""

    phase: str
    first: tuple[str, ...]
    last_step: int


@cache
def maps_of(plan: Plan) -> dict[str, ClusterMap]:
    """Every map that a plan can lead to, by its phase."""
    n_nodes, n_shards = (plan.n_owners, 2) if plan.kind == NODES else (1, plan.n_owners)
    before, after = np.zeros(N_SLOTS, np.uint16), np.zeros(N_SLOTS, np.uint16)
    after[0] = plan.n_owners - 1
    if plan.n_owners > 2:  # a shard that takes no part in it has slots, too
        before[1] = after[1] = 1
    nodes, shards = (before, np.zeros_like(before)) if plan.kind == NODES else (np.zeros_like(before), before)
    first = ClusterMap(1, n_nodes, nodes, n_shards, shards)
    found = {NONE: first, MOVING: replace(first, version=2, plan=MovePlan(plan.kind, MOVING, after))}
    waiting = [found[MOVING]]
    while waiting:
        now = waiting.pop()
        if now.plan is None:
            continue
        reports = [MoveReport(1, now.version, True)] * now.n_shards
        for one in (on_reports(now, reports, sync=plan.sync), _back(now)):
            if one is not None and _name(one.map) not in found:
                found[_name(one.map)] = one.map
                waiting.append(one.map)
    return found


@cache
def carried(plan: Plan, phase: str, done: frozenset[int], steps: tuple[int, ...] = ()) -> Following | None:
    """What follows when these shards have done their part of a phase; `steps` of a sync job are the last ones that they handed out."""
    now = maps_of(plan)[phase]
    told = [MoveReport(1, now.version, shard in done, step=steps[shard] if steps else 0) for shard in range(now.n_shards)]
    following = on_reports(now, told, sync=plan.sync)
    if following is None:
        return None
    last_step = following.map.plan.last_step if phase == HOLDING and following.map.plan is not None else 0
    return Following(_name(following.map), following.first, last_step)


@cache
def taken_back(plan: Plan, phase: str) -> str:
    """The phase that follows when a plan is taken back in this one; "" where it cannot be, or is being."""
    following = _back(maps_of(plan)[phase])
    return "" if following is None else _name(following.map)


def _back(now: ClusterMap) -> Transition | None:
    try:
        return on_abort(now, "a search")
    except MoveRefusedError:
        return None


def _name(now: ClusterMap) -> str:
    if now.plan is None:
        return DONE if now.serial > 1 else ABORTED
    return now.plan.phase
