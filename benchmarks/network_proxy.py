"""The process that emulates a network: TCP connections whose bytes arrive as late as they would over the hosts' own links.

Every host has one full-duplex link to a switch. Bytes leave a host one after another at the link's rate, whichever connection they belong
to, reach the other end of the network half a round trip later, and queue there for the receiver's link in the order of their arrival. Bytes
are payload: no headers, no loss, no slow start, and the switch's buffer is bounded by what connections keep in flight. One thread: sockets
that never block, one `select` (whose deadline is in microseconds, where epoll's is in milliseconds), and pieces of what is on its way
handed over as time goes by. Started by `network`, which it ends with.

    python -m benchmarks.network_proxy '{"rtt_s": 0.001, "bytes_per_s": 1.25e8, "routes": [["trainer", "node", "127.0.0.1:6379"]]}'
"""

import ctypes
import json
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

READ_BYTES = 256 << 10
QUEUE_BYTES = 8 << 20
TICK_S = 0.0005  # how finely bytes on their way are handed over: at 1 Gbit/s, 62 kB at a time
_PR_SET_TIMERSLACK = 29


@dataclass
class Link:
    """One direction of a host's link: when it has nothing more to send."""

    free_s: float = 0.0

    def carry(self, start_s: float, seconds: float) -> float:
        """Queue bytes that are there from `start_s` on; return when their first one is through."""
        begin_s = max(start_s, self.free_s)
        self.free_s = begin_s + seconds
        return begin_s


@dataclass
class Host:
    """A host's link to the switch, both directions."""

    out: Link = field(default_factory=Link)
    into: Link = field(default_factory=Link)


@dataclass
class Chunk:
    """Bytes on their way: from `begin_s` on they come out at the link's rate."""

    begin_s: float
    rate: float
    data: memoryview
    taken: int = 0

    def due(self, now_s: float) -> int:
        """How many bytes have arrived and were not taken."""
        if now_s < self.begin_s:
            return 0
        elapsed = (now_s - self.begin_s) * self.rate
        return (len(self.data) if elapsed >= len(self.data) else int(elapsed)) - self.taken

    def wake_s(self, now_s: float) -> float:
        """When it is worth looking again: at its end, or a tick from now."""
        end_s = self.begin_s + len(self.data) / self.rate
        return min(end_s, max(self.begin_s, now_s) + TICK_S)


class Pipe:
    """One direction of a connection.

    Args:
        source, sink: sockets that do not block.
        out, into: the links on its way.
        delay_s: half a round trip.
        rate: bytes per second of each link; infinite for none.
    """

    def __init__(self, source: socket.socket, sink: socket.socket, out: Link, into: Link, delay_s: float, rate: float) -> None:
        self.source, self.sink = source, sink
        self._out, self._into, self._delay_s, self._rate = out, into, delay_s, rate
        self.queue: deque[Chunk] = deque()
        self._n_queued = 0
        self.ended = self.blocked = False

    @property
    def open_to_read(self) -> bool:
        """Whether more may be read."""
        return not self.ended and self._n_queued < QUEUE_BYTES

    def read(self, buffer: bytearray, now_s: float) -> None:
        """Take what the sender has handed over, and put it on its way."""
        try:
            n = self.source.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            n = 0
        if n == 0:
            self.ended = True
            return
        seconds = n / self._rate
        sent_s = self._out.carry(now_s, seconds)
        begin_s = self._into.carry(sent_s + self._delay_s, seconds)
        self.queue.append(Chunk(begin_s, self._rate, memoryview(bytes(memoryview(buffer)[:n]))))
        self._n_queued += n

    def write(self, now_s: float) -> None:
        """Hand over bytes that have arrived."""
        self.blocked = False
        while self.queue and (n := self.queue[0].due(now_s)) > 0:
            chunk = self.queue[0]
            try:
                sent = self.sink.send(chunk.data[chunk.taken : chunk.taken + n])
            except (BlockingIOError, InterruptedError):
                self.blocked = True
                return
            except OSError:
                self.queue.clear()
                self.ended = True
                return
            chunk.taken += sent
            self._n_queued -= sent
            if chunk.taken == len(chunk.data):
                self.queue.popleft()
            elif sent < n:
                self.blocked = True
                return

    @property
    def done(self) -> bool:
        """Whether the sender has ended and everything was handed over."""
        return self.ended and not self.queue


