"""Hosts with a link of their own each, emulated on loopback: starts the process that delays their bytes, and measures that it does.

What must not live here: how bytes are delayed (`network_proxy`). Every route is a port on loopback; a client of it talks to the server
behind it as one host talks to another.
"""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from types import TracebackType

from benchmarks.measure import cpu_s
from kvemb.local_cluster.processes import launch

_PINGS = 100
_BULK_BYTES = 128 << 20  # takes several ticks of the clock that counts CPU time
_PIECE_BYTES = 1 << 20
_TIMEOUT_S = 60.0
Route = tuple[str, str, str]
"""From host, to host, and "host:port" of the server there."""


@dataclass(frozen=True)
class NetworkSpec:
    """What is emulated.

    Args:
        rtt_ms: round trip between two hosts.
        gbit_per_s: of each host's link, each direction; 0 for no limit.
    """

    rtt_ms: float = 1.0
    gbit_per_s: float = 1.0


@dataclass(frozen=True)
class Measured:
    """What a connection over a network got: median round trip, payload per second, and what that cost its process."""

    rtt_ms: float
    gbit_per_s: float
    cpu_ms_per_mb: float

    def __str__(self) -> str:
        return f"{self.rtt_ms:.2f} ms round trip, {self.gbit_per_s:.2f} Gbit/s, {self.cpu_ms_per_mb:.2f} ms of CPU per MB"


class Network:
    """A running emulation; a context manager. It ends with this process.

    Args:
        spec: of every link.
        routes: from which host to which server each goes.
    """

    def __init__(self, spec: NetworkSpec, routes: Sequence[Route]) -> None:
        told = {"rtt_s": spec.rtt_ms / 1e3, "bytes_per_s": spec.gbit_per_s * 1e9 / 8, "routes": [list(route) for route in routes]}
        command = [sys.executable, "-m", "benchmarks.network_proxy", json.dumps(told)]
        self._process = launch(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr.fileno())
        assert self._process.stdout is not None
        ports = json.loads(self._process.stdout.readline())
        self.addresses = {(source, sink): f"127.0.0.1:{port}" for (source, sink, _), port in zip(routes, ports, strict=True)}

    @property
    def pid(self) -> int:
        """The process that carries the bytes."""
        return self._process.pid

    def close(self) -> None:
        """End it; idempotent."""
        self._process.communicate(timeout=_TIMEOUT_S)

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def measure(spec: NetworkSpec) -> Measured:
    """Send bytes over one connection of a network of this kind: some back and forth, then many one way."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_TIMEOUT_S)
        thread = threading.Thread(target=_serve, args=(listener,), name="kvemb-benchmark-echo")
        thread.start()
        try:
            with Network(spec, [("one", "other", f"127.0.0.1:{listener.getsockname()[1]}")]) as network:
                return _measure(network)
        finally:
            thread.join(_TIMEOUT_S)


def _measure(network: Network) -> Measured:
    (address,) = network.addresses.values()
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=_TIMEOUT_S) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips_s = []
        for _ in range(_PINGS):
            start_s = time.perf_counter()
            client.sendall(b"p")
            client.recv(1)
            trips_s.append(time.perf_counter() - start_s)
        buffer, left, cpu_before_s = bytearray(_PIECE_BYTES), _BULK_BYTES, cpu_s([network.pid])
        client.sendall(b"b")
        client.recv_into(buffer, 1)  # the first byte: latency does not count as time of the rest
        start_s = time.perf_counter()
        while left > 1:
            left -= client.recv_into(buffer)
        wall_s = time.perf_counter() - start_s
        cpu_ms = (cpu_s([network.pid]) - cpu_before_s) * 1e3
    return Measured(median(trips_s) * 1e3, _BULK_BYTES * 8 / wall_s / 1e9, cpu_ms / (_BULK_BYTES / 1e6))


def _serve(listener: socket.socket) -> None:
    """Answer one connection: "p" with itself, "b" with many bytes."""
    client, _ = listener.accept()
    with client:
        client.settimeout(_TIMEOUT_S)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        piece = bytes(_PIECE_BYTES)
        while word := client.recv(1):
            if word == b"p":
                client.sendall(word)
            for _ in range(_BULK_BYTES // _PIECE_BYTES if word == b"b" else 0):
                client.sendall(piece)
