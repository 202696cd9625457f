"""Connections to many nodes, lent to one batch at a time; survives forks.

A lease is a set of links, at most one per node, made on first use. Links come back only from batches that ended well. After a fork the
child forgets what it inherited (sharing a socket with the parent would mix their replies) and opens its own.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from kvemb.errors import ClosedError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link

Connect = Callable[[str, Deadline], Link]


class LinkPool:
    """Lends links. Thread-safe.

    Args:
        connect: opens and checks a link to an address.
        on_drop: told of every link that is given up while requests may be in flight on it.
    """

    def __init__(self, connect: Connect, on_drop: Callable[[Link], None] = lambda link: None) -> None:
        self._connect = connect
        self._on_drop = on_drop
        self._idle: list[dict[str, Link]] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    @contextmanager
    def lease(self, addresses: Iterable[str], deadline: Deadline) -> Iterator[dict[str, Link]]:
        """Lend a link per address.

        On any exception, KeyboardInterrupt included, every link lent is closed: its stream may hold replies that nobody read.
        """
        links = self._take()
        try:
            lent = {}
            for address in addresses:
                lent[address] = self._usable(links, address, deadline)
            yield lent
        except BaseException:
            self._drop(links)
            raise
        with self._lock:
            if not self._closed and self._pid == os.getpid():
                self._idle.append(links)
                return
        self._drop(links)

    def require_open(self) -> None:
        """Refuse to go on after `close`."""
        if self._closed:
            raise ClosedError("this store was closed")

    def close(self) -> None:
        """Close idle links; those on loan are closed when they come back. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for links in idle:
            for link in links.values():
                link.close()

    def _take(self) -> dict[str, Link]:
        if self._pid != os.getpid():
            # A lock that another thread of the parent held at the fork would never be released here.
            self._lock = threading.Lock()
            self._pid = os.getpid()
            for links in self._idle:
                for link in links.values():
                    link.close()
            self._idle = []
        with self._lock:
            self.require_open()
            return self._idle.pop() if self._idle else {}

    def _usable(self, links: dict[str, Link], address: str, deadline: Deadline) -> Link:
        if address in links and links[address].stale:
            links.pop(address).close()
        if address not in links:
            links[address] = self._connect(address, deadline)
        return links[address]

    def _drop(self, links: dict[str, Link]) -> None:
        for link in links.values():
            self._on_drop(link)
            link.close()
