"""The slot map as a node tells it, and the replies that are refused; a scripted node on loopback."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.stores.redis_cluster.slot_map import ClusterTopology, fetch_slot_map
from kvemb.stores.redis_server.redis_commands import redirect_target
from kvemb.stores.redis_server.redis_login import RedisAccess

ENABLED = b"$30\r\n# Cluster\r\ncluster_enabled:1\r\n\r\n"
NODE = b"*3\r\n$%d\r\n%s\r\n:%d\r\n$2\r\nid\r\n"
WHOLE = b"*2\r\n*3\r\n:0\r\n:8191\r\n%s*4\r\n:8192\r\n:16383\r\n%s%s" % (NODE % (1, b"b", 7), NODE % (0, b"", 8), NODE % (1, b"r", 9))


@pytest.fixture
def node_saying() -> Iterator[Callable[..., str]]:
    """`node_saying(*answers)`: the address of a node that gives one answer to each piece that it is sent."""
    listeners = []

    def serve(listener: socket.socket, answers: tuple[bytes, ...]) -> None:
        sock, _ = listener.accept()
        with sock:
            for answer in answers:
                if not sock.recv(1 << 16):
                    return
                sock.sendall(answer)
            sock.recv(1)

    def start(*answers: bytes) -> str:
        listeners.append(listener := socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=serve, args=(listener, answers), daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.close()


def fetch(*addresses: str) -> tuple[str, ...]:
    return fetch_slot_map(addresses, RedisAccess(StorageConfig("redis-cluster", addresses)), Deadline.after(10)).addresses


def test_after_an_error_those_that_were_known_are_asked_and_the_map_is_known_meanwhile(node_saying: Callable[..., str]) -> None:
    other = node_saying(ENABLED, WHOLE)
    port = int(other.rpartition(":")[2])
    named = node_saying(ENABLED, b"*1\r\n*3\r\n:0\r\n:16383\r\n" + NODE % (0, b"", port))
    topology = ClusterTopology(RedisAccess(StorageConfig("redis-cluster", (named,))))
    assert topology.slot_map(Deadline.after(10)).addresses == (other,)
    topology.doubt()
    assert topology.addresses == (other,)
    assert topology.slots_of(other).all()
    topology._answered = ()  # the named one answers once
    assert topology.slot_map(Deadline.after(10)).addresses == ("127.0.0.1:8", "b:7")


def test_a_process_that_is_started_again_asks_those_that_it_knew_before(node_saying: Callable[..., str]) -> None:
    gone = socket.create_server(("127.0.0.1", 0))
    topology = ClusterTopology(RedisAccess(StorageConfig("redis-cluster", (f"127.0.0.1:{gone.getsockname()[1]}",))))
    gone.close()
    topology.known_before = (node_saying(ENABLED, WHOLE),)
    assert topology.slot_map(Deadline.after(10)).addresses == ("127.0.0.1:8", "b:7")


def test_an_empty_host_is_the_node_that_was_asked(node_saying: Callable[..., str]) -> None:
    assert fetch(node_saying(ENABLED, WHOLE)) == ("127.0.0.1:8", "b:7")


@pytest.mark.parametrize(
    "answer",
    [
        b":5\r\n",
        b"$-1\r\n",
        b"*1\r\n:5\r\n",
        b"*1\r\n*0\r\n",
        b"*1\r\n*2\r\n:0\r\n:16383\r\n",
        b"*1\r\n*3\r\n:0\r\n:16383\r\n:7\r\n",
        b"*1\r\n*3\r\n:0\r\n:16384\r\n" + NODE % (1, b"b", 7),
        b"*1\r\n*3\r\n:-1\r\n:16383\r\n" + NODE % (1, b"b", 7),
        b"*1\r\n*3\r\n:9\r\n:8\r\n" + NODE % (1, b"b", 7),
        b"*1\r\n*3\r\n:0\r\n:16383\r\n" + NODE % (1, b"b", 70000),
        b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n:1\r\n:7\r\n",
        b"*0\r\n",
        b"-ERR no\r\n",
        b"-LOADING wait\r\n",
        b"*2147483647\r\n",
    ],
)
def test_a_node_that_tells_nonsense_is_named_and_another_is_asked(answer: bytes, node_saying: Callable[..., str]) -> None:
    liar = node_saying(ENABLED, answer)
    assert "b:7" in fetch(liar, node_saying(ENABLED, WHOLE))
    liar = node_saying(ENABLED, answer)
    with pytest.raises(NodeUnavailableError, match=liar):
        fetch(liar)


def test_a_node_without_the_name_that_the_cluster_prefers_is_named_with_the_mend(node_saying: Callable[..., str]) -> None:
    asked = node_saying(ENABLED, b"*1\r\n*3\r\n:0\r\n:16383\r\n" + NODE % (1, b"?", 7))
    with pytest.raises(NodeUnavailableError, match=rf"{asked}: says '\?:7' .*cluster-announce-hostname.*endpoint-type ip"):
        fetch(asked)
    with pytest.raises(NodeUnavailableError, match=r"redirects to '\?:7', .*cluster-announce-hostname"):
        redirect_target(b"-MOVED 5 ?:7", "a:1")


def test_a_standalone_server_is_told(node_saying: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="standalone"):
        fetch(node_saying(b"$30\r\n# Cluster\r\ncluster_enabled:0\r\n\r\n"))
