"""Hears from the engine what is about to be written over or erased, for the save under way and for those to come.

It is there before the engine is, and outlives every save. What a save does with the rows is in `save_job`.
"""

import numpy as np
from numpy.typing import NDArray

from kvemb.schema.table_def import TableDef

from .erased_log import ErasedLog
from .save_job import SaveJob

Ids = NDArray[np.uint64]


class SaveObserver:
    """The `WriteObserver` of one shard: hands rows to the save under way before they change, and notes erased ids.

    Args:
        since: version as of which no erase is missing: that of the last batch before this process's first.
    """

    def __init__(self, since: int) -> None:
        self.erased_log = ErasedLog(since)
        self.job: SaveJob | None = None  # the newest save that was cut

    @property
    def running(self) -> bool:
        """Whether a save reads rows now. Any thread."""
        return self.job is not None and self.job.running

    def follow(self, job: SaveJob | None) -> None:
        """Let this save hear of rows from now on, and no other; between two batches."""
        self.job = job

    def overwriting(self, definition: TableDef, ids: Ids, versions: Ids, records: NDArray[np.uint8]) -> None:
        """Hear of rows that exist and are about to change: versions uint64 [n], whole records uint8 [n, record bytes]. Apply thread."""
        job = self.job
        if job is not None and job.running:
            job.keep(definition, ids, versions, records)

    @property
    def wants_erased(self) -> bool:
        """Whether `overwriting` must be told the records of rows about to be erased."""
        return self.running

    def erased(self, definition: TableDef, ids: Ids, version: int) -> None:
        """Hear of rows that a batch has erased. Apply thread."""
        self.erased_log.add(version, definition.key, ids)
