"""The events of a shard that are no batches, written to its journal: moves of slots, loads, drops of tables."""

import numpy as np

from kvemb.protocol.shard_routing import MapSource
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.move_plan import FLIPPED, SHARDS

from ..journal import EventEntry
from ..journal.applied_mark import AppliedMark
from ..journal.entry import MOVED, Slots
from ..journal.write_ahead_log import FencedLog


class FeedEvents:
    """Writes a shard's events. Thread-safe.

    Args:
        fenced_log: the journal.
        mark: whose readers are woken.
        maps: says which map is in force.
    """

    def __init__(self, fenced_log: FencedLog, mark: AppliedMark, maps: MapSource) -> None:
        self._fenced_log, self._mark, self._maps = fenced_log, mark, maps

    @property
    def serial(self) -> int:
        """The serial of the last move of slots whose event this shard has written, if it had to; 0 while some may still be written."""
        plan = self._maps.cluster_map.plan
        return 0 if plan is not None and plan.kind == SHARDS and plan.phase == FLIPPED else self._maps.cluster_map.shards_serial

    def tell(self, event: EventEntry) -> None:
        """Write an event, durably. Raises as `FencedLog.append` and `commit`."""
        self._fenced_log.append(event)
        self._fenced_log.commit()
        self._mark.wake()


def move_event(cluster_map: ClusterMap, shard: int) -> EventEntry | None:
    """Return the event of a plan that has flipped, as of one shard; None where it has no part in it."""
    gives, takes, plan = cluster_map.gives(shard), cluster_map.takes(shard), cluster_map.plan
    if plan is None or not (gives.any() or takes.any()):
        return None
    gone, came = _by_shard(cluster_map.slot_shards, gives), _by_shard(plan.slot_owners, takes)
    left = shard not in cluster_map.writing_shards
    return EventEntry(MOVED, "", cluster_map.shards_serial, gone, came, left=left)


def _by_shard(owners: np.ndarray, which: np.ndarray) -> Slots:
    """The slots of `which` (bool [16384]) by the owner that each has."""
    numbers = np.unique(owners[which]).tolist()
    return tuple((number, tuple(np.flatnonzero(which & (owners == number)).tolist())) for number in numbers)
