"""The ports of a shard, open from the first second of its start: health and a report on one, metrics on the other."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvemb.config import Config
from kvemb.errors import ConfigError, ParameterServerError
from kvemb.net.deadline import Deadline
from kvemb.process.metrics import MetricsCollector, MetricsEndpoint
from kvemb.protocol.verb import Verb

from ..capabilities import VERBS
from ..capability import Stream
from ..recovery.start_report import StartReport
from ..rpc.access_control import AccessControl
from ..rpc.handlers import Answers
from ..rpc.service import OpenStream, Server
from ..rpc.shard_metrics import StartMetrics

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_PAUSE_S = 0.5
log = logging.getLogger("paramserver")


class Front:
    """The ports of one shard, open as soon as it is made."""

    def __init__(
        self, config: Config, shard: int, listen: str, report: StartReport, on_open: Callable[[], None], *, take_over: bool = False
    ) -> None:
        self._config, self._shard, self._listen, self._report, self._on_open = config, shard, listen, report, on_open
        self._figures: MetricsCollector = StartMetrics(config.cluster, shard, report)
        self._metrics: MetricsEndpoint | None = None
        self._server: Server | None = None
        try:
            self._open()
        except (ParameterServerError, ConfigError) as error:
            if not take_over:
                raise
            log.warning("%s It is tried again when the shard is to serve.", error)

    def open(self, wait: Callable[[float], None], timeout_s: float, older: str) -> None:
        """Open the ports, unless they are: the process that was shut out has them until it ends."""
        deadline, said = Deadline.after(timeout_s), False
        whose = f"The process that had the shard ({older})" if older else "The process that had the shard"
        while self._server is None:
            try:
                self._open()
            except (ParameterServerError, ConfigError) as error:
                if deadline.expired:
                    end = f"{whose} may have it still: end it (kill -9), then start the shard again, without --take-over"
                    raise type(error)(f"{error} Tried for {timeout_s:g} s. {end}. Nothing was lost.") from error
                if not said:
                    log.warning("%s %s may have it still: end it (kill -9). It is tried for %g s.", error, whose, timeout_s)
                said = True
                wait(min(_PAUSE_S, deadline.remaining_s()))

    def _open(self) -> None:
        self._server, self._metrics = self._opened()
        self._on_open()

    def serve(
        self, open_stream: OpenStream, answers: Answers, subscribed: Mapping[Verb[Any, Any], Stream], figures: MetricsCollector
    ) -> None:
        """Let the shard's own handlers answer, and show its own figures; the ports are open."""
        assert self._server is not None
        self._figures = figures
        self._report.done()
        self._server.open(open_stream, answers, subscribed)

    @property
    def address(self) -> str:
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
        server = Server(self._listen, AccessControl.of(self._config), self._shard, self._report, VERBS)
        host = server.address.rpartition(":")[0]  # metrics are served on the host that the shard listens on
        servers = self._config.servers
        port = servers.metrics_port_of(self._shard, self._listen if self._listen in servers.shards else server.address)
        try:
            return server, MetricsEndpoint(self, host, port, "Is another process there? See docs/operations.md.") if port else None
        except ConfigError:
            server.stop(0.0)
            raise
