"""An engine without surroundings: nothing hears of its writes, and what storage has lost stays an error."""

from collections.abc import Iterable

import numpy as np

from kvemb.errors import NodeLostError
from kvemb.schema.table_def import TableDef
from paramserver.engine.piece_writer import EnginePorts
from paramserver.engine.storage_pace import AheadOfIndex, Pause
from paramserver.model.batch import Batch


class NoObserver:
    """An observer that ignores writes."""

    reads = False

    def overwriting(self, definition: TableDef, ids: np.ndarray, versions: np.ndarray, records: np.ndarray) -> None:
        """See `WriteObserver`."""

    def erased(self, definition: TableDef, ids: np.ndarray, version: int) -> None:
        """See `WriteObserver`."""


class NoRepair:
    """Brings nothing back: a lost node is an error, and a lost row is one again at the next try."""

    def nodes(self, ahead: AheadOfIndex, pause: Pause, *, suspects: Iterable[str] = ()) -> int:
        """See `RepairPort`."""
        raise NodeLostError("a node has lost rows, and nothing here restores them")

    def rows(self, batch: Batch, ahead: AheadOfIndex) -> int:
        """See `RepairPort`."""
        return 0


NO_OBSERVER, NO_REPAIR = NoObserver(), NoRepair()
ALONE = EnginePorts(NO_REPAIR, NO_OBSERVER)
