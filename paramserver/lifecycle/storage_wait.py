"""How a start waits for storage: nodes that are down, or hang, are asked again until they answer or the time for the start is up."""

import logging
from collections.abc import Callable
from typing import TypeVar

from kvemb.errors import DeadlineExceededError, KvembError, NodeRefusesError, NodeUnavailableError, StorageError
from kvemb.net.backoff import pauses
from kvemb.net.deadline import Deadline

from ..recovery.start_report import StartReport

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
ABSENT = (NodeUnavailableError, DeadlineExceededError)
T = TypeVar("T")
log = logging.getLogger("paramserver")

Wait = Callable[[float], None]
"""Waits so many seconds, or raises StoppedError."""


class StoppedError(Exception):
    """The process was told to stop while it was starting."""


class StorageWait:
    """Tries a step of the start again while storage is away.

    Args:
        deadline: of the whole start.
        wait: between tries.
        report: of the start.
    """

    def __init__(self, deadline: Deadline, wait: Wait, report: StartReport) -> None:
        self.deadline, self._wait, self._report = deadline, wait, report
        self._said = ""

    def __call__(
        self,
        step: Callable[[], T],
        errors: tuple[type[KvembError], ...] = ABSENT,
        may_pass: Callable[[KvembError], bool] = lambda error: True,
    ) -> T:
        """Take a step that may be taken again after any of these errors.

        Args:
            step: raises them.
            errors: that are waited for.
            may_pass: whether this one is.

        Raises:
            KvembError: the last one, once the deadline has passed; at once that a node refuses us: its user may never have been right.
        """
        waits = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                return step()
            except errors as error:
                if isinstance(error, NodeRefusesError) or not may_pass(error) or self.deadline.expired:
                    raise
                if self._said != (said := str(error)):
                    log.info("waiting for %s: %s", "storage" if isinstance(error, StorageError) else "shard 0", error)
                self._said = said
                self._report.waits(said)
            self._wait(min(next(waits), self.deadline.remaining_s()))
