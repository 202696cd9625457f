"""The steps of a sync job at one shard: a pure state machine that collects one push per live member and step, and hands out whole steps.

Every event is a method of `SyncSteps`. It returns the state after it, and the pushes that are to be handed out or given up, where there are
some. `IngestState` holds the state, with lock and clock. `paramserver.ingest.step_waits` reads from the state for which members a step
waits, and until when.

Members take places by name, so a restarted trainer takes its own place again. Nothing is handed out before all places have been taken once.
Then a member that says goodbye is not waited for any more, and its earlier pushes still count.

After a restart of the shard the places are free, so that a new job may start under other names. But when exactly the members of the old job
are back, that job goes on (`Membership`). It does not wait for members that had said goodbye before the restart.

A member whose lease runs out stops the shard ("abort"), is waited for ("wait"), or is dropped ("drop"): steps go on without it. A restarted
trainer begins with the step that is due. Its predecessor's pushes for steps that are not whole are given up: a step has one push of each
trainer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvemb.errors import BarrierError

from ..model.batch import Push

ABORT, WAIT, DROP = "abort", "wait", "drop"
GOING_ON, COMING, AT_LAST, UNKNOWN, ENDED = "going on", "coming", "at the last step", "unknown", "ended"
Member = tuple[str, int]
"""(trainer, incarnation)."""
Pushes = tuple[Push, ...]


@dataclass(frozen=True)
class Membership:
    """The members of the job, for a restart: kept in the saved state, brought up to date by the journal's hellos and goodbyes.

    Args:
        n_trainers: of the job.
        members: in the order in which they came.
        complete: whether all trainers have been here at once.
    """

    n_trainers: int
    members: tuple[Member, ...] = ()
    complete: bool = False

    def hello(self, trainer: str, incarnation: int) -> "Membership":
        """With one more member; where there are too many, the first ones, of a job that ended with a crash, are removed."""
        members = [*(one for one in self.members if one[0] != trainer), (trainer, incarnation)]
        members = members[max(0, len(members) - self.n_trainers) :]
        return replace(self, members=tuple(members), complete=self.complete or len(members) == self.n_trainers)

    def bye(self, trainer: str) -> "Membership":
        """Without a member; when all have gone, the next job waits for all its trainers again."""
        members = tuple(one for one in self.members if one[0] != trainer)
        return replace(self, members=members, complete=self.complete and bool(members))


class HeldSteps(NamedTuple):
    """How far a shard is that holds steps while slots move, so that all shards stop at the same step (docs/adr/0062).

    Args:
        last: number of the last step handed out; 0: none was.
        phase: AT_LAST: no further step may be handed out until all shards go on. UNKNOWN: a process before this one handed out the last
            step, and its number is not known. ENDED: the job ended before the step to hold at. COMING: that step is still to come.
            GOING_ON: nothing is held.
    """

    last: int = 0
    phase: str = AT_LAST


@dataclass(frozen=True)
class StepHold:
    """The limit up to which a shard hands out steps.

    Args:
        unknown: whether steps were handed out by a process before this one, or by other shards before it joined.
        last: number of the last step that may be handed out; None: any.
        furthest: while steps are held, the last one handed out.
        shut: whether no step at all may be handed out.
    """

    unknown: bool = False
    last: int | None = None
    furthest: int = 0
    shut: bool = False

    def begin(self, released: int, last: int, *, job: bool) -> "StepHold":
        """Hand out none after `last`, nor after the one `released` last; none at all without a job."""
        first = replace(self, furthest=released, shut=self.unknown or not job) if self.last is None else self
        return replace(first, last=max(first.furthest, last))

    def forbids(self, step: int) -> bool:
        """Whether a step must not be handed out."""
        return self.last is not None and (self.shut or step > self.last)

    @property
    def held(self) -> HeldSteps:
        """How far the shard is."""
        if self.unknown:
            return HeldSteps(self.furthest, UNKNOWN)
        if self.last is None:
            return HeldSteps(self.furthest, GOING_ON)
        return HeldSteps(self.furthest, AT_LAST if self.furthest >= self.last else ENDED if self.shut else COMING)


@dataclass(frozen=True)
class Place:
    """One member's place: its waiting pushes, how its step numbers relate to the job's, and the times for its lease.

    A restarted trainer numbers its steps as `first_step` told it. Where the shard did not know, because it had been restarted itself, the
    first step that the place takes part in gives the shift between the trainer's numbers and the job's.

    Args:
        incarnation: of the member.
        aligned: whether `shift` is known.
        heard_s: when the member was last heard of, on the clock of `Push.arrived_s`.
        waiting: its pushes, oldest first.
        leaving: whether it said goodbye; the place is free once its waiting pushes are handed out.
        shift: number to add to its step numbers.
        n_unsettled: pushes handed out that have no outcome yet.
    """

    incarnation: int
    aligned: bool
    heard_s: float
    waiting: Pushes = ()
    leaving: bool = False
    shift: int = 0
    n_unsettled: int = 0

    def number(self, push: Push) -> int | None:
        """Return the job's number of the step that a waiting push is for; None while that is not known."""
        return push.step + self.shift if self.aligned and push.incarnation == self.incarnation else None

    def handed_out(self, number: int) -> "Place":
        """Without the oldest push, which went into the step of that number."""
        push, waiting = self.waiting[0], self.waiting[1:]
        if push.incarnation != self.incarnation:
            return replace(self, waiting=waiting)
        return replace(self, waiting=waiting, shift=number - push.step, aligned=True, n_unsettled=self.n_unsettled + 1)

    def hear(self, now_s: float) -> "Place":
        """After a sign of life: the lease begins again."""
        return replace(self, heard_s=max(self.heard_s, now_s))


