"""The port that Prometheus scrapes: prometheus-client's own HTTP server, over a registry of this process's collectors alone."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from kvemb.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_JOIN_S = 5.0


class MetricsCollector(Protocol):
    """What prometheus-client's registries take."""

    def collect(self) -> "Iterable[Metric]":
        """Return the figures as they are now."""


class MetricsEndpoint:
    """Serves /metrics until it is closed. Every scrape has a thread of its own.

    Args:
        collector: whose figures, beside those of the process itself (memory, CPU time, open files).
        host: to listen on.
        port: to listen on.
        hint: what to do where the port cannot be had.

    Raises:
        ConfigError: the port cannot be had.
    """

    def __init__(self, collector: MetricsCollector, host: str, port: int, hint: str) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        try:
            self._server, self._thread = start_http_server(port, host.strip("[]"), registry)
        except OSError as error:
            raise ConfigError(f"metrics_port: {host}:{port} cannot be listened on: {error.strerror}. {hint}") from error
        self._thread.name, self._pid = "kvemb-metrics", os.getpid()

    def close(self) -> None:
        """End the server. Idempotent. In a fork, where its thread does not exist, only the socket is closed."""
        if self._pid == os.getpid():
            self._server.shutdown()
            self._thread.join(_JOIN_S)
        self._server.server_close()
