"""The barrier of sync mode: collects one push per live member and step, and hands out whole steps. Pure: the clock is passed in.

Members take places by name, so a restarted trainer takes its own place again. Nothing is handed out before all places have been taken once.
Then a member that says goodbye is not waited for any more, and what it sent before still counts.

After a restart of the shard the places are free, so that a job may be started anew under other names. But when exactly the members that it
had then are back, the job goes on (`Membership`). It does not wait for those who had left before.

A member whose lease runs out (`TrainerLease`) stops the shard ("abort"), is waited for ("wait"), or is dropped ("drop"): steps go on
without it. A trainer that is started again begins with the step that is due. What its predecessor sent for a step that is not whole is
given up: a step has one push of each trainer.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice

from kvemb.errors import BarrierError

from ..model.batch import Push
from .lease import TrainerLease
from .membership import Membership
from .step_hold import HeldSteps, StepHold

ABORT, WAIT, DROP = "abort", "wait", "drop"


class Barrier:
    """Steps of a sync job at one shard.

    One class, because places, steps and lateness are judged by the same leases, which change with each of them.

    Args:
        n_trainers: places.
        timeout_s: how long a member may be silent while a step waits for it.
        membership: as the last process left it; None for a new job.
        on_lost: what becomes of a member that is silent for longer: ABORT, WAIT or DROP.
    """

    def __init__(self, n_trainers: int, timeout_s: float, membership: Membership | None = None, on_lost: str = ABORT) -> None:
        self._n_trainers, self._timeout_s, self._on_lost = n_trainers, timeout_s, on_lost
        self.membership = membership or Membership(n_trainers)
        self._awaited = set(self.membership.members) if self.membership.complete else set()
        self._members_before = {name for name, _ in self._awaited}
        self._leases: dict[str, TrainerLease] = {}
        self._complete = False  # all places have been taken once in this job
        self._released = 0  # number of the last step handed out; 0: not known
        self._hold = StepHold(unknown=self.membership.complete)

    @property
    def members(self) -> list[str]:
        """Names of the live members."""
        return [name for name, lease in self._leases.items() if not lease.leaving]

    def check_join(self, trainer: str) -> None:
        """Refuse a trainer for whom there is no place; changes nothing.

        Raises:
            BarrierError: naming who sits there.
        """
        if trainer not in self._leases and len(self._leases) >= self._n_trainers:
            raise BarrierError(
                f"trainer {trainer!r}: all {self._n_trainers} places of this sync job are taken by {', '.join(sorted(self._leases))}; "
                "set parameter_servers.trainers to the number of trainers, or let one of them leave"
            )

    def join(self, trainer: str, incarnation: int, now_s: float = 0.0) -> list[Push]:
        """Take a place, or the trainer's own place again; return pushes of a predecessor that are given up."""
        self.check_join(trainer)
        given_up = self._sit_down(trainer, incarnation, now_s)
        self.membership.hello(trainer, incarnation)
        # A trainer that was started again begins with the step that is due, so it may stand for its predecessor; with ABORT all begin anew.
        back = {m for m in self._awaited if m[0] == trainer and (m[1] == incarnation or self._on_lost != ABORT)}
        all_back = bool(back) and back == self._awaited  # the last one that was missing
        self._awaited -= back
        self._complete = self._complete or all_back or len(self.members) == self._n_trainers
        return given_up

    def _sit_down(self, trainer: str, incarnation: int, now_s: float) -> list[Push]:
        old = self._leases.get(trainer)
        if old is not None and old.incarnation == incarnation:
            old.come_back(now_s)
            return []
        kept = old.waiting if old is not None and old.leaving else deque()  # what it sent before its goodbye still counts
        going_on = self._complete or bool(self._members_before)
        self._leases[trainer] = TrainerLease(incarnation, aligned=not going_on, heard_s=now_s, waiting=kept)
        return list(old.waiting) if old is not None and not old.leaving else []

    def first_step(self, trainer: str) -> int:
        """Return the number of the step that the trainer's next push is for; 0 when it is not known."""
        lease = self._leases.get(trainer)
        if lease is None or not lease.waiting:
            return self._due()
        number = lease.number(lease.waiting[-1])
        return 0 if number is None else number + 1

    def leave(self, trainer: str) -> None:
        """Free a place once everything that its trainer sent has been handed out."""
        self._forget(trainer)
        if trainer in self._leases:
            self._leases[trainer].leave()
            self._tidy()
        else:
            self._await_no_more(trainer)

    def awaits(self, trainer: str, incarnation: int) -> bool:
        """Whether a member has not come back since the shard's restart, or not yet come to a shard that has joined."""
        return (trainer, incarnation) in self._awaited and trainer not in self._leases

    def add(self, push: Push) -> None:
        """Take a member's push for its next step."""
        self._leases[push.trainer].waiting.append(push)

    def heard(self, trainer: str, now_s: float) -> None:
        """Record a sign of life."""
        if trainer in self._leases:
            self._leases[trainer].hear(now_s)

    def settled(self, push: Push, now_s: float) -> None:
        """Record that a push that was handed out has its outcome."""
        if push.trainer in self._leases:
            self._leases[push.trainer].settled(push, now_s)

    def next_step(self) -> list[Push]:
        """Take the next step if every live member's push for it is in; otherwise return nothing.

        Raises:
            BarrierError: members are at different steps; nothing was taken.
        """
        leases = self._leases.values()
        if not self._complete or not all(lease.waiting for lease in leases) or self._hold.forbids(self._due()):
            return []
        numbers = self._heads()
        if len({number for number in numbers.values() if number is not None}) > 1:
            steps = ", ".join(f"{name} at step {number}" for name, number in numbers.items() if number is not None)
            raise BarrierError(f"trainers are at different steps: {steps}; restart all of them from the same step")
        self._released = self._due()
        self._hold.handed_out(self._released)
        step = [lease.take(self._released) for lease in leases]
        self._members_before = set()
        self._tidy()
        return step

    def hold(self, last: int | None = None) -> int:
        """Hand out no step behind this one, or without it none behind the last one handed out; return the number of that, 0 where none was.

        So all shards can be brought to the same step: each holds, and those behind go on to the furthest one's. Where no job is, or who
        handed out the last step is another process, none is handed out at all; nor once the job has ended.
        """
        return self._hold.begin(self._released, job=bool(self._leases), last=last)

    def go_on(self) -> None:
        """Hand out steps again."""
        self._hold.end()

    @property
    def held(self) -> HeldSteps:
        """How far it is with that; while nothing is held, whether it could be."""
        return self._hold.held

    def expect(self, members: Iterable[tuple[str, int]]) -> None:
        """Take over the members of a job of which this shard has had no step: it begins with the next one, when all of them are here."""
        members = list(members)
        for name in {name for name, _ in self.membership.members} - {name for name, _ in members}:  # of when this shard had slots before
            self.membership.bye(name)
        for name, incarnation in members:
            if dict(self.membership.members).get(name, 0) < incarnation:
                self.membership.hello(name, incarnation)
        self.membership.have_been_here()
        self._hold.joins()
        here = {(name, lease.incarnation) for name, lease in self._leases.items()}
        self._awaited = set(self.membership.members) - here
        self._members_before = {name for name, _ in self.membership.members}
        self._complete = not self._awaited

    def waiting(self) -> list[Push]:
        """Return every push that waits for others."""
        return [push for lease in self._leases.values() for push in lease.waiting]

    def deadline_s(self) -> float | None:
        """When somebody's lease runs out, on the clock of `Push.arrived_s`; None while nothing waits, and when waiting is the rule."""
        return None if self._on_lost == WAIT else self._deadline_s()

    def lost(self, now_s: float) -> list[str]:
        """Return the members to drop: their leases ran out. Empty unless that is the rule, and before the job has begun."""
        same_job = self._complete or (self._members_before and self._members_before >= set(self._leases))
        if self._on_lost != DROP or not same_job:
            return []
        return sorted(name for name, due_s in self._lease_ends().items() if due_s is not None and now_s >= due_s)

    def drop(self, trainer: str) -> None:
        """Go on without a member of whom nothing waits; it may join again."""
        self._forget(trainer)
        self._leases.pop(trainer, None)
        self._await_no_more(trainer)

    def check_overdue(self, now_s: float) -> None:
        """Raise when a step has waited too long for somebody who can be neither waited for nor dropped.

        Raises:
            BarrierError: naming the missing trainers.
        """
        if self._on_lost != WAIT and not self.lost(now_s) and (text := self.waits_for(now_s)):
            raise BarrierError(f"{text}. Nothing of it was applied.")

    def waited_s(self, now_s: float) -> float:
        """How long the first push of a step has waited for the others; 0.0 where none waits."""
        since_s = self._since_s()
        return 0.0 if since_s is None else max(0.0, now_s - since_s)

    def waits_for(self, now_s: float) -> str:
        """Say whom a step has waited for too long, or ""."""
        deadline_s = self._deadline_s()
        if deadline_s is None or now_s < deadline_s:
            return ""
        step, here, missing = self._oldest_step()
        waited_s = max(self._timeout_s, self.waited_s(now_s))
        return f"step {step} waited {round(waited_s, 1):g} s for {missing}; here are {here}"

    def lacking(self) -> tuple[list[Push], str]:
        """Return the pushes of steps for which not every member's push is in, and say which step it is, whose, and for whom it waits."""
        n_whole = self._n_whole()
        pushes = [push for lease in self._leases.values() for push in islice(lease.waiting, n_whole, None)]
        if not pushes:
            return [], ""
        step, here, missing = self._oldest_step(n_whole)
        return pushes, f"step {step} of {here}, which waits for {missing}"

    def clear(self) -> None:
        """Forget every waiting push."""
        for lease in self._leases.values():
            lease.waiting.clear()
        self._tidy()

    def _forget(self, trainer: str) -> None:
        self.membership.bye(trainer)
        if not self.membership.complete:
            self._hold.forget_job()

    def _n_whole(self) -> int:
        """How many steps are whole and wait to be handed out."""
        every = [len(lease.waiting) for lease in self._leases.values()]
        of_members = [len(lease.waiting) for lease in self._leases.values() if not lease.leaving]
        return min(of_members, default=max(every, default=0)) if self._complete else 0

    def _oldest_step(self, n_before: int = 0) -> tuple[int, str, str]:
        """The number of the step behind the first so many that wait, who is here for it, and who is not."""
        here = {name: lease for name, lease in self._leases.items() if len(lease.waiting) > n_before}
        missing = sorted(name for name in self.members if name not in here)
        absent = self._n_trainers - len(self.members) if not self._complete else 0
        who = [*missing, *([f"{absent} of {self._n_trainers} trainers that never joined"] if absent else [])]
        name, first = min(((name, lease.waiting[n_before]) for name, lease in here.items()), key=lambda item: item[1].arrived_s)
        return here[name].number(first) or first.step, ", ".join(sorted(here)), ", ".join(who)

    def _await_no_more(self, trainer: str) -> None:
        awaited = {member for member in self._awaited if member[0] != trainer}
        self._complete = bool(self._leases) and (self._complete or bool(self._awaited and not awaited))
        self._awaited = awaited
        self._members_before.discard(trainer)

    def _heads(self) -> dict[str, int | None]:
        """The job's number of the oldest push that waits, by member."""
        return {name: lease.number(lease.waiting[0]) for name, lease in self._leases.items() if lease.waiting}

    def _due(self) -> int:
        """The number of the next step; 0 when it is not known."""
        known = [number for number in self._heads().values() if number is not None]
        own = [lease.waiting[0].step for lease in self._leases.values() if lease.waiting]
        return max(known, default=0) or (self._released + 1 if self._released else max(own, default=0))

    def _lease_ends(self) -> Mapping[str, float | None]:
        """When the lease of each member runs out whom a step waits for; None: not yet to be said."""
        since_s = self._since_s()
        if since_s is None:
            return {}
        absent = {name: since_s + self._timeout_s for name, _ in self._awaited if name not in self._leases}
        missing = {name: lease for name, lease in self._leases.items() if not lease.waiting}
        return ({} if self._complete else absent) | {name: s.expires_s(since_s, self._timeout_s) for name, s in missing.items()}

    def _since_s(self) -> float | None:
        return min((lease.waiting[0].arrived_s for lease in self._leases.values() if lease.waiting), default=None)

    def _deadline_s(self) -> float | None:
        since_s = self._since_s()
        if since_s is None:
            return None
        ends = [due_s for due_s in self._lease_ends().values() if due_s is not None]
        return min(ends if self._complete else [*ends, since_s + self._timeout_s], default=None)

    def _tidy(self) -> None:
        """Free the places of those who left; when all have, the next job waits for all its trainers again."""
        self._leases = {name: lease for name, lease in self._leases.items() if lease.waiting or not lease.leaving}
        self._complete = self._complete and bool(self._leases)
        self._released = self._released if self._leases else 0
        if not self._leases:
            self._hold.job_ends()
