"""How long a connection's pulls took, by table: counted once somebody wants to know, and not before."""

from collections.abc import Sequence

from kvemb.datapath.pull import PullRequest
from kvemb.metrics import SECONDS, BucketCounts
from kvemb.process import ForkLock


class PullTimes:
    """Times of pulls. A pull of several tables counts whole for each of them. Thread-safe."""

    def __init__(self) -> None:
        self.counted = False
        self._lock, self._tables = ForkLock(), dict[str, BucketCounts]()

    def count(self) -> None:
        """Count from now on."""
        self.counted = True

    def add(self, requests: Sequence[PullRequest], took_s: float) -> None:
        """Count a pull that took so long; one that fails is not counted."""
        with self._lock:
            for request in requests:
                self._tables.setdefault(request.definition.name, BucketCounts(SECONDS)).add(took_s)

    def tables(self) -> list[tuple[str, BucketCounts]]:
        """Return what was counted of each table, by name."""
        with self._lock:
            return sorted(self._tables.items())
