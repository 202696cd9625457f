"""The wait of a sync job's step: for which members, since when, and until when. Pure; times are on the clock of `Push.arrived_s`.

There is no heartbeat. A member's lease runs while the others of a step wait for it, and begins again with each sign of life. A member whose
earlier push has no outcome yet may be waiting for that outcome, so it cannot be late.
"""

from itertools import islice

from kvemb.errors import BarrierError, n_of

from ..model.batch import Push
from .sync_steps import DROP, WAIT, SyncSteps


def deadline_s(steps: SyncSteps) -> float | None:
    """The time at which the next lease runs out; None while nothing waits, and where `on_lost` is WAIT."""
    return None if steps.on_lost == WAIT else _deadline_s(steps)


def lost(steps: SyncSteps, now_s: float) -> list[str]:
    """Return the members to drop: their leases ran out. Empty unless `on_lost` is DROP, and before the job has begun."""
    same_job = steps.complete or (steps.members_before and steps.members_before >= set(steps.places))
    if steps.on_lost != DROP or not same_job:
        return []
    return sorted(name for name, due_s in _lease_ends(steps).items() if due_s is not None and now_s >= due_s)


def check_overdue(steps: SyncSteps, now_s: float) -> None:
    """Raise when a step has waited too long for a member that can be neither waited for nor dropped."""
    if steps.on_lost != WAIT and not lost(steps, now_s) and (text := waits_for(steps, now_s)):
        raise BarrierError(f"{text}. Nothing of it was applied.")


def waited_s(steps: SyncSteps, now_s: float) -> float:
    """How long the first push of a step has waited for the others; 0.0 where none waits."""
    since_s = _since_s(steps)
    return 0.0 if since_s is None else max(0.0, now_s - since_s)


def waits_for(steps: SyncSteps, now_s: float) -> str:
    """Describe the step that has waited too long, the trainers that it lacks, and the cure; "" where none has."""
    until_s = _deadline_s(steps)
    if until_s is None or now_s < until_s:
        return ""
    step, here, missing = _oldest_step(steps)
    gone = sorted(name for name in steps.members if not steps.places[name].waiting)
    names = "its name" if len(gone) == 1 else "their names"
    cure = f"Start {', '.join(gone)} again under {names}" if gone else "Start all trainers of the job"
    return f"step {step} waited {round(max(steps.timeout_s, waited_s(steps, now_s)), 1):g} s for {missing}; here are {here}. {cure}"


def lacking(steps: SyncSteps) -> tuple[list[Push], str]:
    """Return the pushes of steps that lack a member's push, and name the oldest such step, its trainers here, and those it waits for."""
    n_whole = _n_whole(steps)
    pushes = [push for place in steps.places.values() for push in islice(place.waiting, n_whole, None)]
    if not pushes:
        return [], ""
    step, here, missing = _oldest_step(steps, n_whole)
    return pushes, f"step {step} of {here}, which waits for {missing}"


def _n_whole(steps: SyncSteps) -> int:
    """How many steps are whole and wait to be handed out."""
    every = [len(place.waiting) for place in steps.places.values()]
    of_members = [len(place.waiting) for place in steps.places.values() if not place.leaving]
    return min(of_members, default=max(every, default=0)) if steps.complete else 0


def _oldest_step(steps: SyncSteps, n_before: int = 0) -> tuple[int, str, str]:
    """The number of the step after the first `n_before` that wait, the trainers here for it, and the missing ones."""
    here = {name: place for name, place in steps.places.items() if len(place.waiting) > n_before}
    missing = sorted(name for name in steps.members if name not in here)
    absent = steps.n_trainers - len(steps.members) if not steps.complete else 0
    who = [*missing, *([f"{absent} of {n_of(steps.n_trainers, 'trainer')} that never joined"] if absent else [])]
    name, first = min(((name, place.waiting[n_before]) for name, place in here.items()), key=lambda item: item[1].arrived_s)
    return here[name].number(first) or first.step, ", ".join(sorted(here)), ", ".join(who)


def _lease_ends(steps: SyncSteps) -> dict[str, float | None]:
    """When the lease of each member that a step waits for runs out; None: not before an earlier push of it has its outcome."""
    since_s = _since_s(steps)
    if since_s is None:
        return {}
    absent = [] if steps.complete else [name for name, _ in steps.awaited if name not in steps.places]
    ends: dict[str, float | None] = dict.fromkeys(absent, since_s + steps.timeout_s)
    for name, place in steps.places.items():
        if not place.waiting:
            ends[name] = None if place.n_unsettled else max(since_s, place.heard_s) + steps.timeout_s
    return ends


def _since_s(steps: SyncSteps) -> float | None:
    if steps.hold.forbids(steps.due):  # it waits for the end of what holds it, and for no member
        return None
    return min((place.waiting[0].arrived_s for place in steps.places.values() if place.waiting), default=None)


def _deadline_s(steps: SyncSteps) -> float | None:
    since_s = _since_s(steps)
    if since_s is None:
        return None
    ends = [due_s for due_s in _lease_ends(steps).values() if due_s is not None]
    return min(ends if steps.complete else [*ends, since_s + steps.timeout_s], default=None)
