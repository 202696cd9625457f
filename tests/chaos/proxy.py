"""A TCP proxy on loopback whose behaviour is switched while it runs: it delays, slices, holds back, swallows, cuts and resets.

One thread with an event loop of its own per proxy; every call from outside is thread-safe and has taken effect when it returns. With a
delay and a rate on both directions it is an emulated network (round trip and bandwidth). It never loses bytes out of the middle of a
stream that goes on, because no network does that under TCP: a connection on which bytes were swallowed is reset as soon as its flow
changes.
"""

import asyncio
import random
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar

UP: "Direction" = "up"
DOWN: "Direction" = "down"
Direction = Literal["up", "down"]
"""Up is from the client to the server."""
_CHUNK_BYTES = 64 << 10
_MAX_QUEUED_BYTES = 8 << 20
_CALL_TIMEOUT_S = 10.0
_RESET = struct.pack("ii", 1, 0)
T = TypeVar("T")


@dataclass(frozen=True)
class Flow:
    """How bytes of one direction travel.

    Args:
        delay_s: later by so much.
        jitter_s: and by up to so much more, drawn for every piece; pieces stay in order.
        bytes_per_s: rate of each connection; 0 for as fast as it goes.
        slice_bytes: pieces of at most so many bytes, each sent on its own; 0 for as they come.
        hold: keep everything until another flow is set, then let it land, even when its sender is long gone.
        swallow: nothing arrives, without an error; the connection is reset when another flow is set.
        cut_after_bytes: end a connection after so many more bytes of this direction; None for never.
        cut: how: "reset" both ends, or "eof": end this direction in order, as a server does that exits.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    slice_bytes: int = 0
    hold: bool = False
    swallow: bool = False
    cut_after_bytes: int | None = None
    cut: Literal["reset", "eof"] = "reset"


PASS = Flow()


class FaultProxy:
    """Listens on loopback and connects every client to the target.

    Args:
        target: "host:port" of the server.
        port: to listen on; 0 takes a free one.
        seed: of the jitter.
        flow: how bytes travel while nothing is wrong, both ways.

    Example:
        >>> server = socket.create_server(("127.0.0.1", 0))
        >>> with server, FaultProxy(f"127.0.0.1:{server.getsockname()[1]}") as proxy:
        ...     client = socket.create_connection(("127.0.0.1", proxy.port))
        ...     accepted = server.accept()[0]
        ...     client.sendall(b"hello")
        ...     print(accepted.recv(5).decode())
        ...     client.close(); accepted.close()
        hello
    """

    def __init__(self, target: str, *, port: int = 0, seed: int = 0, flow: Flow = PASS) -> None:
        host, _, target_port = target.rpartition(":")
        self.target = (host, int(target_port))
        self._healthy = flow
        self.flows: dict[Direction, Flow] = {UP: flow, DOWN: flow}
        self.generation = 0  # counts switches
        self.random = random.Random(seed)
        self.n_accepted = 0
        self._listener = socket.create_server(("127.0.0.1", port))
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"
        self._connections: set[_Connection] = set()
        self._refusing = False
        self._n_resets = 0
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = self._loop.create_task(self._accept())
        self._thread = threading.Thread(target=self._run, name=f"kvemb-proxy-{self.port}", daemon=True)
        self._thread.start()

    # --- switching --------------------------------------------------------------------------------------------------------------

    def set(self, flow: Flow, direction: Direction | None = None) -> None:
        """Let bytes travel like this from now on, in one direction or both."""

        def switch() -> None:
            for way in (UP, DOWN) if direction is None else (direction,):
                self.flows[way] = flow
                for connection in self._connections:
                    connection.pipes[way].own_flow = None
            self.generation += 1
            self._wake()

        self._do(switch)

    def set_open(self, flow: Flow, direction: Direction | None = None) -> None:
        """The same for the connections that are open now; later ones travel as before."""

        def switch() -> None:
            for connection in self._connections:
                for way in (UP, DOWN) if direction is None else (direction,):
                    connection.pipes[way].own_flow = flow
            self.generation += 1
            self._wake()

        self._do(switch)

    def heal(self) -> None:
        """Pass everything on again as at first, held bytes first."""
        self._refusing = False
        self.set(self._healthy)

    def refuse(self, refusing: bool = True) -> None:
        """Reset new connections at once, or stop doing so."""
        self._refusing = refusing

    def reset_all(self) -> None:
        """Reset every open connection at both ends, held bytes included."""

        def reset() -> None:
            self._n_resets += 1
            for connection in list(self._connections):
                connection.reset()

        self._do(reset)

    def half_close(self, direction: Direction) -> None:
        """End one direction of every open connection in order; the other goes on."""

        def end() -> None:
            for connection in list(self._connections):
                connection.pipes[direction].end()

        self._do(end)

    @property
    def n_open(self) -> int:
        """Connections that are open at either end."""
        return self._do(lambda: len(self._connections))

    def held_bytes(self, direction: Direction) -> int:
        """Bytes that wait in the proxy."""
        return self._do(lambda: sum(connection.pipes[direction].queued_bytes for connection in self._connections))

    def close(self) -> None:
        """Reset open connections and end the thread; idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.cancel)
            self._thread.join(_CALL_TIMEOUT_S)

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- the loop ---------------------------------------------------------------------------------------------------------------

    async def wait_for_change(self, timeout_s: float | None = None) -> None:
        """Return when a flow is switched or bytes arrive, or after the time. For the connections."""
        event = self._changed
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            return

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _do(self, action: Callable[[], T]) -> T:
        """Run an action on the loop and return its result."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(action())
            except BaseException as error:
                done.set_exception(error)

        if not self._thread.is_alive():  # closed: there is no connection any more
            return action()
        self._loop.call_soon_threadsafe(run)
        return done.result(_CALL_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._stopping)
        except asyncio.CancelledError:
            pass
        finally:
            for connection in list(self._connections):
                connection.reset()
            self._loop.run_until_complete(_end_tasks(self._loop))
            self._listener.close()
            self._loop.close()

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            client.setblocking(False)
            if self._refusing:
                _abort(client)
                continue
            self.n_accepted += 1
            self._spawn(self._serve(client))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # a task without a reference may be collected
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: socket.socket) -> None:
        server = socket.socket()
        server.setblocking(False)
        n_resets = self._n_resets
        try:
            await self._loop.sock_connect(server, self.target)
        except OSError:
            _abort(client)
            server.close()
            return
        if n_resets != self._n_resets:  # while it was being opened
            _abort(client)
            _abort(server)
            return
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(self, client, server)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            for sock in (client, server):
                sock.close()


class _Connection:
    """A client's socket, the server's, and a pipe each way."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, server: socket.socket) -> None:
        self._sockets = (client, server)
        self.pipes: dict[Direction, _Pipe] = {
            UP: _Pipe(proxy, UP, client, server, self.reset),
            DOWN: _Pipe(proxy, DOWN, server, client, self.reset),
        }
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Return when both directions have ended, or the connection was reset."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(work()) for pipe in self.pipes.values() for work in (pipe.read, pipe.write)]
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """End both directions at once."""
        for sock in self._sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        for task in self._tasks:
            task.cancel()


