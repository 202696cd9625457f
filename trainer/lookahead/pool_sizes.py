"""How many threads pull, and how many batches ahead: as given, or measured and chosen ("auto").

Pure but for its averages.

Strategy of "auto": a step takes as long as computing and reading take. Rows are never waited for if enough pulls are under way at a time:
threads = ceil(pull / step). One more batch may lie ready, to even out variations. Every batch ahead makes rows older, so no more than
that. Durations are averages that forget slowly; the first choice is made after a few batches, and looked at again every few dozen.
"""

import math
from dataclasses import dataclass

from kvemb.errors import InvalidInputError

AUTO = "auto"
MAX_THREADS = 8
MAX_CAPACITY = 1024
LIMIT_BYTES = 256 << 20
"""Of all batches ahead with their rows, where "auto" chooses the capacity; one batch is always allowed."""
FIRST_CHOICE_AFTER, CHOICE_EVERY = 4, 32
_FORGET = 0.1  # share of the newest batch in an average
_MOST_TIMES = 10  # the average, as which one batch counts at most
_START_THREADS = 2


@dataclass
class Averages:
    """Running means over the latest batches: seconds to read, to pull and to step, and bytes of rows."""

    read_s: float = 0.0
    pull_s: float = 0.0
    step_s: float = 0.0
    size_bytes: float = 0.0
    n: int = 0

    def add(self, read_s: float, pull_s: float, step_s: float, size_bytes: int) -> None:
        """Take in one batch."""
        share = max(_FORGET, 1 / (self.n + 1))
        if self.n >= FIRST_CHOICE_AFTER:  # an evaluation between two batches is no step
            step_s, read_s = min(step_s, _MOST_TIMES * self.step_s), min(read_s, _MOST_TIMES * self.read_s)
        self.read_s += share * (read_s - self.read_s)
        self.pull_s += share * (pull_s - self.pull_s)
        self.step_s += share * (step_s - self.step_s)
        self.size_bytes += share * (size_bytes - self.size_bytes)
        self.n += 1


class Sizes:
    """How many threads pull and how many batches lie ahead, as given or as measured."""

    def __init__(self, threads_num: int | str, capacity: int | str, *, own_threads: bool = True) -> None:
        self._own_threads = own_threads
        self._auto_threads = _is_auto("threads_num", threads_num, MAX_THREADS)
        self._auto_capacity = _is_auto("capacity", capacity, MAX_CAPACITY)
        self.threads_num = _START_THREADS if isinstance(threads_num, str) else threads_num
        self.capacity = self.threads_num + 1 if isinstance(capacity, str) else capacity
        self.averages = Averages()

    def add(self, *, read_s: float, pull_s: float, step_s: float, size_bytes: int) -> None:
        """Add the times of a batch, and choose again now and then."""
        self.averages.add(read_s, pull_s, step_s, size_bytes)
        if self.averages.n == FIRST_CHOICE_AFTER or self.averages.n % CHOICE_EVERY == 0:
            self._choose()

    def _choose(self) -> None:
        seen = self.averages
        wanted = math.ceil(seen.pull_s / max(seen.step_s + seen.read_s, 1e-9))
        if self._auto_threads:
            self.threads_num = min(max(1, wanted), MAX_THREADS)
        if self._auto_capacity:
            fits = int(LIMIT_BYTES / max(seen.size_bytes, 1.0))
            self.capacity = max(1, min(self.threads_num + 1, fits))

    def __str__(self) -> str:
        seen = self.averages
        threads = f"threads_num {self.threads_num}{' (auto)' * self._auto_threads}" if self._own_threads else "threads of the executor"
        chosen = [threads, f"capacity {self.capacity}{' (auto)' * self._auto_capacity}"]
        if not seen.n:
            return ", ".join(chosen)
        times = f"a pull takes {1e3 * seen.pull_s:.3g} ms, a step {1e3 * seen.step_s:.3g} ms, reading a batch {1e3 * seen.read_s:.3g} ms"
        return f"{', '.join(chosen)}; {times}; {seen.size_bytes / 1e6:.3g} MB per batch with its rows"


def _is_auto(name: str, value: object, largest: int) -> bool:
    if value == AUTO:
        return True
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise InvalidInputError(f"{name} is {value!r}; give a whole number from 1 to {largest}, or {AUTO!r}")
    return False