class Proxy:
    """Listens for every route and carries bytes until it is told to stop.

    Args:
        rtt_s: round trip.
        bytes_per_s: of each link, each direction; infinite for none.
        routes: (from host, to host, "host:port" of the server).
    """

    def __init__(self, rtt_s: float, bytes_per_s: float, routes: Sequence[tuple[str, str, str]]) -> None:
        self._delay_s, self._rate = rtt_s / 2, bytes_per_s
        hosts: dict[str, Host] = {}
        self._listeners: dict[socket.socket, tuple[Host, Host, str]] = {}
        for source, sink, address in routes:
            ends = (hosts.setdefault(source, Host()), hosts.setdefault(sink, Host()))
            self._listeners[socket.create_server(("127.0.0.1", 0), backlog=64)] = (*ends, address)
        self._pipes: dict[socket.socket, Pipe] = {}
        self._buffer = bytearray(READ_BYTES)

    @property
    def ports(self) -> list[int]:
        """Where each route begins, in order."""
        return [int(listener.getsockname()[1]) for listener in self._listeners]

    def run(self, stop: int) -> None:
        """Carry bytes until this file descriptor has something to read."""
        while True:
            ready, now_s = self._wait(stop)
            if stop in ready:
                return
            for one in ready:
                if isinstance(one, socket.socket) and one in self._listeners:
                    self._accept(one)
                elif isinstance(one, socket.socket) and one in self._pipes:
                    self._pipes[one].read(self._buffer, now_s)
            now_s = time.perf_counter()
            for pipe in list(self._pipes.values()):
                if pipe.queue:
                    pipe.write(now_s)
                if pipe.done:
                    self._end(pipe)

    def close(self) -> None:
        """Close everything."""
        for sock in (*self._listeners, *self._pipes):
            sock.close()

    def _wait(self, stop: int) -> tuple[list[int | socket.socket], float]:
        now_s = time.perf_counter()
        readable: list[int | socket.socket] = [stop, *self._listeners, *(s for s, pipe in self._pipes.items() if pipe.open_to_read)]
        waiting = [pipe for pipe in self._pipes.values() if pipe.queue]
        wakes = [pipe.queue[0].wake_s(now_s) for pipe in waiting if not pipe.blocked]
        timeout_s = max(0.0, min(wakes) - now_s) if wakes else None
        ready, _, _ = select.select(readable, [pipe.sink for pipe in waiting if pipe.blocked], [], timeout_s)
        return ready, time.perf_counter()

    def _accept(self, listener: socket.socket) -> None:
        near, far, address = self._listeners[listener]
        client, _ = listener.accept()
        host, _, port = address.rpartition(":")
        try:
            server = socket.create_connection((host, int(port)), timeout=5.0)
        except OSError:
            client.close()
            return
        for sock in (client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pipes[client] = Pipe(client, server, near.out, far.into, self._delay_s, self._rate)
        self._pipes[server] = Pipe(server, client, far.out, near.into, self._delay_s, self._rate)

    def _end(self, pipe: Pipe) -> None:
        """Close a connection when one side has ended and its last bytes were handed over."""
        for sock in (pipe.source, pipe.sink):
            self._pipes.pop(sock, None)
            sock.close()


def main(text: str) -> None:
    """Print the ports, then carry bytes until standard input ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)  # wake on time: the kernel may be 50 us late otherwise, four times a round trip
    spec = json.loads(text)
    proxy = Proxy(spec["rtt_s"], spec["bytes_per_s"] or float("inf"), [tuple(route) for route in spec["routes"]])
    print(json.dumps(proxy.ports), flush=True)
    proxy.run(sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1])
