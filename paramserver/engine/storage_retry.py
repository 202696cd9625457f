"""Trying again what storage did not take: which errors may pass by themselves, how long to pause, and what is repaired meanwhile.

Shared by everything that writes rows. What must not live here: what one try does, and how rows that are in the way are mended.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from kvemb.errors import (
    DeadlineExceededError,
    ForeignPageError,
    LostRowError,
    NodeFullError,
    NodeLostError,
    NodeSuspectError,
    NodeUnavailableError,
    RecordError,
    StorageError,
    WrongNodeError,
)
from kvemb.net.backoff import pauses

from .repair_port import NO_BATCH, AheadOfIndex, Pause, RepairPort

RETRYABLE = (NodeUnavailableError, DeadlineExceededError, NodeFullError, WrongNodeError)
"""A wrong node was not written to: every new connection reads the marker first. Its address may lead to the right one again."""
PASSING = (NodeLostError, NodeSuspectError, *RETRYABLE)
"""What may pass for those who repair nothing themselves: the shards repair nodes."""
MAX_CONFLICT_ROUNDS = 16
CHANGED_BY_ANOTHER_WRITER = (
    f"were changed between every read and write of {MAX_CONFLICT_ROUNDS} tries; is another program writing to these nodes?"
)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_MAX_MENDED = 8  # times in a row that rows of one piece of work may be found lost
T = TypeVar("T")
log = logging.getLogger("paramserver")


def until_stored(
    call: Callable[[], T], pause: Pause, repair: RepairPort, mend: Callable[[StorageError], None], ahead: AheadOfIndex = NO_BATCH
) -> T:
    """Call until storage has taken what is to be written: wait for nodes that are away, have those repaired that lost rows.

    Args:
        call: one try.
        pause: called between tries; raises to give up.
        repair: brings back nodes that lost rows, and compares one where another program has replaced a page.
        mend: told of rows that are lost, or not ours, on nodes that are in order. It is called as a part of the next try.
        ahead: what storage may hold although the index does not know of it yet.

    Raises:
        LostRowError, RecordError: `mend` found no way, or what it mends is lost again and again.
        StorageError: one that does not pass, or what `pause` raised. Rows may have been written.
    """
    waits, n_mended = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), 0
    to_mend: StorageError | None = None
    while True:
        try:
            if to_mend is not None:
                mend(to_mend)
                to_mend = None
            return call()
        except RETRYABLE as error:
            n_mended = 0
            pause(error, next(waits))
        except (NodeLostError, NodeSuspectError) as error:
            if not repair.nodes(ahead, pause):
                pause(error, next(waits))
        except (LostRowError, RecordError) as error:  # missing, old, or written over by another program
            n_mended += 1
            if n_mended > _MAX_MENDED:
                raise
            if isinstance(error, ForeignPageError):
                log.error("%s: every row of the node is compared", error)
                repair.nodes(ahead, pause, suspects=[error.address])
            elif to_mend is not None:  # it is `mend` that found no way
                raise
            else:
                to_mend = error
