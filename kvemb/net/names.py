"""Looking up a node's name within a deadline.

The system's resolver takes no time limit of a caller's, and its own are 5 to 30 s: a name server that does not answer, as for the name of a
container that was stopped, would hold a batch far beyond its deadline. So a thread looks up, and its callers wait as long as they may, and
never for long: a Redis Cluster whose primary has lost its name has another primary in the meantime, and who is told tries again.
Thread- and fork-safe. What must not live here: connecting.
"""

import os
import socket
import threading
from concurrent.futures import Future

from kvemb.errors import NodeUnavailableError
from kvemb.net.deadline import Deadline

_PATIENCE_S = 2.0
_pending: dict[str, "Future[None]"] = {}  # by host: whoever asks meanwhile waits for the same answer
os.register_at_fork(after_in_child=_pending.clear)  # a child has none of the threads


def host_and_port(address: str, deadline: Deadline) -> tuple[str, int]:
    """Split an address whose name resolves: who connects then is not held up by its name.

    Args:
        address: "host:port"; an IPv6 address in brackets.
        deadline: of looking up.

    Raises:
        NodeUnavailableError: the host is not known, or no name server told it within 2 s, or the deadline.

    Example:
        >>> host_and_port("[::1]:6379", Deadline.after(1))
        ('::1', 6379)
    """
    name, _, port = address.rpartition(":")
    host = name.strip("[]")
    if not _is_numeric(host):
        _look_up(host, address, deadline)
    return host, int(port)


def _is_numeric(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):
            continue
        return True
    return False


def _look_up(host: str, address: str, deadline: Deadline) -> None:
    mine: Future[None] = Future()
    lookup = _pending.setdefault(host, mine)
    if lookup is mine:
        try:
            threading.Thread(target=_resolve, args=(host, mine), name=f"kvemb-name-{host}", daemon=True).start()
        except BaseException:
            _pending.pop(host, None)
            raise
    wait_s = min(_PATIENCE_S, deadline.remaining_s())
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
