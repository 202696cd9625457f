"""Which cluster map the rows that come in must be routed by: one whose shards are those in force. Ingest locks.

Whatever came by other shards' map is refused as a whole, however late it is: its slots may have another writer by now. What comes by a
newer one waits until this shard has seen that. While slots are handed over everything waits. Slots that move between nodes refuse nothing:
rows keep their writer. docs/adr/0062 says why. What must not live here: what a hand-over consists of.
"""

from collections.abc import Callable

from kvemb.errors import ShardUnavailableError, SlotsMovedError
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.move_plan import ABORTING, DRAINING, FLIPPED, HOLDING, SHARDS

_FIRST = ClusterMap.first(0, 1)
_AT_THE_BARRIER = (HOLDING, DRAINING, ABORTING)


class MapGate:
    """The map that one shard takes rows by.

    What waits follows from the map alone, so that a new start of the shard in the middle of a hand-over changes nothing.

    Args:
        shard: number.
        cluster_map: returns the map in force, as far as this shard has seen.

    Example:
        >>> gate = MapGate(0)
        >>> gate.holds(1), gate.holds(2)
        (False, True)
    """

    def __init__(self, shard: int = 0, cluster_map: Callable[[], ClusterMap] = lambda: _FIRST) -> None:
        self._shard, self._map = shard, cluster_map
        self._known, self._held = _FIRST, False
        self._member = shard in cluster_map().shard_numbers

    @property
    def now(self) -> ClusterMap:
        """The map in force."""
        return self._map()

    def holds(self, serial: int, *, of_step: bool = False) -> bool:
        """Whether rows that were routed by the shards of this serial are to wait; those of a sync job's step wait at the barrier."""
        now = self._map()
        if now is not self._known:
            self._known, self._held = now, hands_over(now, self._shard)
        held = self._held and not (of_step and now.plan is not None and now.plan.phase in _AT_THE_BARRIER)
        return serial > now.shards_serial or (serial == now.shards_serial and held)

    def joins(self) -> None:
        """Take rows from now on: this process has the entries of the slots that come to it. Any thread."""
        self._member = True

    def leaves(self) -> None:
        """Take none any more, whatever a later map says: another process may have the number by then. Any thread."""
        self._member = False

    def require(self, serial: int) -> None:
        """Refuse rows that were routed by an older map, of other shards.

        Raises:
            SlotsMovedError: naming both.
            ShardUnavailableError: this process has no part in the shard that the map names.
        """
        now = self._map().shards_serial
        if not self._member and self._shard in self._map().writing_shards:
            raise ShardUnavailableError(f"shard {self._shard}: another process has its slots; nothing was taken")
        if serial < now:
            raise SlotsMovedError(
                f"shard {self._shard}: rows routed by the cluster map of serial {serial} came in when that of serial {now} was in force; "
                "nothing of them was taken. They are to be sent again by the map in force."
            )


def last_step(cluster_map: ClusterMap) -> int | None:
    """Return behind which step of a sync job no shard hands one out, 0 for its own last one; None where steps go on."""
    plan = cluster_map.plan
    if plan is None or plan.kind != SHARDS or plan.phase not in _AT_THE_BARRIER:
        return None
    return plan.last_step if plan.phase == DRAINING else 0


def hands_over(cluster_map: ClusterMap, shard: int) -> bool:
    """Whether a plan is in a phase in which this shard takes nothing: its slots go, or come, and are nobody's to write."""
    plan = cluster_map.plan
    if plan is None or plan.kind != SHARDS or plan.phase not in (DRAINING, FLIPPED, ABORTING):
        return False
    gives, takes = bool(cluster_map.gives(shard).any()), bool(cluster_map.takes(shard).any())
    return gives or (takes and plan.phase == FLIPPED)
