"""What the engine asks for when rows that the index knows are not in storage; `paramserver.repair.repairer` answers. Types only."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvemb.errors import StorageError

from ..model.batch import Batch
from ..model.transition import Replay

Pause = Callable[[StorageError, float], None]
"""Called with an error that may pass before the next try: waits so many seconds, or raises to give up."""


@dataclass(frozen=True)
class AheadOfIndex:
    """What storage may hold, or is to hold, although the index does not know of it yet.

    Args:
        first, newest: versions of the batch that is being applied, which may be written by half; rows that have them are left alone.
        tail: while the journal is replayed, what rows come to in the end. A node must not be in use again with rows as they were in the
            middle of it: so it is restored to the end at once, and the replay then finds its rows done.
    """

    first: int
    newest: int
    tail: Replay | None = None


NO_BATCH = AheadOfIndex(1, 0)


class RepairPort(Protocol):
    """Brings back rows that storage has lost, when the engine meets one that it needs."""

    def nodes(self, ahead: AheadOfIndex, pause: Pause, *, suspects: Iterable[str] = ()) -> int:
        """Restore every lost node, and compare these with the index; return how many nodes that were."""

    def rows(self, batch: Batch, ahead: AheadOfIndex) -> int:
        """Restore rows of a batch on nodes that are in order; return how many rows that were."""
