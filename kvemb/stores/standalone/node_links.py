"""Connections to nodes under a cluster map of ours, the markers that are expected there, and small values of every node.

Two pools: one leads to nodes whose markers are in order, for rows; the other to nodes in any state, for repair. Both look for a newer owner
of the shard before anything else.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from kvemb.coordination.markers import MARKER_KEY, Marker, accept, why_lost
from kvemb.errors import ConfigError, DeadlineExceededError, NodeSuspectError, NodeUnavailableError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.net.exchange import Conversation, run
from kvemb.net.link import Link
from kvemb.net.pool import Doubts, LinkPool
from kvemb.schema.cluster_map import ClusterMap
from kvemb.stores.node_batch import server_error
from kvemb.stores.owner_fence import OwnerFence
from kvemb.stores.read_retry import ABSENT
from kvemb.wire.codec import Codec
from kvemb.wire.replies import BlobReply, Step

log = logging.getLogger("kvemb")
R = TypeVar("R")


class NodeServer(Protocol):
    """What is special to one kind of server, node by node."""

    def open_link(self, address: str, deadline: Deadline) -> Link:
        """Connect and authenticate."""

    def dropped(self, link: Link) -> None:
        """Told of a link that was given up with requests in flight."""

    def inspect(self, address: str, deadline: Deadline) -> tuple[str, int]:
        """Refuse settings that can lose rows; return the server process's run id ("" if it has none) and its number of keys."""

    def swap(self, address: str, key: bytes, old: bytes | None, new: bytes, run_id: str, deadline: Deadline) -> bool:
        """Replace a small value if it is `old` (None: if there is none) and the server process has this run id, in one step."""


