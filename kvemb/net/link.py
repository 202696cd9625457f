"""One connection to one storage node: a non-blocking socket and its receive buffer.

Code that needs connections is given a `Connect`; `connect_link` is the plain one, over TCP. Those that encrypt are in `tls_link`.
"""

import errno
import socket
import ssl
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import NodeUnavailableError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.net.name_lookup import connect_timeout_s, host_and_port

_BUFFER_BYTES = 1 << 20
_MAX_BUFFER_BYTES = 64 << 20
# What a non-blocking socket raises for "not now".
NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Link:
    """A connected socket. Not thread-safe: one batch uses a link at a time.

    Attributes:
        wants_write: the connection has to write before it can be read from; a poll waits for that, too. Never so with plain TCP.
        waits_to_read: it has to be read from before more can be sent.
    """

    HIDDEN_BYTES = 0
    """How many bytes the connection may have taken from the socket that are not in sight yet."""
    JOINED_BYTES = 32 << 10
    """Requests that follow each other are sent by one call up to this size: the server is woken once."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.address = address
        self.connection_id = self.run_id = ""  # as the server says, where it is asked
        self.wants_write = self.waits_to_read = False
        self.n_doubts = 0  # see `kvemb.net.pool.Doubts`
        self._buffer = np.empty(_BUFFER_BYTES, dtype=np.uint8)
        self._start = self._end = 0

    @property
    def received(self) -> NDArray[np.uint8]:
        """Bytes that have arrived and were not consumed: a view, valid until the next `receive`."""
        return self._buffer[self._start : self._end]

    @property
    def pending(self) -> int:
        """Bytes that the connection itself holds back and `receive` would return; no poll reports them. Plain TCP holds none back."""
        return 0

    def consume(self, n_bytes: int) -> None:
        """Forget the first bytes of `received`."""
        self._start += n_bytes
        if self._start == self._end:
            self._start = self._end = 0

    def receive(self) -> int:
        """Read the bytes that have arrived; return how many, 0 for none yet."""
        if self._end == len(self._buffer):
            self._make_room()
        try:
            count = self._recv_into(self._buffer.data[self._end :])
        except OSError as error:
            raise self._unavailable(error) from error
        if count is None:
            return 0
        if count == 0:
            raise self._unavailable(ConnectionResetError(errno.ECONNRESET, "closed the connection"))
        self._end += count
        return count

    @property
    def has_room(self) -> bool:
        """Whether `receive` can take more without a larger buffer."""
        return self._end < len(self._buffer)

    def _recv_into(self, room: memoryview) -> int | None:
        """Read into memory; None: nothing there yet, 0: the end."""
        try:
            return self.sock.recv_into(room)
        except NOT_NOW:
            return None

    def send(self, data: memoryview) -> int:
        """Send what the kernel takes now; return how many bytes."""
        try:
            return self.sock.send(data)
        except NOT_NOW:
            return 0
        except OSError as error:
            raise self._unavailable(error) from error

    @property
    def stale(self) -> bool:
        """Whether an idle connection has ended, or holds bytes that were not asked for."""
        try:
            self.sock.recv(1)
        except NOT_NOW:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        """Close the socket; idempotent."""
        self.sock.close()

    def _make_room(self) -> None:
        if self._start:
            left = self._end - self._start
            self._buffer[:left] = self._buffer[self._start : self._end].copy()
            self._start, self._end = 0, left
            return
        if len(self._buffer) >= _MAX_BUFFER_BYTES:
            raise ProtocolError(f"node {self.address}: a reply does not end within {_MAX_BUFFER_BYTES} bytes")
        self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])

    def _unavailable(self, error: OSError) -> NodeUnavailableError:
        return NodeUnavailableError(f"node {self.address}: {error.strerror or error}. Is the server still running?")


Connect = Callable[[str, Deadline], Link]
"""Opens a connection to "host:port", ready to carry commands.

It takes no longer than `kvemb.net.name_lookup` says, and raises NodeUnavailableError where that was not enough.
"""


def connect_link(address: str, deadline: Deadline) -> Link:
    """Open a TCP connection."""
    return Link(connect_socket(address, deadline), address)


def connect_socket(address: str, deadline: Deadline) -> socket.socket:
    """The same without the link."""
    endpoint = host_and_port(address, deadline)
    try:
        sock = socket.create_connection(endpoint, timeout=connect_timeout_s(deadline))
    except OSError as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise NodeUnavailableError(f"node {address}: cannot connect: {reason}. Is the server running, and the address right?") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock
