"""What the engine asks for when rows that the index knows are not in storage; `paramserver.repair.repairer` answers. Types only."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import NodeLostError, StorageError
from kvemb.schema.table_def import TableDef

from ..model.batch import Batch

Pause = Callable[[StorageError, float], None]
"""Called with an error that may pass before the next try: waits so many seconds, or raises to give up."""


class JournalTail(Protocol):
    """The part of the journal that is being replayed."""

    def wanted(self, definition: TableDef, ids: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the versions that rows have at the end of it, 0 for those that do not exist then: uint64 [n]; `known` if it has none."""

    def written(self) -> Iterator[tuple[TableDef, NDArray[np.uint64]]]:
        """Yield the ids of all rows that it writes, table by table."""


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
    tail: JournalTail | None = None


NO_BATCH = AheadOfIndex(1, 0)


class RepairPort(Protocol):
    """Brings back rows that storage has lost, when the engine meets one that it needs."""

    def nodes(self, ahead: AheadOfIndex, pause: Pause, *, suspects: Iterable[str] = ()) -> int:
        """Restore every lost node, and compare these with the index; return how many nodes that were."""

    def rows(self, batch: Batch, ahead: AheadOfIndex) -> int:
        """Restore rows of a batch on nodes that are in order; return how many rows that were."""


class NoRepair:
    """Brings nothing back: a lost node is an error, and a lost row is one again at the next try."""

    def nodes(self, ahead: AheadOfIndex, pause: Pause, *, suspects: Iterable[str] = ()) -> int:
        """See `RepairPort`."""
        raise NodeLostError("a node has lost rows, and nothing here restores them")

    def rows(self, batch: Batch, ahead: AheadOfIndex) -> int:
        """See `RepairPort`."""
        return 0


NO_REPAIR = NoRepair()
