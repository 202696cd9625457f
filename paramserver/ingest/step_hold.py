"""Up to which step of a sync job a shard hands them out while slots move, so that all shards stop at the same one (docs/adr/0062). Pure."""

from typing import NamedTuple


class HeldSteps(NamedTuple):
    """How far a shard is that holds steps.

    Args:
        last: number of the last step handed out; 0: none was.
        at_last: whether that is the last one that may be. Then none is until all go on, whoever comes.
        unknown: whether nobody can say which one it was: a process before this one handed it out.
        never: whether it never comes so far.
    """

    last: int = 0
    at_last: bool = True
    unknown: bool = False
    never: bool = False


class StepHold:
    """What one shard says of its steps, and whether it may hand one out.

    Args:
        unknown: whether steps were handed out by a process before this one.

    Example:
        >>> hold = StepHold()
        >>> hold.begin(released=4, job=True)
        4
        >>> hold.forbids(5), hold.held
        (True, HeldSteps(last=4, at_last=True, unknown=False, never=False))
        >>> hold.begin(released=4, job=True, last=5)
        4
        >>> hold.forbids(5), hold.held.at_last
        (False, False)
    """

    def __init__(self, unknown: bool = False) -> None:
        self._unknown = unknown
        self._last: int | None = None  # number of the last step that may be handed out; None: any
        self._furthest, self._shut = 0, False  # while steps are held: the last one handed out; whether none is at all

    def begin(self, released: int, *, job: bool, last: int | None = None) -> int:
        """See `Barrier.hold`.

        Args:
            released: the last step that was handed out.
            job: whether one is under way.
            last: behind which none is to be handed out.
        """
        if self._last is None:
            self._furthest, self._shut = released, self._unknown or not job
        self._last = max(self._furthest, last or 0)
        return self._furthest

    def end(self) -> None:
        """Steps go on."""
        self._last, self._shut = None, False

    def forbids(self, step: int) -> bool:
        """Whether a step must not be handed out."""
        return self._last is not None and (self._shut or step > self._last)

    def handed_out(self, step: int) -> None:
        """Record that a step was."""
        self._furthest, self._unknown = step, False

    def joins(self) -> None:
        """Record that the job's steps so far were handed out elsewhere."""
        self._unknown = True

    def job_ends(self) -> None:
        """Record that nobody is here any more. While steps are held none follows: another job counts them anew."""
        self._shut = True

    def forget_job(self) -> None:
        """Record that the steps of the process before this one are of no job that goes on."""
        self._unknown = False

    @property
    def held(self) -> HeldSteps:
        """How far it is; while nothing is held, whether it could be."""
        at_last = not self._unknown and self._last is not None and self._furthest >= self._last
        return HeldSteps(self._furthest, at_last, self._unknown, self._shut and not at_last)
