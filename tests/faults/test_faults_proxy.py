"""The proxy does what its flows say, and leaves neither threads nor sockets."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from chaos.proxy import DOWN, UP, FaultProxy, Flow

PATIENCE_S = 60.0


class Server:
    """Takes connections; everything that arrives is kept."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(PATIENCE_S)
        self.accepted: list[socket.socket] = []

    def accept(self) -> socket.socket:
        sock = self.listener.accept()[0]
        sock.settimeout(PATIENCE_S)
        self.accepted.append(sock)
        return sock

    def close(self) -> None:
        for sock in [self.listener, *self.accepted]:
            sock.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as made:
        yield made


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    others = set(threading.enumerate())  # of proxies that other tests' clusters keep
    with FaultProxy(f"127.0.0.1:{server.listener.getsockname()[1]}") as made:
        yield made
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("kvemb-proxy")]


@pytest.fixture
def pair(server: Server, proxy: FaultProxy) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client's socket and the server's."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S) as client:
        accepted = server.accept()
        until(lambda: proxy.n_open == 1, "the proxy is not connected")
        yield client, accepted


def receive(sock: socket.socket, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        more = sock.recv(n_bytes - len(data))
        if not more:
            break
        data += more
    return data


def until(holds: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s, what
        time.sleep(0.005)


Pair = tuple[socket.socket, socket.socket]


@pytest.mark.parametrize(
    "flow", [Flow(), Flow(delay_s=0.01, jitter_s=0.01), Flow(slice_bytes=1), Flow(slice_bytes=3, jitter_s=0.001), Flow(bytes_per_s=1e6)]
)
def test_bytes_arrive_whole_and_in_order(flow: Flow, proxy: FaultProxy, pair: Pair) -> None:
    client, server = pair
    proxy.set(flow)
    data = bytes(range(256)) * 20
    for first, second in ((client, server), (server, client)):
        first.sendall(data)
        assert receive(second, len(data)) == data


def test_a_delay_is_kept(proxy: FaultProxy, pair: Pair) -> None:
    client, server = pair
    proxy.set(Flow(delay_s=0.15))
    start_s = time.monotonic()
    client.sendall(b"x")
    assert receive(server, 1) == b"x"
    assert time.monotonic() - start_s >= 0.15


def test_a_rate_is_kept(proxy: FaultProxy, pair: Pair) -> None:
    client, server = pair
    proxy.set(Flow(bytes_per_s=200_000))
    start_s = time.monotonic()
    client.sendall(bytes(40_000))
    assert len(receive(server, 40_000)) == 40_000
    assert time.monotonic() - start_s >= 0.19


def test_an_end_of_one_side_reaches_the_other(pair: Pair) -> None:
    client, server = pair
    client.shutdown(socket.SHUT_WR)
    assert server.recv(1) == b""
    server.sendall(b"still open this way")
    assert receive(client, 19) == b"still open this way"


def test_held_bytes_land_after_their_sender_is_gone(proxy: FaultProxy, pair: Pair) -> None:
    client, server = pair
    proxy.set(Flow(hold=True), UP)
    client.sendall(b"late")
    until(lambda: proxy.held_bytes(UP) == 4, "the bytes do not arrive in the proxy")
    client.close()
    server.settimeout(0.05)
    with pytest.raises(TimeoutError):
        server.recv(1)
    server.settimeout(PATIENCE_S)
    proxy.heal()
    assert receive(server, 5) == b"late"


def test_only_open_connections_are_held_when_told_so(proxy: FaultProxy, server: Server, pair: Pair) -> None:
    client, accepted = pair
    proxy.set_open(Flow(hold=True), UP)
    client.sendall(b"old")
    until(lambda: proxy.held_bytes(UP) == 3, "the bytes do not arrive in the proxy")
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S) as second:
        second.sendall(b"new")
        assert receive(server.accept(), 3) == b"new"
    proxy.heal()
    assert receive(accepted, 3) == b"old"


def test_a_swallowing_direction_is_silent_and_its_connections_are_reset_later(proxy: FaultProxy, pair: Pair) -> None:
    client, server = pair
    proxy.set(Flow(swallow=True), UP)
    client.sendall(b"nobody hears this")
    server.sendall(b"heard")
    assert receive(client, 5) == b"heard"
    server.settimeout(0.05)
    with pytest.raises(TimeoutError):
        server.recv(1)
    server.settimeout(PATIENCE_S)
    until(lambda: proxy.held_bytes(UP) == 0, "nothing was swallowed")
    proxy.heal()
    with pytest.raises(ConnectionResetError):
        server.recv(1)


@pytest.mark.parametrize("direction", [UP, DOWN])
def test_a_cut_lets_so_many_bytes_through(direction: str, proxy: FaultProxy, pair: Pair) -> None:
    sender, receiver = pair if direction == UP else pair[::-1]
    proxy.set(Flow(cut_after_bytes=5, cut="eof"), direction)  # type: ignore[arg-type]
    sender.sendall(b"123456789")
    assert receive(receiver, 9) == b"12345"


def test_a_reset_reaches_both_ends(proxy: FaultProxy, pair: Pair) -> None:
    proxy.reset_all()
    for sock in pair:
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    until(lambda: proxy.n_open == 0, "a connection is left")


def test_a_half_closed_connection_goes_on_the_other_way(proxy: FaultProxy, pair: Pair) -> None:
    client, server = pair
    proxy.half_close(DOWN)
    assert client.recv(1) == b""
    client.sendall(b"up")
    assert receive(server, 2) == b"up"


def test_refused_connections_are_reset_and_later_ones_are_not(proxy: FaultProxy, server: Server) -> None:
    proxy.refuse()
    with pytest.raises(ConnectionResetError), socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S) as client:
        client.recv(1)
    proxy.heal()
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S) as client:
        client.sendall(b"x")
        assert server.accept().recv(1) == b"x"


def test_a_server_that_is_down_is_a_reset(proxy: FaultProxy, server: Server) -> None:
    server.close()
    with pytest.raises(ConnectionResetError), socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S) as client:
        client.recv(1)
