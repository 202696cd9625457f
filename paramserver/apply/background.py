"""The apply thread's work between batches: a list of jobs, of each that is due a slice. Index and storage are at rest only then."""

import logging
import math
import time
from collections.abc import Sequence
from typing import Protocol

from kvemb.errors import LostRowError
from kvemb.net.deadline import WhyWaiting

from ..engine.storage_pace import Pause

_RETRY_S = 5.0
log = logging.getLogger("paramserver")


class Job(Protocol):
    """Work that is done between two batches, a slice at a time."""

    @property
    def name(self) -> str:
        """As logs say it: "a flush to the row log"."""

    @property
    def passing(self) -> tuple[type[Exception], ...]:
        """Errors after which the job is tried again later; any other one, and a LostRowError, ends the shard."""

    @property
    def due_s(self) -> float:
        """When the next slice is due, by the monotonic clock; infinity until something changes."""

    def step(self, pause: Pause) -> bool:
        """Do a slice; return whether more can be done at once."""


class BackgroundWork:
    """The background work of one shard. Apply thread only."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._tried = [_Tried(job) for job in jobs]

    def due_in_s(self) -> float | None:
        """Seconds until a job is due; None while none is."""
        due_s = min(max(one.job.due_s, one.not_before_s) for one in self._tried)
        return None if due_s == math.inf else max(0.0, due_s - time.monotonic())

    def step(self, pause: Pause) -> bool:
        """Do a slice of every job that is due; return whether more can be done at once."""
        now_s = time.monotonic()
        return any([one.step(pause) for one in self._tried if max(one.job.due_s, one.not_before_s) <= now_s])


class _Tried:
    """A job, which is tried again a while after an error that may pass."""

    def __init__(self, job: Job) -> None:
        self.job, self.not_before_s, self._waiting = job, 0.0, WhyWaiting()

    def step(self, pause: Pause) -> bool:
        try:
            more = self.job.step(pause)
        except LostRowError:
            raise
        except self.job.passing as error:
            self.not_before_s = time.monotonic() + _RETRY_S
            if self._waiting.is_news(f"{type(error).__name__}: {error}"):
                log.warning("%s is tried again later: %s", self.job.name, error)
            return False
        self._waiting.over()
        return more
