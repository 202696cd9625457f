"""Connections to many nodes, lent to one batch at a time; survives forks.

A lease is a set of links, at most one per node, made on first use. Links come back only from batches that ended well. After a fork the
child forgets the links it inherited (sharing a socket with the parent would mix their replies) and opens its own.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

from kvemb.errors import ClosedError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Connect, Link


class Doubts:
    """Counts, per address, links that were given up with requests in flight.

    A write on such a link may still land. A new connection makes sure that it cannot (`LinkPool`'s `connect`). A link that was idle
    all the while would not, so links that are older than the last doubt are not lent any more. Pools with the same addresses share one.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}  # by address, of those that have any

    def add(self, address: str) -> None:
        """A link to this address was given up."""
        self.counts[address] = self.counts.get(address, 0) + 1  # two threads at once: it rises by one or two, and only a change matters


class _Forks:
    """Counts how often this process and those before it were forked: known without a system call."""

    def __init__(self) -> None:
        self.n = 0
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.n += 1


_forks = _Forks()


class LinkPool:
    """Lends checked connections to nodes, each to one batch at a time. Thread-safe."""

    def __init__(self, connect: Connect, on_drop: Callable[[Link], None] = lambda link: None, doubts: Doubts | None = None) -> None:
        self._connect = connect
        self._on_drop = on_drop
        self._doubts = doubts or Doubts()
        self._idle: list[dict[str, Link]] = []
        self._forks_seen = _forks.n
        self._closed = False

    def lease(self, addresses: Iterable[str], deadline: Deadline) -> "_Lease":
        """Lend a link per address within a `with` block.

        On any exception, KeyboardInterrupt included, every link lent is closed: its stream may hold unread replies. When one
        node cannot be connected to, nothing has been sent to the others: their links are kept.
        """
        return _Lease(self, addresses, deadline)

    def require_open(self) -> None:
        """Refuse to go on after `close`."""
        if self._closed:
            raise ClosedError("this store was closed")

    def close(self) -> None:
        """Close idle links; those on loan are closed when they come back. Idempotent."""
        self._closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            with suppress(IndexError):  # another thread took the last ones
                for link in self._idle.pop().values():
                    link.close()

    def _usable(self, links: dict[str, Link], address: str, deadline: Deadline) -> Link:
        n_doubts = self._doubts.counts.get(address, 0)
        if address in links and (links[address].stale or links[address].n_doubts != n_doubts):
            links.pop(address).close()
        if address not in links:
            links[address] = self._connect(address, deadline)
            links[address].n_doubts = n_doubts
        return links[address]

    def _drop(self, links: dict[str, Link]) -> None:
        for link in links.values():
            self._on_drop(link)
            self._doubts.add(link.address)
            link.close()


@dataclass(eq=False)
class _Lease:
    """The context of `LinkPool.lease`; a generator's costs twice as much, and every batch has one."""

    pool: LinkPool
    addresses: Iterable[str]
    deadline: Deadline
    links: dict[str, Link] = field(init=False)

    def __enter__(self) -> dict[str, Link]:
        """Take idle links. A list's `pop` and `append` are atomic: there is no lock, which a fork could leave held."""
        pool = self.pool
        if pool._closed:
            pool.require_open()
        if pool._forks_seen != _forks.n:
            pool._close_idle()
            pool._forks_seen = _forks.n  # last: until then each thread of the child forgets the inherited links
        try:
            self.links = pool._idle.pop()
        except IndexError:
            self.links = {}  # none is idle
        try:
            return {address: pool._usable(self.links, address, self.deadline) for address in self.addresses}
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pool = self.pool
        if kind is not None or pool._closed or pool._forks_seen != _forks.n:
            pool._drop(self.links)
            return
        pool._idle.append(self.links)
        if pool._closed:  # meanwhile
            pool._close_idle()
