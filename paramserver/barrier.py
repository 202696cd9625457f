"""The barrier of sync mode: collects one push per live member and step, and hands out whole steps. Pure: the clock is passed in.

Members take seats by name, so a restarted trainer takes its own seat again. Nothing is handed out before all seats have been taken once;
then a member that says goodbye is not waited for any more, and what it sent before still counts.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvemb.errors import BarrierError
from paramserver.batch import Push


@dataclass(eq=False)
class _Seat:
    waiting: deque[Push] = field(default_factory=deque)
    leaving: bool = False


class Barrier:
    """Steps of a sync job at one shard.

    Args:
        n_trainers: seats.
        timeout_s: how long the first push of a step waits for the others.
    """

    def __init__(self, n_trainers: int, timeout_s: float) -> None:
        self._n_trainers = n_trainers
        self._timeout_s = timeout_s
        self._seats: dict[str, _Seat] = {}
        self._complete = False  # all seats have been taken once in this job

    @property
    def members(self) -> list[str]:
        """Names of the live members."""
        return [name for name, seat in self._seats.items() if not seat.leaving]

    def check_join(self, trainer: str) -> None:
        """Refuse a trainer for whom there is no seat; changes nothing.

        Raises:
            BarrierError: naming who sits there.
        """
        if trainer not in self._seats and len(self._seats) >= self._n_trainers:
            raise BarrierError(
                f"trainer {trainer!r}: all {self._n_trainers} seats of this sync job are taken by {', '.join(sorted(self._seats))}; "
                "set parameter_servers.trainers to the number of trainers, or let one of them leave"
            )

    def join(self, trainer: str) -> None:
        """Take a seat, or the trainer's own seat again."""
        self.check_join(trainer)
        self._seats.setdefault(trainer, _Seat()).leaving = False
        self._complete = self._complete or len(self.members) == self._n_trainers

    def leave(self, trainer: str) -> None:
        """Free a seat once everything that its trainer sent has been handed out."""
        if trainer in self._seats:
            self._seats[trainer].leaving = True
            self._tidy()

    def add(self, push: Push) -> None:
        """Take a member's push for its next step."""
        self._seats[push.trainer].waiting.append(push)

    def next_step(self) -> list[Push]:
        """Take the next step if every live member's push for it is in; otherwise return nothing.

        Raises:
            BarrierError: members are at different steps; nothing was taken.
        """
        seats = self._seats.values()
        if not self._complete or not all(seat.waiting for seat in seats):
            return []
        first = [seat.waiting[0] for seat in seats]
        if len({push.step for push in first}) > 1:
            steps = ", ".join(f"{push.trainer} at step {push.step}" for push in first)
            raise BarrierError(f"trainers are at different steps: {steps}; restart all of them from the same step")
        for seat in seats:
            seat.waiting.popleft()
        self._tidy()
        return first

    def waiting(self) -> list[Push]:
        """Return every push that waits for others."""
        return [push for seat in self._seats.values() for push in seat.waiting]

    def deadline_s(self) -> float | None:
        """When the oldest waiting step fails, on the clock of `Push.arrived_s`; None while nothing waits."""
        arrived = [seat.waiting[0].arrived_s for seat in self._seats.values() if seat.waiting]
        return min(arrived) + self._timeout_s if arrived else None

    def check_overdue(self, now_s: float) -> None:
        """Raise when a step has waited too long.

        Raises:
            BarrierError: naming the missing trainers.
        """
        deadline_s = self.deadline_s()
        if deadline_s is None or now_s < deadline_s:
            return
        here = [name for name, seat in self._seats.items() if seat.waiting]
        missing = sorted(name for name in self.members if name not in here)
        absent = self._n_trainers - len(self.members) if not self._complete else 0
        who = [*missing, *([f"{absent} of {self._n_trainers} trainers that never joined"] if absent else [])]
        step = min(self._heads(), key=lambda push: push.arrived_s).step
        raise BarrierError(
            f"step {step} waited {self._timeout_s:g} s for {', '.join(who)}; here are {', '.join(sorted(here))}. Nothing of it was applied."
        )

    def clear(self) -> None:
        """Forget every waiting push."""
        for seat in self._seats.values():
            seat.waiting.clear()
        self._tidy()

    def _heads(self) -> Sequence[Push]:
        return [seat.waiting[0] for seat in self._seats.values() if seat.waiting]

    def _tidy(self) -> None:
        """Free the seats of those who left; when all have, the next job waits for all its trainers again."""
        self._seats = {name: seat for name, seat in self._seats.items() if seat.waiting or not seat.leaving}
        self._complete = self._complete and bool(self._seats)
