"""A node that says nothing at all costs a connection two seconds, or the deadline where that is less.

The resolver stands in for the system's, and answers when it is told to; the address that drops all packets is real.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvemb.config import StorageConfig
from kvemb.errors import NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.net.link import connect_link
from kvemb.net.name_lookup import host_and_port
from kvemb.stores.redis_cluster.slot_map import fetch_slot_map
from kvemb.stores.redis_server import redis_admin
from kvemb.stores.redis_server.redis_login import RedisAccess, RoleLinks
from kvemb.stores.standalone.memcached_store import MemcachedStore

FOREVER_S = 30.0
NAME = "node.test:6379"


class Resolver:
    """Answers for the hosts of .test when `told` is set, and counts how often it was asked."""

    def __init__(self) -> None:
        self.told = threading.Event()
        self.n_asked = 0
        self.error: OSError | None = None
        self._real = socket.getaddrinfo

    def __call__(self, host: str, *args: object, **options: object) -> object:
        if not host.endswith(".test"):
            return self._real(host, *args, **options)  # type: ignore[arg-type]
        self.n_asked += 1
        assert self.told.wait(FOREVER_S)
        if self.error is not None:
            raise self.error
        return self._real("127.0.0.1", *args, **options)  # type: ignore[arg-type]


def looking_up() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvemb-name")]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.told.set()
    for thread in looking_up():
        thread.join(FOREVER_S)


def test_addresses_that_are_numbers_are_not_looked_up(resolver: Resolver) -> None:
    assert host_and_port("127.0.0.1:6379", Deadline.after(1)) == ("127.0.0.1", 6379)
    assert host_and_port("[fe80::1]:11211", Deadline.after(1)) == ("fe80::1", 11211)
    assert resolver.n_asked == 0
    assert looking_up() == []


def test_a_name_that_nobody_tells_costs_the_deadline_and_no_more(resolver: Resolver) -> None:
    started = time.monotonic()
    for _ in range(3):
        with pytest.raises(NodeUnavailableError, match=r"node node\.test:6379: no name server .* within 0\.1 s"):
            host_and_port(NAME, Deadline.after(0.1))
    assert time.monotonic() - started < FOREVER_S / 2
    assert resolver.n_asked == 1  # the others waited for the same answer
    with pytest.raises(NodeUnavailableError, match=r"within 2\.0 s"):
        host_and_port(NAME, Deadline.after(FOREVER_S))  # a primary that has lost its name may have a successor
    resolver.told.set()
    assert host_and_port(NAME, Deadline.after(FOREVER_S)) == ("node.test", 6379)


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that answers no packet, as that of a machine which is gone: its queue of connections is full."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    "connecting",
    [
        connect_link,
        lambda address, deadline: RoleLinks(RedisAccess(StorageConfig("redis", (address,))), "trainer").open(address, deadline),
        lambda address, deadline: redis_admin.info(address, RedisAccess(StorageConfig("redis", (address,))), deadline),
        lambda address, deadline: MemcachedStore(StorageConfig("memcached", (address,), on_lost_node="fail"), "trainer").open(deadline),
    ],
    ids=["link", "redis link", "redis client", "memcached"],
)
def test_an_address_that_answers_nothing_is_told_long_before_the_deadline(
    silent: str, connecting: Callable[[str, Deadline], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvemb.net.name_lookup._CONNECT_TIMEOUT_S", 0.2)  # two seconds are long for a test
    deadline = Deadline.after(FOREVER_S)
    with pytest.raises(NodeUnavailableError, match=silent):
        connecting(silent, deadline)
    assert deadline.remaining_s() > FOREVER_S / 2


@pytest.mark.parametrize(
    "connecting",
    [
        lambda deadline: connect_link(NAME, deadline),
        lambda deadline: RoleLinks(RedisAccess(StorageConfig("redis", (NAME,))), "trainer").open(NAME, deadline),
        lambda deadline: redis_admin.info(NAME, RedisAccess(StorageConfig("redis", (NAME,))), deadline),
        lambda deadline: MemcachedStore(StorageConfig("memcached", (NAME,)), "trainer").open(deadline),
    ],
    ids=["link", "redis link", "redis client", "memcached"],
)
def test_whatever_connects_waits_no_longer(resolver: Resolver, connecting: Callable[[Deadline], object]) -> None:
    with pytest.raises(NodeUnavailableError, match=r"node node\.test:6379: no name server"):
        connecting(Deadline.after(0.1))
    assert resolver.n_asked == 1


def test_a_node_without_a_name_does_not_hide_the_others(resolver: Resolver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        refused = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(NodeUnavailableError, match=rf"no name server.*{refused}: .*refused"):
        fetch_slot_map([NAME, refused], RedisAccess(StorageConfig("redis-cluster", (NAME, refused))), Deadline.after(1))


def test_a_name_that_is_not_known_is_told_at_once_and_asked_for_again(resolver: Resolver) -> None:
    resolver.told.set()
    resolver.error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    with pytest.raises(NodeUnavailableError, match=r"node\.test:6379: Name or service not known"):
        host_and_port(NAME, Deadline.after(FOREVER_S))
    resolver.error = None
    assert host_and_port(NAME, Deadline.after(FOREVER_S)) == ("node.test", 6379)


def test_where_no_thread_can_be_started_connecting_looks_up_by_itself(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(2):
        assert host_and_port(NAME, Deadline.after(FOREVER_S)) == ("node.test", 6379)
    assert resolver.n_asked == 0


def test_a_forked_child_looks_up_for_itself(resolver: Resolver) -> None:
    with pytest.raises(NodeUnavailableError):
        host_and_port(NAME, Deadline.after(0.1))
    child = os.fork()
    if child == 0:
        resolver.told.set()
        known = False
        try:
            known = host_and_port(NAME, Deadline.after(FOREVER_S / 2))[1] == 6379
        finally:
            os._exit(0 if known else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
