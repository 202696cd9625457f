"""Repeats a trainer's reads while a node is down, being repaired, or not the one of its address; or lets them fail at once.

A read is repeated within its deadline, and whole: nothing of a failed batch is used, so no answer mixes rows from before and after a
repair, which usually takes seconds to minutes. That it waits is said in the log.
"""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from kvemb.coordination.replicated_values import DamagedCopyError
from kvemb.errors import (
    DeadlineExceededError,
    MapChangedError,
    NodeLostError,
    NodeRefusesError,
    NodeSuspectError,
    NodeUnavailableError,
    StorageError,
    WrongNodeError,
)
from kvemb.net.deadline import Absence, Deadline, pauses

WAIT = "wait"
ABSENT = (NodeLostError, NodeSuspectError, NodeUnavailableError, WrongNodeError)
"""Errors that pass: with a repair, a node back at its address, a user accepted again, or a newer map (read meanwhile)."""
NEVER_RIGHT = (WrongNodeError, NodeRefusesError)
"""Errors raised at once while a store is only connecting: its address, user and password may never have been right."""

log = logging.getLogger("kvemb")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
R = TypeVar("R")


def retry_read(
    call: Callable[[], R],
    deadline: Deadline,
    *,
    away: Absence,
    waits_for: tuple[type[StorageError], ...] = ABSENT,
    connecting: bool = False,
) -> R:
    """Call until it succeeds."""
    last: StorageError | None = None
    passing: tuple[type[StorageError], ...] = (*waits_for, DeadlineExceededError)
    for pause_s in pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
        began_s = time.monotonic()
        try:
            result = call()
        except passing as error:
            if connecting and isinstance(error, NEVER_RIGHT):
                raise
            over = deadline.remaining_s() <= pause_s
            if over and isinstance(error, DeadlineExceededError):
                if last is None:
                    raise
                raise _waited_for(last, deadline) from None  # says more than that the last try had too little time
            if over:
                raise _waited_for(error, deadline) from error
            last = error
            _say_away(away, error, deadline, time.monotonic() - began_s)
        else:
            if last is not None and (lasted_s := away.over()) is not None:
                log.warning("storage answers again, after %.0f s", lasted_s)
            return result
        time.sleep(pause_s)
    raise AssertionError("unreachable")


def _say_away(away: Absence, error: StorageError, deadline: Deadline, tried_s: float) -> None:
    if (lasted_s := away.lasts(tried_s)) is not None:
        left_s = deadline.remaining_s()
        log.warning("storage has been away for %.0f s, and is waited for, for %.0f s more at most: %s", lasted_s, left_s, error)


def _waited_for(error: StorageError, deadline: Deadline) -> StorageError:
    return type(error)(
        f"{error} Waited {deadline.timeout_s:g} s for it. A longer timeout_s of the call waits longer; so does, where a call has none, "
        "parameter_servers.away_timeout_s."
    )


class ReadRetry:
    """How a store repeats its reads; a part of it. Shards never wait, because they repair nodes and make maps themselves."""

    def __init__(self, role: str, on_lost_node: str) -> None:
        trainers: tuple[type[StorageError], ...] = (*ABSENT, DamagedCopyError) if on_lost_node == WAIT else (MapChangedError,)
        self.waits_for = trainers if role == "trainer" else ()
        self._away = Absence()

    def __call__(self, call: Callable[[], R], deadline: Deadline, *, connecting: bool = False) -> R:
        """Call until it succeeds, as `retry_read` does, or once where this store does not wait."""
        if not self.waits_for:
            return call()
        return retry_read(call, deadline, away=self._away, waits_for=self.waits_for, connecting=connecting)
