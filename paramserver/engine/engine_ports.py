"""What an engine asks and tells while it applies: everything around it that is there before it is."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.schema.table_def import TableDef

from .repair_port import NO_REPAIR, RepairPort
from .write_behind import WriteBehind
from .write_observer import WriteObserver


class NoObserver:
    """Nobody wants to hear of writes."""

    wants_erased = False

    def overwriting(self, definition: TableDef, ids: NDArray[np.uint64], versions: NDArray[np.uint64], records: NDArray[np.uint8]) -> None:
        """See `WriteObserver`."""

    def erased(self, definition: TableDef, ids: NDArray[np.uint64], version: int) -> None:
        """See `WriteObserver`."""


NO_OBSERVER = NoObserver()


@dataclass(frozen=True)
class EnginePorts:
    """What an engine works with beside storage and tables: repair, whoever observes writes, write-behind.

    Args:
        repair: brings back what storage has lost.
        observer: hears of rows before they change.
        behind: holds hot rows back; None: every row is written at every apply.
    """

    repair: RepairPort = NO_REPAIR
    observer: WriteObserver = NO_OBSERVER
    behind: WriteBehind | None = None


ALONE = EnginePorts()
"""Nothing is around: what storage has lost stays an error."""
