"""What the apply thread counts for whoever watches the shard: how long batches took, and how stale pushes were."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvemb.metrics import BATCHES, SECONDS, BucketCounts


@dataclass(frozen=True)
class ApplyFigures:
    """Counted by the apply thread since the shard started; read by any thread."""

    seconds: BucketCounts = field(default_factory=lambda: BucketCounts(SECONDS))
    staleness: BucketCounts = field(default_factory=lambda: BucketCounts(BATCHES))

    def count_staleness(self, parts: Iterable[tuple[float, int]]) -> None:
        """Count the `staleness` of a batch's parts, of those that said what their pull saw."""
        for changed, elapsed in parts:
            if changed >= 0:
                self.staleness.add(elapsed)
