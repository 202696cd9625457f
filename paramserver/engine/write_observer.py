"""Who hears of rows before they change (a save that is under way; `paramserver.checkpoint.saver`). Types only."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb.schema.table_def import TableDef


class WriteObserver(Protocol):
    """Told by the engine, on the apply thread."""

    @property
    def wants_erased(self) -> bool:
        """Whether the records of rows about to be erased are wanted too; they must be read for it."""

    def overwriting(self, definition: TableDef, ids: NDArray[np.uint64], versions: NDArray[np.uint64], records: NDArray[np.uint8]) -> None:
        """Rows that exist are about to be written over or erased: their versions and whole records, good during this call only."""

    def erased(self, definition: TableDef, ids: NDArray[np.uint64], version: int) -> None:
        """Rows were erased by the batch of this version."""
