"""Which cluster map the rows that come in must be routed by: the one in force. Ingest locks.

Whatever came by an older map is refused as a whole, however late it is: its slots may have another writer by now. What comes by a newer one
waits until this shard has seen that. While slots are handed over everything waits (`hold`). docs/adr/0062 says why. What must not live
here: what a hand-over consists of.
"""

from collections.abc import Callable

from kvemb.errors import SlotsMovedError


class MapGate:
    """The map that one shard takes rows by.

    Args:
        shard: number.
        serial: returns the serial of the map in force, as far as this shard has seen.

    Example:
        >>> gate = MapGate(0, lambda: 2)
        >>> gate.holds(2), gate.holds(3)
        (False, True)
        >>> gate.hold()
        >>> gate.holds(2)
        True
    """

    def __init__(self, shard: int = 0, serial: Callable[[], int] = lambda: 1) -> None:
        self._shard, self._serial = shard, serial
        self._held = False

    def hold(self) -> None:
        """Let everything wait that is routed by the map in force."""
        self._held = True

    def release(self) -> None:
        """Take rows again."""
        self._held = False

    def holds(self, serial: int) -> bool:
        """Whether rows that were routed by this map are to wait."""
        now = self._serial()
        return serial > now or (serial == now and self._held)

    def require(self, serial: int) -> None:
        """Refuse rows that were routed by an older map.

        Raises:
            SlotsMovedError: naming both.
        """
        now = self._serial()
        if serial < now:
            raise SlotsMovedError(
                f"shard {self._shard}: rows routed by the cluster map of serial {serial} came in when that of serial {now} was in force; "
                "nothing of them was taken. They are to be sent again by the map in force."
            )