@dataclass(frozen=True)
class SyncSteps:
    """Steps of a sync job at one shard; `first` makes the state of a process that has just started.

    One class, because most events change places, membership and awaited members together.

    Args:
        n_trainers: places.
        timeout_s: how long a member may be silent while a step waits for it.
        on_lost: the rule for a member that is silent for longer: ABORT, WAIT or DROP.
        membership: kept for a restart.
        awaited: members that have not come back since the shard's restart, or not yet come to a shard that has joined.
        members_before: names of all members at that restart or join; none once a step was handed out.
        places: by name.
        complete: whether all places have been taken once in this job.
        released: number of the last step handed out; 0: not known.
        hold: the limit up to which steps are handed out.
    """

    n_trainers: int
    timeout_s: float
    on_lost: str
    membership: Membership
    awaited: frozenset[Member] = frozenset()
    members_before: frozenset[str] = frozenset()
    places: Mapping[str, Place] = field(default_factory=dict, hash=False)
    complete: bool = False
    released: int = 0
    hold: StepHold = StepHold()

    @staticmethod
    def first(n_trainers: int, timeout_s: float, membership: Membership | None = None, on_lost: str = ABORT) -> "SyncSteps":
        """The state at the start of a process; `membership` as the last one left it, None for a new job."""
        before = membership or Membership(n_trainers)
        awaited = frozenset(before.members if before.complete else ())
        names = frozenset(name for name, _ in awaited)
        return SyncSteps(n_trainers, timeout_s, on_lost, before, awaited, names, hold=StepHold(before.complete))

    # --- questions -------------------------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[str]:
        return [name for name, place in self.places.items() if not place.leaving]

    @property
    def waiting(self) -> list[Push]:
        """Every push that waits for others."""
        return [push for place in self.places.values() for push in place.waiting]

    @property
    def held(self) -> HeldSteps:
        """How far the shard is with holding steps; while it holds none, whether the last step is known."""
        return self.hold.held

    @property
    def due(self) -> int:
        """The number of the next step; 0 when it is not known."""
        known = [number for number in self._heads().values() if number is not None]
        own = [place.waiting[0].step for place in self.places.values() if place.waiting]
        return max(known, default=0) or (self.released + 1 if self.released else max(own, default=0))

    def first_step(self, trainer: str) -> int:
        """Return the number of the step that the trainer's next push is for; 0 when it is not known."""
        place = self.places.get(trainer)
        if place is None or not place.waiting:
            return self.due
        number = place.number(place.waiting[-1])
        return 0 if number is None else number + 1

    def awaits(self, trainer: str, incarnation: int) -> bool:
        """Whether a member is awaited, and has no place yet."""
        return (trainer, incarnation) in self.awaited and trainer not in self.places

    def check_join(self, trainer: str) -> None:
        """Refuse a trainer for which there is no place."""
        if trainer not in self.places and len(self.places) >= self.n_trainers:
            raise BarrierError(
                f"trainer {trainer!r}: all {self.n_trainers} places of this sync job are taken by {', '.join(sorted(self.places))}; "
                "set parameter_servers.trainers to the number of trainers, or let one of them leave"
            )

    # --- trainers come and go --------------------------------------------------------------------------------------------------

    def join(self, trainer: str, incarnation: int, now_s: float = 0.0) -> tuple["SyncSteps", Pushes]:
        """A trainer takes a place, or its own place again; also return pushes of a predecessor that are given up."""
        self.check_join(trainer)
        old = self.places.get(trainer)
        given_up = old.waiting if old is not None and old.incarnation != incarnation and not old.leaving else ()
        places = {**self.places, trainer: self._seat(old, incarnation, now_s)}
        # A restarted trainer begins with the step that is due, so it may take its predecessor's place; with ABORT all trainers start again.
        back = {m for m in self.awaited if m[0] == trainer and (m[1] == incarnation or self.on_lost != ABORT)}
        all_back = bool(back) and back == self.awaited  # this was the last missing member
        complete = self.complete or all_back or sum(not one.leaving for one in places.values()) == self.n_trainers
        membership = self.membership.hello(trainer, incarnation)
        return replace(self, places=places, membership=membership, awaited=self.awaited - back, complete=complete), given_up

    def _seat(self, old: Place | None, incarnation: int, now_s: float) -> Place:
        if old is not None and old.incarnation == incarnation:
            return replace(old.hear(now_s), leaving=False)
        kept = old.waiting if old is not None and old.leaving else ()  # its pushes from before its goodbye still count
        going_on = self.complete or bool(self.members_before)
        return Place(incarnation, aligned=not going_on, heard_s=now_s, waiting=kept)

    def leave(self, trainer: str) -> "SyncSteps":
        """A trainer says goodbye: its place is free once all its pushes have been handed out."""
        after = self._without_member(trainer)
        if trainer in self.places:
            return after._with(trainer, replace(self.places[trainer], leaving=True))._tidied()
        return after._awaits_no_more(trainer)

    def drop(self, trainer: str) -> "SyncSteps":
        """Steps go on without a member that has no push waiting; it may join again."""
        after = self._without_member(trainer)
        places = {name: place for name, place in self.places.items() if name != trainer}
        return replace(after, places=places)._awaits_no_more(trainer)

    def expect(self, members: Iterable[Member]) -> "SyncSteps":
        """Take over the members of a job of which this shard has had no step; the next step begins when all of them are here."""
        members, membership = list(members), self.membership
        for name in {name for name, _ in membership.members} - {name for name, _ in members}:  # of when this shard had slots before
            membership = membership.bye(name)
        for name, incarnation in members:
            if dict(membership.members).get(name, 0) < incarnation:
                membership = membership.hello(name, incarnation)
        awaited = frozenset(membership.members) - {(name, place.incarnation) for name, place in self.places.items()}
        return replace(
            self,
            membership=replace(membership, complete=True),
            hold=replace(self.hold, unknown=True),
            awaited=awaited,
            members_before=frozenset(name for name, _ in membership.members),
            complete=not awaited,
        )

    def heard(self, trainer: str, now_s: float) -> "SyncSteps":
        """A sign of life came."""
        return self._with(trainer, self.places[trainer].hear(now_s)) if trainer in self.places else self

    # --- pushes and steps ------------------------------------------------------------------------------------------------------

    def add(self, push: Push) -> "SyncSteps":
        """A member's push for its next step came."""
        place = self.places[push.trainer]
        return self._with(push.trainer, replace(place, waiting=(*place.waiting, push)))

    def settled(self, push: Push, now_s: float) -> "SyncSteps":
        """A push that was handed out has its outcome."""
        place = self.places.get(push.trainer)
        if place is None or push.incarnation != place.incarnation:
            return self
        return self._with(push.trainer, replace(place.hear(now_s), n_unsettled=place.n_unsettled - 1))

    def next_step(self) -> tuple["SyncSteps", Pushes]:
        """Also return the next step if every live member's push for it is in; otherwise nothing."""
        places, due = self.places, self.due
        if not self.complete or not all(place.waiting for place in places.values()) or self.hold.forbids(due):
            return self, ()
        numbers = {name: number for name, number in self._heads().items() if number is not None}
        if len(set(numbers.values())) > 1:
            steps = ", ".join(f"{name} at step {number}" for name, number in numbers.items())
            raise BarrierError(f"trainers are at different steps: {steps}; restart all of them from the same step")
        step = tuple(place.waiting[0] for place in places.values())
        after = {name: place.handed_out(due) for name, place in places.items()}
        hold = replace(self.hold, furthest=due, unknown=False)
        return replace(self, released=due, hold=hold, places=after, members_before=frozenset())._tidied(), step

    def hold_behind(self, last: int) -> "SyncSteps":
        """Hand out no step after this one, nor after the last one handed out if that is further.

        So all shards can be brought to the same step: each holds, and those behind go on to the furthest one's. Where there is no job, or
        an earlier process handed out the last step, no step is handed out at all; nor once the job has ended.
        """
        return replace(self, hold=self.hold.begin(self.released, last, job=bool(self.places)))

    def go_on(self) -> "SyncSteps":
        return replace(self, hold=replace(self.hold, last=None, shut=False))

    def clear(self) -> "SyncSteps":
        return replace(self, places={name: replace(place, waiting=()) for name, place in self.places.items()})._tidied()

    # --- parts of these --------------------------------------------------------------------------------------------------------

    def _with(self, trainer: str, place: Place) -> "SyncSteps":
        return replace(self, places={**self.places, trainer: place})

    def _without_member(self, trainer: str) -> "SyncSteps":
        membership = self.membership.bye(trainer)
        # Once all are gone, the steps of the process before this one are of no job that goes on.
        return replace(self, membership=membership, hold=self.hold if membership.complete else replace(self.hold, unknown=False))

    def _awaits_no_more(self, trainer: str) -> "SyncSteps":
        awaited = frozenset(member for member in self.awaited if member[0] != trainer)
        complete = bool(self.places) and (self.complete or bool(self.awaited and not awaited))
        return replace(self, awaited=awaited, complete=complete, members_before=self.members_before - {trainer})

    def _heads(self) -> dict[str, int | None]:
        """The job's number of the oldest push that waits, by member."""
        return {name: place.number(place.waiting[0]) for name, place in self.places.items() if place.waiting}

    def _tidied(self) -> "SyncSteps":
        """Free the places of members that have left. When all have, the next job waits for all its trainers, and has step numbers of its
        own; while steps are held, none of its steps is handed out."""
        places = {name: place for name, place in self.places.items() if place.waiting or not place.leaving}
        if not places:
            return replace(self, places=places, complete=False, released=0, hold=replace(self.hold, shut=True))
        return self if len(places) == len(self.places) else replace(self, places=places)
