"""Records as they were at a cut, of rows that have been written over since. Kept in a file that has no name, found by id.

The page cache holds the file as long as there is memory, and the disk when there is not. So a long save of a busy table cannot eat the
shard's memory. Per row 23 bytes or so stay in memory, for its place. Thread-safe.
"""

import os
import tempfile
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvemb.index.row_index import RowIndex

Ids = NDArray[np.uint64]
Bytes = NDArray[np.uint8]


class CopyOnWriteRecords:
    """Keeps the records of one table as they were at a save's cut.

    Args:
        folder: where the file lies.
        record_bytes: of one record.
    """

    def __init__(self, folder: Path, record_bytes: int) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed by `close`)
        self._record_bytes = record_bytes
        self._places = RowIndex()  # id -> 1 + number of its record in the file
        self._n = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._n

    def put(self, ids: Ids, records: Bytes) -> None:
        """Keep n records; an id that has one already keeps that one.

        Args:
            ids: uint64 [n], unique.
            records: uint8 [n, record bytes]; copied.

        Raises:
            OSError: nothing was kept.
        """
        with self._lock:
            new = self._places.get(ids) == 0
            data = np.ascontiguousarray(records[new]).reshape(-1).data
            at = self._n * self._record_bytes
            while len(data):
                written = os.pwrite(self._file.fileno(), data, at)
                data, at = data[written:], at + written
            n_new = int(new.sum())
            self._places.put(ids[new], np.arange(self._n + 1, self._n + 1 + n_new, dtype=np.uint64))
            self._n += n_new

    def find(self, ids: Ids) -> tuple[NDArray[np.bool_], Bytes]:
        """Return which ids have a record (bool [n]) and the records of those, in order (uint8 [found, record bytes])."""
        with self._lock:
            places = self._places.get(ids)
            found = places != 0
            rows = places[found].astype(np.int64) - 1
            if not len(rows):
                return found, np.empty((0, self._record_bytes), np.uint8)
            kept = np.memmap(self._file, np.uint8, "r", shape=(self._n, self._record_bytes))
            return found, np.asarray(kept[rows])

    def close(self) -> None:
        """Let the file go."""
        self._file.close()
