"""The port that Prometheus scrapes: prometheus-client's own HTTP server, over a registry of this process's collectors alone."""

import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol
from wsgiref.simple_server import WSGIRequestHandler

from kvemb.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_JOIN_S = 5.0
_SCRAPES_AT_ONCE = 8
_LONGEST_SCRAPE_S = 10.0


class _ScrapeHandler(WSGIRequestHandler):
    """Hangs up on those who say nothing, and on whoever is one too many: each has a thread of ours."""

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
    """What prometheus-client's registries take."""

    def collect(self) -> "Iterable[Metric]":
        """Return the figures as they are now."""


class MetricsEndpoint:
    """Serves /metrics until it is closed. Every scrape has a thread of its own; eight may run at once.

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
        self._server.RequestHandlerClass = _ScrapeHandler
        self._thread.name, self._pid = "kvemb-metrics", os.getpid()

    def close(self) -> None:
        """End the server. Idempotent. In a fork, where its thread does not exist, only the socket is closed."""
        if self._pid == os.getpid():
            self._server.shutdown()
            self._thread.join(_JOIN_S)
        self._server.server_close()
