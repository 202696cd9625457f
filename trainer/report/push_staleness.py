"""How stale the rows of the pushed batches were, as the acks of their pushes say: the newest that is known, and means.

What must not live here: measuring it, which the parameter servers do with the versions that a push carries.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

_KEPT = 64
"""Pushes whose acks may be outstanding; what is pushed beyond that before they settle is not measured."""


class StalenessAck(Protocol):
    """What measuring staleness needs of a push's ack."""

    @property
    def staleness(self) -> Any:
        """`changed_fraction` and `batches_elapsed`; None until the push was applied."""
        ...


@dataclass(frozen=True)
class MeanStaleness:
    """Means of staleness over all pushes that were measured.

    Args:
        changed_fraction: mean fraction of a push's rows that somebody changed between their pull and their apply.
        batches_elapsed: mean of the batches of the worst shard in that time.
        most_elapsed: the largest number of batches.
        n: pushes.
    """

    changed_fraction: float = 0.0
    batches_elapsed: float = 0.0
    most_elapsed: int = 0
    n: int = 0

    def with_one(self, changed: float, elapsed: int) -> "MeanStaleness":
        """Return the mean with one push more."""
        n = self.n + 1
        mean_changed = self.changed_fraction + (changed - self.changed_fraction) / n
        mean_elapsed = self.batches_elapsed + (elapsed - self.batches_elapsed) / n
        return MeanStaleness(mean_changed, mean_elapsed, max(self.most_elapsed, elapsed), n)

    def __str__(self) -> str:
        if not self.n:
            return "not measured yet"
        changed = f"{self.changed_fraction:.2%} of the rows changed between pull and push"
        return f"{changed}, {self.batches_elapsed:.1f} batches went by (at most {self.most_elapsed}), over {self.n} pushes"


class StalenessLog:
    """Acks on their way, and what the settled ones said. Use it from one thread."""

    def __init__(self) -> None:
        self._outstanding: deque[StalenessAck] = deque(maxlen=_KEPT)
        self._last: Any = None
        self._mean = MeanStaleness()

    def add(self, ack: StalenessAck) -> None:
        """Remember a push."""
        self._settle()
        self._outstanding.append(ack)

    @property
    def last(self) -> Any:
        """Of the newest push that was applied; None before."""
        self._settle()
        return self._last

    @property
    def mean(self) -> MeanStaleness:
        """Of all pushes that were applied."""
        self._settle()
        return self._mean

    def _settle(self) -> None:
        """A push without rows never tells; it is dropped when many others have come after it."""
        for _ in range(len(self._outstanding)):
            ack = self._outstanding.popleft()
            said = ack.staleness
            if said is None:
                self._outstanding.append(ack)
                continue
            self._last = said
            self._mean = self._mean.with_one(said.changed_fraction, said.batches_elapsed)
