"""An engine without surroundings: what storage has lost stays an error."""

from collections.abc import Iterable

from kvemb.errors import NodeLostError
from paramserver.engine.storage_pace import AheadOfIndex, Pause
from paramserver.model.batch import Batch


class NoRepair:
    """Brings nothing back: a lost node is an error, and a lost row is one again at the next try."""

    addresses = ()

    def nodes(self, ahead: AheadOfIndex, pause: Pause, *, suspects: Iterable[str] = ()) -> int:
        """See `RepairPort`."""
        raise NodeLostError("a node has lost rows, and nothing here restores them")

    def rows(self, batch: Batch, ahead: AheadOfIndex) -> int:
        """See `RepairPort`."""
        return 0


ALONE = NoRepair()
