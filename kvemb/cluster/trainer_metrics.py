"""One connection's figures, for prometheus-client's registries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvemb.connection.access import Access
from kvemb.metrics import MetricFamilies

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


@dataclass(frozen=True, eq=False)
class TrainerMetrics:
    """The collector of one connection; asks no server. Any thread. Make it with `of`."""

    cluster: str
    access: Access

    @staticmethod
    def of(cluster: str, access: Access) -> TrainerMetrics:
        """Return the collector of a connection, whose pulls are timed from now on."""
        access.pull_times.count()
        return TrainerMetrics(cluster, access)

    def collect(self) -> Iterable[Metric]:
        """Return every family as it is now."""
        shards = self.access.shards
        families = MetricFamilies({"cluster": self.cluster, "trainer": "" if shards is None else shards.trainer})
        times = [({"table": name}, counts) for name, counts in self.access.pull_times.tables()]
        families.histogram("kvemb_pull_seconds", "Time of a pull that the table had a part in.", times)
        if shards is not None:
            families.gauge("kvemb_trainer_undelivered_pushes", "Pushes that not every shard has accepted.", shards.n_undelivered)
        return families
