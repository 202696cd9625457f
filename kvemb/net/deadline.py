"""One deadline for a whole batch, on the monotonic clock: every wait in this product takes its share from one of these.

And how long to wait between tries, why, and what is said of it. Which errors are worth another try is for every caller to say.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvemb.errors import InvalidInputError
from kvemb.process.cached_property import batch_value

T = TypeVar("T")


def checked_timeout(timeout_s: object) -> float:
    """Return a caller's timeout in seconds."""
    good = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool) and math.isfinite(timeout_s) and timeout_s > 0
    if not good:
        raise InvalidInputError(f"timeout_s is {timeout_s!r}; give a number of seconds above 0")
    return float(timeout_s)  # type: ignore[arg-type]


@batch_value
class Deadline:
    """A moment on the monotonic clock."""

    at_s: float
    timeout_s: float
    silent_s: float = math.inf

    @staticmethod
    def after(timeout_s: float, silent_s: float = math.inf) -> "Deadline":
        """Return the deadline `timeout_s` seconds from now."""
        return Deadline(time.monotonic() + timeout_s, timeout_s, silent_s)

    @staticmethod
    def of_caller(timeout_s: object, silent_s: float = math.inf) -> "Deadline":
        """The same for a number that a caller gave; see `checked_timeout`."""
        return Deadline.after(checked_timeout(timeout_s), silent_s)

    def within(self, timeout_s: float) -> "Deadline":
        """Return this deadline, or the one so many seconds from now where that is earlier."""
        return Deadline.after(min(self.remaining_s(), max(0.0, timeout_s)), self.silent_s)

    def shared(self, items: Sequence[T]) -> Iterator[tuple[T, "Deadline"]]:
        """Yield each of these with its share of the time that remains: one that hangs leaves time for the others."""
        return zip(items, self.shares(len(items)), strict=False)

    def shares(self, n: int) -> Iterator["Deadline"]:
        """Yield n times a share of the time that remains then: of `shared`, and where the last share is for something else."""
        for index in range(n):
            yield Deadline.after(self.remaining_s() / (n - index), self.silent_s)

    def remaining_s(self) -> float:
        """Seconds that remain; never negative."""
        return max(0.0, self.at_s - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return time.monotonic() >= self.at_s


def pauses(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield pauses in seconds, without an end. After a success, call it again for a new iterator."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)


class WhyWaiting:
    """Why tries fail, and since when: so that it is said once, and not at each try. One thread writes, any reads."""

    def __init__(self) -> None:
        self.why, self._since_s = "", 0.0

    def is_news(self, why: str) -> bool:
        """Note why a try failed; return whether the one before did not fail, or for another reason."""
        if not self.why:
            self._since_s = time.monotonic()
        before, self.why = self.why, why
        return why != before

    def over(self) -> bool:
        """Note that a try did not fail; return whether the one before did."""
        before, self.why = self.why, ""
        return before != ""

    def lasting(self, longer_than_s: float) -> str:
        """Return why tries have failed for so long; "" where they have not."""
        return self.why if time.monotonic() - self._since_s >= longer_than_s else ""


SAY_AFTER_S = 5.0
"""How long an absence lasts before it is said: whoever waits may wait for long."""


class Absence:
    """The absence of someone who is waited for: said once when it has lasted, and once when it is over (by threads perhaps twice)."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        self._said = False

    def lasts(self, for_s: float = 0.0) -> float | None:
        """Note that it lasts, and has for so long already; return how long, if that is to be said now."""
        now_s = time.monotonic()
        self.since_s = since_s = min(now_s - for_s, self.since_s or now_s)
        if self._said or now_s - since_s < SAY_AFTER_S:
            return None
        self._said = True
        return now_s - since_s

    def over(self) -> float | None:
        """Note its end; return how long it lasted, where that was said."""
        since_s, said = self.since_s, self._said
        self.since_s, self._said = None, False
        return time.monotonic() - since_s if said and since_s is not None else None
