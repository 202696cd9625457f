"""Looks up a node's name in limited time, and says how long TCP's greeting may take.

A node that is gone may say nothing at all: no name server knows its name, its address answers no packet. A caller that waited for it as
long as a batch may take would not see that a Redis Cluster has long put another primary in its place. So connecting fails after two
seconds, enough for a greeting that was lost once. The caller tries again, if there is time.

The system's resolver takes no time limit of a caller's, and its own are 5 to 30 s: a thread looks up, and its callers wait. Thread- and
fork-safe.
"""

import ipaddress
import os
import socket
import threading
from concurrent.futures import Future

from kvemb.errors import NodeUnavailableError
from kvemb.net.deadline import Deadline

_CONNECT_TIMEOUT_S = 2.0
_pending: dict[str, "Future[None]"] = {}  # by host: every caller meanwhile waits for the same answer
os.register_at_fork(after_in_child=_pending.clear)  # a child has none of the threads


def connect_timeout_s(deadline: Deadline) -> float:
    """Return how long to wait for a TCP connection, in seconds; above 0, which sockets take for "not at all"."""
    return max(0.001, min(_CONNECT_TIMEOUT_S, deadline.remaining_s()))


def host_and_port(address: str, deadline: Deadline) -> tuple[str, int]:
    """Split an address whose name resolves: connecting to it then does not wait for a name server."""
    name, _, port = address.rpartition(":")
    host = name.strip("[]")
    if not _is_numeric(host):
        _look_up(host, address, connect_timeout_s(deadline))
    return host, int(port)


def _is_numeric(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):
            continue
        return True
    return False


def _look_up(host: str, address: str, wait_s: float) -> None:
    mine: Future[None] = Future()
    lookup = _pending.setdefault(host, mine)
    if lookup is mine:
        try:
            threading.Thread(target=_resolve, args=(host, mine), name=f"kvemb-name-{host}", daemon=True).start()
        except RuntimeError:  # the interpreter is ending, and starts no threads any more: connecting itself looks up
            _pending.pop(host, None)
            mine.set_result(None)
    try:
        lookup.result(wait_s)
    except OSError as error:
        late = isinstance(error, TimeoutError)
        why = f"no name server told where that is within {wait_s:.1f} s" if late else error.strerror or error
        raise NodeUnavailableError(f"node {address}: {why}. Is the node running, and its name right?") from error


def _resolve(host: str, lookup: "Future[None]") -> None:
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except BaseException as error:
        _pending.pop(host, None)
        lookup.set_exception(error)
    else:
        _pending.pop(host, None)
        lookup.set_result(None)


def is_loopback(address: str) -> bool:
    """Whether "host:port" cannot be reached from other machines."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
