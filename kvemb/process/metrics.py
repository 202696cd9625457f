"""Figures for Prometheus: counted where they arise, read at a scrape; prometheus-client does the format and the port.

Values are counted by size, for a histogram: one bisection per value, no lock. Figures are families of samples under common labels, as
prometheus-client takes them. The port is its own HTTP server, over a registry of this process's collectors alone. prometheus-client is
imported when it is first needed, not before.
"""

import os
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol
from wsgiref.simple_server import WSGIRequestHandler

from kvemb.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bounds for what a batch or a pull may take."""
BATCHES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0)
"""Bounds for numbers of batches."""


class BucketCounts:
    """How many values were at most each of some bounds. One thread counts; any thread reads, and may see one value late in the sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[int]:
        """Return how many values were at most each bound, and last the number of all values."""
        total, sums = 0, []
        for count in list(self._counts):
            total += count
            sums.append(total)
        return sums


Samples = float | Iterable[tuple[Mapping[str, str], float]]
"""One value, or values by further labels."""


class MetricFamilies:
    """The families of one scrape."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels, self._all = dict(labels), list["Metric"]()

    def gauge(self, name: str, text: str, samples: Samples) -> None:
        """Add a figure that goes up and down."""
        self._add(name, name, text, "gauge", samples)

    def counter(self, name: str, text: str, samples: Samples) -> None:
        """Add a figure that only grows until its process restarts; the name ends in _total."""
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


_JOIN_S = 5.0
_SCRAPES_AT_ONCE = 8
_LONGEST_SCRAPE_S = 10.0


class _ScrapeHandler(WSGIRequestHandler):
    """Hangs up on connections that are silent, and on those beyond the limit: each holds a thread of this process."""

    timeout = _LONGEST_SCRAPE_S
    _room = threading.BoundedSemaphore(_SCRAPES_AT_ONCE)

    def handle(self) -> None:
        if self._room.acquire(blocking=False):
            try:
                super().handle()
            finally:
                self._room.release()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a scrape is no event."""


class MetricsCollector(Protocol):
    """A collector as prometheus-client's registries take it."""

    def collect(self) -> "Iterable[Metric]":
        """Return the figures as they are now."""


class MetricsEndpoint:
    """Serves /metrics until it is closed. Every scrape has a thread of its own; eight may run at once."""

    def __init__(self, collector: MetricsCollector, host: str, port: int, hint: str) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        try:
            self._server, self._thread = start_http_server(port, host.strip("[]"), registry)
        except OSError as error:
            raise ConfigError(f"metrics_port: {host}:{port} cannot be listened on: {error.strerror}. {hint}") from error
        self._server.RequestHandlerClass = _ScrapeHandler
        self._thread.name, self._pid = "kvemb-metrics", os.getpid()

    def close(self) -> None:
        """End the server. Idempotent. In a fork, where its thread does not exist, only the socket is closed."""
        if self._pid == os.getpid():
            self._server.shutdown()
            self._thread.join(_JOIN_S)
        self._server.server_close()
