"""The events of a shard that are no batches, written to its journal: moves of slots, loads, drops of tables.

The event of a move stands behind every batch of slots that have gone, and before every batch of slots that have come: the former are
drained before the map flips, the latter taken once it has, and the committer looks at the map before it writes a batch. A file in the
shard's folder says which map was told last, so that a shard which did not live at the flip tells it all the same.
"""

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import JournalDamagedError, JournalFullError
from kvemb.protocol.shard_routing import MapSource
from kvemb.schema.slots import from_runs, runs_of

from ..journal import EventEntry
from ..journal.entry import MOVED, Slots
from ..journal.write_ahead_log import AppliedMark, FencedLog
from ..shard_process.data_dir import DataDir, mend

TOLD = "feed-slots"  # the file: the serial, a line end, and the runs of all slots' shards
_MOST_SHARDS = 1 << 14


class ShardEvents:
    """Writes a shard's events. Thread-safe."""

    def __init__(
        self, shard: int, fenced_log: FencedLog, mark: AppliedMark, maps: MapSource, data: DataDir, still_ours: Callable[[], None]
    ) -> None:
        self._shard, self._fenced_log, self._mark = shard, fenced_log, mark
        self._maps, self._data, self._still_ours = maps, data, still_ours
        self._lock = threading.RLock()
        now = maps.cluster_map
        self._told = self._kept() or (now.shards_serial, now.slot_shards)
        if data.read(TOLD) is None:
            self._keep(*self._told)

    @property
    def told(self) -> tuple[int, NDArray[np.bool_]]:
        """The serial of the last move whose event this shard has written, if it had a part in it; and its slots then, bool [16384]."""
        serial, owners = self._told
        return serial, owners == self._shard

    def look(self) -> None:
        """Write the event of the moves that have flipped since the last look, if there are any. Raises as `tell`."""
        if self._maps.cluster_map.shards_serial == self._told[0]:
            return
        with self._lock:
            now, (serial, before) = self._maps.cluster_map, self._told
            if now.shards_serial == serial:
                return
            gone, came = self._moved(before, now.slot_shards, now.slot_shards), self._moved(now.slot_shards, before, before)
            if gone or came:
                left = self._shard not in now.writing_shards
                self.tell(EventEntry(MOVED, "", now.shards_serial, gone, came, left))
            try:
                self._keep(now.shards_serial, now.slot_shards)
            except OSError as error:
                raise JournalFullError(f"{self._data.path / TOLD}: {error.strerror}; {mend(error)}.") from error
            self._told = now.shards_serial, now.slot_shards

    def tell(self, event: EventEntry) -> None:
        """Write an event, durably. Raises as `FencedLog.append` and `commit`."""
        self._fenced_log.append(event)
        self._fenced_log.commit()
        self._mark.wake()

    def _moved(self, before: NDArray[np.uint16], after: NDArray[np.uint16], others: NDArray[np.uint16]) -> Slots:
        """The slots that were this shard's and are not, by their shard among `others`."""
        which = (before == self._shard) & (after != self._shard)
        numbers = np.unique(others[which]).tolist()
        return tuple((number, tuple(np.flatnonzero(which & (others == number)).tolist())) for number in numbers)

    def _kept(self) -> tuple[int, NDArray[np.uint16]] | None:
        raw = self._data.read(TOLD)
        if raw is None:
            return None
        serial, _, runs = raw.partition(b"\n")
        try:
            return int(serial), from_runs(runs, _MOST_SHARDS)
        except ValueError as error:
            raise JournalDamagedError(f"{self._data.path / TOLD}: {error}. Put a good copy of the file back.") from error

    def _keep(self, serial: int, owners: NDArray[np.uint16]) -> None:
        self._data.write(TOLD, [b"%d\n" % serial, runs_of(owners)], self._still_ours)