class _Pipe:
    """One direction of a connection: a reader that queues pieces with the time they are due, a writer that lets them land."""

    def __init__(
        self, proxy: FaultProxy, direction: Direction, source: socket.socket, sink: socket.socket, reset: Callable[[], None]
    ) -> None:
        self._proxy, self._direction, self._source, self._sink, self._reset = proxy, direction, source, sink, reset
        self._queue: deque[tuple[float, bytes]] = deque()
        self._something = asyncio.Event()  # to write, or an end
        self._room = asyncio.Event()
        self._over = False  # no more comes from the source
        self._ended = False  # the sink was told so
        self._swallowed = self._sink_gone = False
        self._sent_bytes, self._sent_generation = 0, -1
        self.queued_bytes = 0
        self.own_flow: Flow | None = None

    @property
    def _flow(self) -> Flow:
        return self.own_flow or self._proxy.flows[self._direction]

    async def read(self) -> None:
        """Queue what comes until the source ends."""
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self._source, _CHUNK_BYTES):
                if self._sink_gone:
                    continue
                flow = self._flow
                late_s = flow.delay_s + (self._proxy.random.random() * flow.jitter_s if flow.jitter_s else 0.0)
                self._queue.append((loop.time() + late_s, data))
                self.queued_bytes += len(data)
                self._something.set()
                while self.queued_bytes > _MAX_QUEUED_BYTES and not self._sink_gone:
                    self._room.clear()
                    await self._room.wait()
        except OSError:
            pass  # its sender is gone: its bytes still land
        self._over = True
        self._something.set()

    async def write(self) -> None:
        """Let queued pieces land as the flow says, then end the sink's direction."""
        loop = asyncio.get_running_loop()
        try:
            while await self._next_is_due():
                if self._ended:
                    self._pop(len(self._queue[0][1]))
                    continue
                flow, data = self._flow, self._queue[0][1]
                piece = data[: self._piece_bytes(flow, len(data))]
                if piece:
                    await loop.sock_sendall(self._sink, piece)
                    self._sent_bytes += len(piece)
                    self._pop(len(piece))
                if flow.cut_after_bytes is not None and self._sent_bytes >= flow.cut_after_bytes:
                    self._cut(flow)
                    await asyncio.sleep(0)  # where a reset ends this task
                if flow.bytes_per_s:
                    await asyncio.sleep(len(piece) / flow.bytes_per_s)
                elif flow.slice_bytes:
                    await asyncio.sleep(0)
        except OSError:
            self._sink_gone = True
            self._queue.clear()
            self.queued_bytes = 0
            self._room.set()
        self.end()

    def end(self) -> None:
        """Tell the sink that nothing more comes."""
        if not self._ended:
            self._ended = True
            try:
                self._sink.shutdown(socket.SHUT_WR)
            except OSError:
                return

    async def _next_is_due(self) -> bool:
        """Wait until a piece may be sent; False when there will be none."""
        loop = asyncio.get_running_loop()
        while True:
            flow = self._flow
            if flow.swallow:
                self._swallowed = self._swallowed or bool(self._queue)
                self._queue.clear()
                self.queued_bytes = 0
                self._room.set()
                await self._proxy.wait_for_change(0.05)
                continue
            if self._swallowed:
                self._reset()
                await asyncio.sleep(0)
                return False
            if flow.hold:
                await self._proxy.wait_for_change()
                continue
            if self._queue:
                late_s = self._queue[0][0] - loop.time()
                if late_s <= 0:
                    return True
                await self._proxy.wait_for_change(late_s)
                continue
            if self._over:
                return False
            self._something.clear()
            if not self._queue and not self._over:
                await self._something.wait()

    def _piece_bytes(self, flow: Flow, n_bytes: int) -> int:
        if self._sent_generation != self._proxy.generation:
            self._sent_bytes, self._sent_generation = 0, self._proxy.generation
        if flow.slice_bytes:
            n_bytes = min(n_bytes, flow.slice_bytes)
        if flow.bytes_per_s:
            n_bytes = min(n_bytes, max(1, int(flow.bytes_per_s / 100)))
        if flow.cut_after_bytes is not None:
            n_bytes = min(n_bytes, max(0, flow.cut_after_bytes - self._sent_bytes))
        return n_bytes

    def _pop(self, n_bytes: int) -> None:
        due_s, data = self._queue.popleft()
        if n_bytes < len(data):
            self._queue.appendleft((due_s, data[n_bytes:]))
        self.queued_bytes -= n_bytes
        self._room.set()

    def _cut(self, flow: Flow) -> None:
        if flow.cut == "reset":
            self._reset()
        else:
            self.end()


def _abort(sock: socket.socket) -> None:
    """Close a socket with a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()


async def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    tasks = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
