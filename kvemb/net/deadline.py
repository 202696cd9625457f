"""One deadline for a whole batch, on the monotonic clock: every wait in this product takes its share from one of these."""

import math
import time
from dataclasses import dataclass

from kvemb.errors import InvalidInputError


def checked_timeout(timeout_s: object) -> float:
    """Return a caller's timeout in seconds.

    Raises:
        InvalidInputError: no finite number above 0: with NaN or infinity a wait would have no end.

    Example:
        >>> checked_timeout(5)
        5.0
    """
    good = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool) and math.isfinite(timeout_s) and timeout_s > 0
    if not good:
        raise InvalidInputError(f"timeout_s is {timeout_s!r}; give a number of seconds above 0")
    return float(timeout_s)  # type: ignore[arg-type]


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

    @staticmethod
    def of_caller(timeout_s: object) -> "Deadline":
        """The same for a number that a caller gave; see `checked_timeout`."""
        return Deadline.after(checked_timeout(timeout_s))

    def within(self, timeout_s: float) -> "Deadline":
        """Return this deadline, or the one so many seconds from now where that is earlier."""
        return Deadline.after(min(self.remaining_s(), max(0.0, timeout_s)))

    def remaining_s(self) -> float:
        """Seconds that remain; never negative."""
        return max(0.0, self.at_s - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return time.monotonic() >= self.at_s
