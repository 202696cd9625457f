"""The progress of a shard's start: written by the start, read by any thread from its first second on."""

import time
from collections.abc import Callable

JOINING, CLAIMING, READING, REPLAYING, LOADING = "joining", "claiming", "reading", "replaying", "loading"
PHASES = {
    JOINING: "it joins the cluster",
    CLAIMING: "it reads the files of the shard's last process",
    READING: "it looks through its journal",
    REPLAYING: "it applies its journal",
    LOADING: "it looks for a checkpoint to load, and loads it",
}

HowFar = Callable[[], tuple[int, int]]
"""(rows done, rows in all, or 0 where that is not known yet)."""


class StartReport:
    """How far one start is. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._begun_s = clock, clock()
        self.phase = JOINING
        self._how_far: HowFar = lambda: (0, 0)
        self._waits: tuple[str, tuple[int, int]] = ("", (0, 0))

    def enter(self, phase: str, how_far: HowFar = lambda: (0, 0)) -> None:
        """Record the phase that begins now."""
        self.phase, self._how_far, self._waits = phase, how_far, ("", (0, 0))

    def waits(self, why: str) -> None:
        """Record why storage is waited for; it counts until more rows are done, or the next phase begins."""
        self._waits = why, self._how_far()

    def done(self) -> None:
        self.enter("")

    @property
    def waits_for(self) -> str:
        """Why storage is waited for, or ""."""
        why, at = self._waits
        return why if at == self._how_far() else ""

    @property
    def share(self) -> float | None:
        """How much of the phase is done, 0 to 1; None where that is not known."""
        n_done, n_all = self._how_far()
        return min(1.0, n_done / n_all) if n_all else None

    def __str__(self) -> str:
        if not self.phase:
            return ""
        (n_done, n_all), share = self._how_far(), self.share
        of_all = f" of {n_all:,} rows ({int(100 * share)} %)" if share is not None else " rows"
        counted = f": {n_done:,}{of_all}" if n_done or n_all else ""
        waits = f"; it waits for storage: {self.waits_for}" if self.waits_for else ""
        return f"{PHASES[self.phase]}{counted}, {self._clock() - self._begun_s:.0f} s since it began{waits}"