class NodeLinks:
    """Opens connections to nodes, checks each node's marker, and lends them.

    Args:
        server: of the nodes' kind.
        codec: of their protocol.
        nodes: their addresses, in order.
        fence: the owner that the store writes as.

    Attributes:
        addresses: of the nodes, in order.
        map: which node holds which slot.
        markers: those that are expected, by address; none before the store is opened.
        nodes_now: asks for the addresses after an error, see `Store.follow`.
        meta_pool: the pool for small values of every node.
    """

    def __init__(self, server: NodeServer, codec: Codec, nodes: tuple[str, ...], fence: OwnerFence) -> None:
        self._server, self._codec, self._fence = server, codec, fence
        self.addresses = nodes
        self.map = ClusterMap.first(len(nodes), 1)  # until the store is opened
        self.markers: dict[str, Marker] = {}
        self.nodes_now: Callable[[], tuple[str, ...]] | None = None
        doubts = Doubts()
        self.pool = LinkPool(self._checked_link, server.dropped, doubts)
        self.plain_pool = LinkPool(self._plain_link, server.dropped, doubts)  # to nodes in any state, for repair
        self.meta_pool = self.pool

    def close(self) -> None:
        """Drop every connection."""
        self.pool.close()
        self.plain_pool.close()

    def following(self, call: Callable[[], R]) -> Callable[[], R]:
        """What calls, and once more if nodes turn out to be at other addresses."""

        def twice() -> R:
            try:
                return call()
            except (*ABSENT, DeadlineExceededError) as error:
                if not self.moved(error):
                    raise
            return call()

        return call if self.nodes_now is None else twice

    def moved(self, error: StorageError) -> bool:
        """Whether nodes are at other addresses now; from here on they are asked there, and have to show the markers that are expected."""
        assert self.nodes_now is not None
        try:
            now, before = self.nodes_now(), self.addresses
        except ConfigError as why:
            raise type(error)(f"{error} {why}") from error
        if now == before:
            return False
        # No lock: whoever is between the two lines finds no marker to expect at an address, and tries again.
        self.markers = {now[marker.node]: marker for marker in list(self.markers.values())}
        self.addresses = now
        log.warning("storage nodes are at other addresses: %s; until now %s", ", ".join(now), ", ".join(before))
        return True

    def _checked_link(self, address: str, deadline: Deadline) -> Link:
        """A new connection may lead to a restarted server: look at its settings and its marker before it carries rows."""
        link = self._plain_link(address, deadline)
        try:
            if markers := self.markers:  # one and the same, should nodes move meanwhile
                expected = self.expected(address)
                self._server.inspect(address, deadline)
                accepted = accept(address, expected, self._ask(link, [MARKER_KEY], deadline)[0], link.run_id)
                if address in markers:
                    markers[address] = accepted
        except BaseException:
            link.close()
            raise
        return link

    def _plain_link(self, address: str, deadline: Deadline) -> Link:
        """A connection to our node, whatever state its rows are in, as long as no newer owner of our shard stands there."""
        link = self._server.open_link(address, deadline)
        try:
            if self._fence.name:
                (copy,) = self._ask(link, [self._fence.name.encode()], deadline)
                self.require_ours(address, copy, deadline)
            if self.markers:
                why_lost(address, self.expected(address), self._ask(link, [MARKER_KEY], deadline)[0], link.run_id)
        except BaseException:
            link.close()
            raise
        return link

    def _ask(self, link: Link, keys: Sequence[bytes], deadline: Deadline) -> list[bytes | None]:
        made = [self._codec.get_step(key) for key in keys]
        run([Conversation(link, [step for step, _ in made])], deadline)
        return [value_of(link.address, reply) for _, reply in made]

    # --- what a repair asks; see `MarkedNodes` ------------------------------------------------------------------------------------

    def expected(self, address: str) -> Marker:
        expected = self.markers.get(address)
        if expected is None:
            raise moved_meanwhile(address)
        return expected

    def look(self, address: str, deadline: Deadline) -> tuple[bytes | None, str]:
        with self.plain_pool.lease([address], deadline) as links:
            return self._ask(links[address], [MARKER_KEY], deadline)[0], links[address].run_id

    def peek(self, address: str, keys: list[bytes], deadline: Deadline) -> list[bytes | None]:
        with self.plain_pool.lease([address], deadline) as links:
            return self._ask(links[address], keys, deadline)

    def copies_elsewhere(self, address: str, key: bytes, deadline: Deadline) -> list[bytes | None]:
        found = []
        for other in self.addresses:
            if other != address:
                with suppress(NodeUnavailableError, DeadlineExceededError):
                    found += self._ask_once(other, key, deadline)
        return found

    def require_ours(self, address: str, copy: bytes | None, deadline: Deadline) -> None:
        key = self._fence.name.encode()
        self._fence.require_ours(copy, f"node {address}", lambda: self.copies_elsewhere(address, key, deadline))

    def swap(self, address: str, key: bytes, old: bytes | None, new: bytes, run_id: str, deadline: Deadline) -> bool:
        return self._server.swap(address, key, old, new, run_id, deadline)

    def _ask_once(self, address: str, key: bytes, deadline: Deadline) -> list[bytes | None]:
        """On a connection that asks nothing before, as those do that are lent."""
        link = self._server.open_link(address, deadline)
        try:
            return self._ask(link, [key], deadline)
        finally:
            link.close()

    # --- small values -----------------------------------------------------------------------------------------------------------

    def blobs(self, key: bytes, deadline: Deadline) -> list[bytes | None]:
        """Read every node's copy of a small value."""
        replies = self._on_every_node(deadline, lambda index: self._codec.get_step(key))
        return [value_of(address, reply) for address, reply in zip(self.addresses, replies, strict=True)]

    def put_blobs(self, key: bytes, values: Sequence[bytes], deadline: Deadline) -> None:
        """Write a small value to each node."""
        replies = self._on_every_node(deadline, lambda index: self._codec.put_step(key, values[index]))
        for address, reply in zip(self.addresses, replies, strict=True):
            for _, line in reply.errors:
                raise server_error(address, line)

    def _on_every_node(self, deadline: Deadline, make: Callable[[int], tuple[Step, R]]) -> list[R]:
        addresses = self.addresses  # the same ones all along, should nodes move meanwhile
        with self.meta_pool.lease(addresses, deadline) as links:
            made = [make(index) for index in range(len(addresses))]
            steps = [step for step, _ in made]
            run([Conversation(links[a], [step]) for a, step in zip(addresses, steps, strict=True)], deadline)
        return [reply for _, reply in made]


def value_of(address: str, reply: BlobReply) -> bytes | None:
    """Return what a node answered, or raise its error."""
    if reply.error is not None:
        raise server_error(address, reply.error)
    return reply.value


def moved_meanwhile(address: str) -> NodeSuspectError:
    """Return the error of a batch that was begun before nodes moved."""
    return NodeSuspectError(f"node {address}: while it was asked, nodes moved to other addresses; try again.")
