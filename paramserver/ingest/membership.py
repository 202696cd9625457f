"""Who belongs to a sync job, as a new start of the shard must know it. Pure."""

from collections.abc import Iterable


class Membership:
    """Who belongs to the job: what a restart must know. Kept in the saved state, brought up to date by the journal's hellos and goodbyes.

    Args:
        n_trainers: of the job.
        members: (trainer, incarnation), who came first first.
        complete: whether all trainers have been here at once.
    """

    def __init__(self, n_trainers: int, members: Iterable[tuple[str, int]] = (), complete: bool = False) -> None:
        self._n_trainers = n_trainers
        self._members = dict(members)
        self.complete = complete

    @property
    def members(self) -> tuple[tuple[str, int], ...]:
        """The members, who came first first."""
        return tuple(self._members.items())

    def hello(self, trainer: str, incarnation: int) -> None:
        """Take in a member; where there are too many, the first ones are of a job that ended with a crash."""
        self._members.pop(trainer, None)
        self._members[trainer] = incarnation
        while len(self._members) > self._n_trainers:
            del self._members[next(iter(self._members))]
        self.complete = self.complete or len(self._members) == self._n_trainers

    def bye(self, trainer: str) -> None:
        """Let a member go; when all have gone, the next job waits for all its trainers again."""
        self._members.pop(trainer, None)
        self.complete = self.complete and bool(self._members)

    def have_been_here(self) -> None:
        """Record that the members are all of the job."""
        self.complete = True
