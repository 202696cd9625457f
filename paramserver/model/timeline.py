"""Which versions this shard can have written by what its journal says. A row at any other version proves that batches are missing. Pure.

Batches are numbered on from epoch to epoch, and each is in the journal before any row of it is written. So when a process has read the
journal to its end, at batch k, no row can have a higher number from an earlier epoch. No row that exists can be newer than the index knows
it. What is older, or missing, is no such proof: storage loses rows, and the journal brings them back.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import JournalBehindError
from kvemb.schema.record import MAX_K, split_version
from kvemb.schema.table_def import TableDef

ORDERS = (
    "No row was taken back, and no version in storage is lost. If the shard's last folder is elsewhere, correct "
    "parameter_servers.data_dir; else put the files of that folder back as they were. Where they are gone for good, start the shard with "
    "--roll-back: it goes on from where its journal ends, rows that are newer are set back, and the pushes behind it are lost (load a "
    "checkpoint then, where one is newer)."
)


@dataclass
class Timeline:
    """What a process of a shard knows of versions.

    Args:
        epoch: of this process's versions.
        k: of the last batch of all epochs before.
        where: the shard and its journal, for messages.
        roll_back: rows that are ahead are to be set back: somebody said so.
    """

    epoch: int
    k: int = MAX_K
    where: str = "this shard's journal"
    roll_back: bool = False

    def rise(self, epoch: int, k: int) -> None:
        """Go on in a higher epoch; no batch above k was numbered before. Apply thread only."""
        self.epoch, self.k = epoch, k

    def refuse_lost(self, definition: TableDef, ids: NDArray[np.uint64], stored: NDArray[np.uint64], known: NDArray[np.uint64]) -> None:
        """Look for rows that only a batch which the journal does not have can have written.

        Args:
            definition: the table.
            ids: uint64 [n].
            stored: uint64 [n], versions in storage (0 = not found), without those of the batch at work.
            known: uint64 [n], versions of the index (0 = does not exist).

        Raises:
            JournalBehindError: there are such rows.
        """
        if self.roll_back:
            return
        before = stored >> np.uint64(48) < np.uint64(self.epoch)
        lost = (stored > known) & ((known > 0) | (before & ((stored & np.uint64(MAX_K)) > np.uint64(self.k))))
        if not lost.any():
            return
        at = int(np.argmax(np.where(lost, stored, np.uint64(0))))
        expected = f"version {split_version(int(known[at]))}" if known[at] else "no such row"
        raise JournalBehindError(
            f"{self.where} lacks batches that were acknowledged and applied: table {definition.name!r}, id "
            f"{definition.shown_id(int(ids[at]))} has version {split_version(int(stored[at]))} in storage, expected {expected} by the "
            f"shard's index ({int(lost.sum())} such rows or more; versions are (epoch, k)). The journal reached batch {self.k} when the "
            f"shard was started. {ORDERS}"
        )
