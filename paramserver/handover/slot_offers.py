"""What a giver answers to takers that ask it, page by page, what it knows of the rows that move. Thread-safe.

While slots are read ahead it is what the index knows when the first page is asked for; once the shard has drained it is final.
"""

import threading
from collections.abc import Callable

import numpy as np

from kvemb.protocol.move_messages import SlotEntriesReply, SlotEntriesRequest
from kvemb.protocol.shard_routing import MapSource
from kvemb.schema.move_plan import DRAINING, MOVING, SHARDS

from .given_rows import GivenRows
from .slot_entries import SlotEntries

PAGE_ROWS = 1 << 19
Members = tuple[tuple[str, int], ...]


class SlotOffers:
    """The entries that one shard hands over.

    Args:
        maps: says which map is in force.
        rows: finds those that move.
        shard: number.
        epoch: returns that of the shard's process.
        members: returns those of a sync job.
    """

    def __init__(
        self, maps: MapSource, rows: GivenRows, shard: int, epoch: Callable[[], int], members: Callable[[], Members] = tuple
    ) -> None:
        self._maps, self._rows, self._shard, self._epoch, self._members = maps, rows, shard, epoch, members
        self._lock = threading.Lock()
        self._drained = 0  # version of the map under which the shard has written all that it had taken
        self._made: dict[tuple[int, int], list[SlotEntries]] = {}  # by the map's version and the taker

    def drained(self, version: int) -> None:
        """Say that what the index knows is final, and in storage, while the map of this version is in force."""
        with self._lock:
            self._drained = version

    def is_final(self, version: int) -> bool:
        """Whether that was said, and this map is in force still."""
        with self._lock:
            return self._drained == version == self._maps.cluster_map.version

    def clear(self) -> None:
        """Forget what was made for an older map."""
        with self._lock:
            self._made = {}

    def page(self, request: SlotEntriesRequest) -> SlotEntriesReply:
        """Answer a taker."""
        cluster_map = self._maps.cluster_map
        plan, version, start = cluster_map.plan, cluster_map.version, max(0, request.start)
        with self._lock:
            final = self._drained == version
            ready = plan is not None and plan.kind == SHARDS and (plan.phase == MOVING or (plan.phase == DRAINING and final))
            if not ready or version != request.version:
                return SlotEntriesReply(False, self._epoch(), [], b"", b"")
            if (version, request.shard) not in self._made or (start == 0 and not final):
                gives, takes = cluster_map.gives(self._shard), cluster_map.takes(request.shard)
                known = self._rows.entries(gives, final=final)
                self._made[version, request.shard] = known if (takes >= gives).all() else [one.within(takes) for one in known]
            entries = self._made[version, request.shard]
        tables = [{"definition": one.definition.to_dict(), "step": one.step, "rows": len(one.ids)} for one in entries]
        ids, versions = (_rows(entries, name, start) for name in ("ids", "versions"))
        members = self._members()
        trainers, incarnations = [name for name, _ in members], [incarnation for _, incarnation in members]
        return SlotEntriesReply(True, self._epoch(), tables, ids, versions, trainers, incarnations)


def _rows(entries: list[SlotEntries], name: str, start: int) -> bytes:
    """A page of the rows of all tables, one after the other."""
    pieces, left = [], PAGE_ROWS
    for one in entries:
        array = getattr(one, name)
        some = array[start : start + left]
        start, left = max(0, start - len(array)), left - len(some)
        pieces.append(np.ascontiguousarray(some, dtype="<u8").tobytes())
    return b"".join(pieces)
