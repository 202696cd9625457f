"""What of a shard can be seen from the first second of its start: its port, with health and a report, and its metrics."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvemb.config import Config
from kvemb.errors import ConfigError, ParameterServerError
from kvemb.metrics.metrics_endpoint import MetricsCollector, MetricsEndpoint

from ..figures.shard_metrics import StartMetrics
from ..recovery.start_report import StartReport
from ..rpc.access_control import AccessControl
from ..rpc.checkpoint_handlers import CheckpointHandlers
from ..rpc.handlers import Handlers
from ..rpc.service import Server

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger("paramserver")


class Front:
    """The ports of one shard, open as soon as it is made.

    Args:
        config: of the cluster.
        shard: number.
        listen: "host:port" to serve on.
        report: of the start.
        take_over: the process that is to be shut out may have the ports still; then they are opened when the shard is to serve.

    Raises:
        ParameterServerError, ConfigError: a port cannot be had.
    """

    def __init__(self, config: Config, shard: int, listen: str, report: StartReport, *, take_over: bool = False) -> None:
        self._config, self._shard, self._listen, self._report = config, shard, listen, report
        self._figures: MetricsCollector = StartMetrics(config.cluster, shard, report)
        self._metrics: MetricsEndpoint | None = None
        self._server: Server | None = None
        try:
            self.open()
        except (ParameterServerError, ConfigError) as error:
            if not take_over:
                raise
            log.warning("%s It is tried again when the shard is to serve.", error)

    def open(self) -> None:
        """Open the ports, unless they are; raises as the constructor does."""
        if self._server is None:
            self._server, self._metrics = self._opened()

    def serve(self, handlers: Handlers, checkpoints: CheckpointHandlers, figures: MetricsCollector) -> None:
        """Let the shard's own handlers answer, and show its own figures; the ports are open."""
        assert self._server is not None
        self._figures = figures
        self._report.done()
        self._server.open(handlers, checkpoints)

    @property
    def address(self) -> str:
        """Where the shard is."""
        return self._listen if self._server is None else self._server.address

    def collect(self) -> "Iterable[Metric]":
        """Return the figures as they are now."""
        return self._figures.collect()

    def stop_serving(self) -> None:
        """Have the health service say that the shard takes no pushes."""
        if self._server is not None:
            self._server.set_serving(False)

    def close(self, grace_s: float = 0.0) -> None:
        """End every call, those still under way after the grace time by force, and close the ports."""
        if self._server is not None:
            self._server.stop(grace_s)
        if self._metrics is not None:
            self._metrics.close()

    def _opened(self) -> tuple[Server, MetricsEndpoint | None]:
        server = Server(self._listen, AccessControl.of(self._config), self._shard, self._report)
        host = server.address.rpartition(":")[0]  # what Prometheus scrapes is on the host that the shard listens on
        servers = self._config.servers
        port = servers.metrics_port_of(self._shard, self._listen if self._listen in servers.shards else server.address)
        try:
            return server, MetricsEndpoint(self, host, port, "Is another process there? See docs/operations.md.") if port else None
        except ConfigError:
            server.stop(0.0)
            raise
