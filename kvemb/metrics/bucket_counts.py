"""Counts of values by size, for a histogram that somebody may scrape. One bisection per value; no lock.

What must not live here: Prometheus (`kvemb.metrics.metric_families`).
"""

from bisect import bisect_left
from collections.abc import Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bounds for what a batch or a pull may take."""
BATCHES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0)
"""Bounds for numbers of batches."""


class BucketCounts:
    """How many values were at most each of some bounds. Told by one thread; read by any, which may see one value late in the sum.

    Args:
        bounds: ascending; what is above the last is counted, too.

    Example:
        >>> counts = BucketCounts((1.0, 10.0))
        >>> for value in (0.5, 1.0, 3.0, 99.0):
        ...     counts.add(value)
        >>> counts.cumulative(), counts.sum
        ([2, 3, 4], 103.5)
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[int]:
        """Return how many were at most each bound, and at last how many there were."""
        total, sums = 0, []
        for count in list(self._counts):
            total += count
            sums.append(total)
        return sums
