"""One trainer's place at the barrier: its pushes that wait, how its step numbers relate to the job's, and its lease. Pure.

A trainer that is started again numbers its steps as `first_step` told it. Where the shard could not tell, because it had been restarted
itself, the first step that the place takes part in settles it: by its number the others are read from then on.

There is no heartbeat. The lease runs while the others of a step wait for this trainer, and begins anew with everything that is heard of it.
Whose earlier push has no outcome yet may be waiting for just that, so it cannot be late.
"""

from collections import deque
from dataclasses import dataclass, field

from ..model.batch import Push


@dataclass(eq=False)
class TrainerLease:
    """One member of a sync job at the barrier: its pushes that wait, and until when it is waited for.

    Args:
        incarnation: of the member.
        aligned: whether `shift` is known.
        heard_s: when the member was last heard of, on the clock of `Push.arrived_s`.
        waiting: its pushes, oldest first.
        leaving: it said goodbye; the place is free once what waits is handed out.
        shift: what to add to its step numbers.
        n_unsettled: pushes handed out that have no outcome yet.
    """

    incarnation: int
    aligned: bool
    heard_s: float
    waiting: deque[Push] = field(default_factory=deque)
    leaving: bool = False
    shift: int = 0
    n_unsettled: int = 0

    def number(self, push: Push) -> int | None:
        """Return the job's number of the step that a waiting push is for; None while that is not known."""
        return push.step + self.shift if self.aligned and push.incarnation == self.incarnation else None

    def take(self, number: int) -> Push:
        """Take the oldest push, for the step of that number."""
        push = self.waiting.popleft()
        if push.incarnation == self.incarnation:
            self.shift, self.aligned = number - push.step, True
            self.n_unsettled += 1
        return push

    def hear(self, now_s: float) -> None:
        """Record a sign of life: the lease begins anew."""
        self.heard_s = max(self.heard_s, now_s)

    def leave(self) -> None:
        """Record its goodbye."""
        self.leaving = True

    def come_back(self, now_s: float) -> None:
        """Record that the very same incarnation says hello again."""
        self.leaving = False
        self.hear(now_s)

    def settled(self, push: Push, now_s: float) -> None:
        """Record that a push has its outcome."""
        if push.incarnation == self.incarnation:
            self.n_unsettled -= 1
            self.hear(now_s)

    def expires_s(self, since_s: float, timeout_s: float) -> float | None:
        """When the lease runs out if the others wait since then; None when not before an earlier push has its outcome."""
        return None if self.n_unsettled else max(since_s, self.heard_s) + timeout_s
