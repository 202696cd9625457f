"""Figures as prometheus-client wants them: families of samples, under labels that all of them share.

prometheus-client is imported when somebody scrapes, not before.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from kvemb.metrics.bucket_counts import BucketCounts

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Samples = float | Iterable[tuple[Mapping[str, str], float]]
"""One value, or values by further labels."""


class MetricFamilies:
    """The families of one scrape.

    Args:
        labels: of every sample.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels, self._all = dict(labels), list["Metric"]()

    def gauge(self, name: str, text: str, samples: Samples) -> None:
        """Add what goes up and down."""
        self._add(name, name, text, "gauge", samples)

    def counter(self, name: str, text: str, samples: Samples) -> None:
        """Add what only grows until its process starts anew; the name ends in _total."""
        self._add(name.removesuffix("_total"), name, text, "counter", samples)

    def histogram(self, name: str, text: str, counts: Iterable[tuple[Mapping[str, str], BucketCounts]]) -> None:
        """Add values by size."""
        family = self._family(name, text, "histogram")
        for labels, one in counts:
            shared = self._labels | dict(labels)
            sums = one.cumulative()
            for bound, n in zip((*map(str, one.bounds), "+Inf"), sums, strict=True):
                family.add_sample(f"{name}_bucket", shared | {"le": bound}, n)
            family.add_sample(f"{name}_count", shared, sums[-1])
            family.add_sample(f"{name}_sum", shared, one.sum)

    def __iter__(self) -> "Iterator[Metric]":
        return iter(self._all)

    def _add(self, name: str, sample: str, text: str, kind: str, samples: Samples) -> None:
        family = self._family(name, text, kind)
        for labels, value in [({}, samples)] if isinstance(samples, (int, float)) else samples:
            family.add_sample(sample, self._labels | dict(labels), value)

    def _family(self, name: str, text: str, kind: str) -> "Metric":
        from prometheus_client.metrics_core import Metric

        family = Metric(name, text, kind)
        self._all.append(family)
        return family
