"""Which rows were erased since when: what an incremental checkpoint must say. In memory, bounded; it knows how far back it reaches."""

import threading

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint64]
_MAX_IDS = 1 << 24


class ErasedLog:
    """Of all tables of one shard. Thread-safe.

    Args:
        since: version as of which nothing is missing in it: that of the last batch before this process's first.
    """

    def __init__(self, since: int) -> None:
        self._since = since
        self._entries: list[tuple[int, str, Ids]] = []
        self._n_ids = 0
        self._lock = threading.Lock()

    def add(self, version: int, table: str, ids: Ids) -> None:
        """Note the ids that the batch of this version erased, unless it is older than the log; past the bound the oldest are forgotten."""
        if version <= self._since:  # a batch of an earlier process, which is replayed
            return
        with self._lock:
            self._entries.append((version, table, ids.copy()))
            self._n_ids += len(ids)
            while self._n_ids > _MAX_IDS:
                self._since, _, gone = self._entries.pop(0)
                self._n_ids -= len(gone)

    def forget(self, version: int) -> None:
        """Know nothing of batches up to this version any more: slots come back whose rows another shard may have erased meanwhile."""
        with self._lock:
            self._since, self._entries, self._n_ids = max(self._since, version), [], 0

    def after(self, version: int, table: str) -> Ids | None:
        """Return the ids erased by batches after this version (ascending, unique; they may exist again); None if it is not known."""
        with self._lock:
            if version < self._since:
                return None
            some = [ids for at, name, ids in self._entries if name == table and at > version]
        return np.unique(np.concatenate(some)) if some else np.empty(0, np.uint64)
