"""One deadline for a whole batch, on the monotonic clock: every wait in this product takes its share from one of these.

And how long to wait between tries, and why. Which errors are worth another try is for every caller to say.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvemb.errors import InvalidInputError
from kvemb.process.cached_property import batch_value

T = TypeVar("T")


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


@batch_value
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

    def shared(self, items: Sequence[T]) -> Iterator[tuple[T, "Deadline"]]:
        """Yield each of these with its share of the time that remains: one that hangs leaves time for the others."""
        return zip(items, self.shares(len(items)), strict=False)

    def shares(self, n: int) -> Iterator["Deadline"]:
        """Yield n times a share of the time that remains then: of `shared`, and where the last share is for something else."""
        for index in range(n):
            yield Deadline.after(self.remaining_s() / (n - index))

    def remaining_s(self) -> float:
        """Seconds that remain; never negative."""
        return max(0.0, self.at_s - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return time.monotonic() >= self.at_s


def pauses(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield pauses in seconds, without an end. After a success, call it again for a new iterator.

    Example:
        >>> from itertools import islice
        >>> list(islice(pauses(0.05, 2.0), 7))
        [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    """
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)


class WhyWaiting:
    """Why tries fail, and since when: so that it is said once, and not at each try. One thread writes, any reads.

    Example:
        >>> waiting = WhyWaiting()
        >>> waiting.is_news("a node is away"), waiting.is_news("a node is away"), waiting.lasting(60.0)
        (True, False, '')
        >>> waiting.over()
        >>> waiting.why
        ''
    """

    def __init__(self) -> None:
        self.why, self._since_s = "", 0.0

    def is_news(self, why: str) -> bool:
        """Note why a try failed; return whether the one before did not fail, or for another reason."""
        if not self.why:
            self._since_s = time.monotonic()
        before, self.why = self.why, why
        return why != before

    def over(self) -> None:
        """Note that a try did not fail."""
        self.why = ""

    def lasting(self, longer_than_s: float) -> str:
        """Return why tries have failed for so long; "" where they have not."""
        return self.why if time.monotonic() - self._since_s >= longer_than_s else ""
