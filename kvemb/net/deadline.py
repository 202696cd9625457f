"""One deadline for a whole batch, on the monotonic clock: every wait in this product takes its share from one of these."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    """A moment on the monotonic clock.

    Example:
        >>> deadline = Deadline.after(5)
        >>> 4 < deadline.remaining_s() <= 5, deadline.expired
        (True, False)
    """

    at_s: float
    timeout_s: float

    @staticmethod
    def after(timeout_s: float) -> "Deadline":
        """Return the deadline `timeout_s` seconds from now."""
        return Deadline(time.monotonic() + timeout_s, timeout_s)

    def remaining_s(self) -> float:
        """Seconds left; never negative."""
        return max(0.0, self.at_s - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return time.monotonic() >= self.at_s
