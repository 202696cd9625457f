"""Connections to nodes under a cluster map of ours, the markers that are expected there, and small values of every node.

Two pools: one leads to nodes whose markers are in order, for rows; the other to nodes in any state, for repair. Both look for a newer owner
of the shard before anything else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.markers import MARKER_KEY, accept, why_lost
from kvemb.coordination.replicated_values import ValueCell
from kvemb.coordination.shard_owners import OwnerFence
from kvemb.errors import DeadlineExceededError, NodeUnavailableError, StorageError
from kvemb.net.deadline import Deadline, WhyWaiting
from kvemb.net.exchange import Conversation, run
from kvemb.net.link import Link
from kvemb.net.pool import Doubts, LinkPool
from kvemb.schema.bucket_limits import BucketLimits
from kvemb.schema.keys import Containers, RowKeys
from kvemb.schema.table_def import TableDef
from kvemb.stores.read_retry import ABSENT
from kvemb.stores.row_io import HeldRows
from kvemb.stores.server_errors import server_error
from kvemb.stores.standalone.nodes_view import NodesView
from kvemb.stores.store import Capabilities
from kvemb.stores.store_nodes import NodeStats
from kvemb.stores.store_repair import StoreRepair
from kvemb.wire.codec import Codec
from kvemb.wire.replies import BlobReply, Step

R = TypeVar("R")
_MOST_VIEWS = 4  # of nodes or map, that have changed one after the other


class NodeServer(ABC):
    """The operations special to one kind of server, node by node. Kinds without buckets need not override those about buckets."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """See `Store.capabilities`."""

    @abstractmethod
    def open_link(self, address: str, deadline: Deadline) -> Link:
        """Connect and authenticate."""

    def dropped(self, link: Link) -> None:
        """Told of a link that was given up with requests in flight."""
        return

    @abstractmethod
    def inspect(self, address: str, deadline: Deadline) -> tuple[str, int]:
        """Refuse settings that can lose rows; return the server process's run id ("" if it has none) and its number of keys."""

    def max_record_bytes(self, address: str, deadline: Deadline) -> int | None:
        """See `StoreNodes.max_record_bytes`."""
        return None

    @abstractmethod
    def settings(self, address: str, deadline: Deadline) -> dict[str, str]:
        """See `StoreNodes.settings`."""

    @abstractmethod
    def stats(self, address: str, deadline: Deadline) -> NodeStats:
        """See `StoreNodes.stats_of`."""

    def kill_other_writers(self, addresses: Iterable[str], deadline: Deadline) -> int:
        """See `Store.kill_other_writers`."""
        return 0

    def keys_on(self, address: str, slots: NDArray[np.bool_], deadline: Deadline) -> Iterator[RowKeys] | None:
        """See `StoreRepair.keys_on`."""
        return None

    def make_way(self, address: str, keys: Sequence[bytes], wanted: Containers, run_id: str, deadline: Deadline, *, clear: bool) -> int:
        """See `StoreRepair.make_way`; `clear` in a repair."""
        return 0

    def held_on(self, address: str, repair: StoreRepair, tables: Sequence[TableDef], deadline: Deadline) -> list[HeldRows | None]:
        """See `StoreRows.held_on`; `repair` says which keys belong to the node."""
        return [None] * len(tables)

    def bucket_limits(self, address: str, deadline: Deadline) -> BucketLimits | None:
        """See `StoreRows.bucket_limits`."""
        return None

    def set_bucket_limits(self, address: str, limits: BucketLimits, deadline: Deadline) -> None:
        """See `StoreRows.set_bucket_limits`."""
        raise NotImplementedError("storage without buckets has no limits of them")

    @abstractmethod
    def swap(self, address: str, key: bytes, old: bytes | None, new: bytes, run_id: str, deadline: Deadline) -> bool:
        """Replace a small value if it is `old` (None: if there is none) and the server process has this run id, in one step."""


class NodeLinks:
    """Opens connections to nodes, checks each node's marker, and lends them.

    One class, because all calls to a node go by the same view and the same pools.
    """

    def __init__(self, server: NodeServer, codec: Codec, nodes: tuple[str, ...], fence: OwnerFence) -> None:
        self._server, self._codec, self._fence = server, codec, fence
        self.in_file = nodes  # the addresses that kvemb.yaml says
        # the nodes there are, and their expected markers; replaced as a whole. A batch takes it once.
        self.view = NodesView.unopened(nodes)
        # called after an error that nodes at other addresses, or another map, would explain, and with the deadline of whoever waits for it;
        # returns whether there is a new view
        self.follow: Callable[[StorageError, Deadline | None], bool] = lambda error, deadline: False
        self.lead_elsewhere = WhyWaiting()  # why addresses lead to other nodes than the map says, while they do
        doubts = Doubts()
        self.pool = LinkPool(self._checked_link, server.dropped, doubts)
        self.plain_pool = LinkPool(self._plain_link, server.dropped, doubts)  # to nodes in any state, for repair
        self.meta_pool = self.pool  # the pool for small values of every node

    def close(self) -> None:
        """Drop every connection."""
        self.pool.close()
        self.plain_pool.close()

    def following(self, call: Callable[[], R], deadline: Deadline, first_view: NodesView | None = None) -> Callable[[], R]:
        """Return a function that calls, and calls again when the nodes or their map have changed; first by `first_view`."""

        def again() -> R:
            nonlocal first_view
            for _ in range(_MOST_VIEWS):
                before, first_view = first_view or self.view, None
                try:
                    return call()
                except (*ABSENT, DeadlineExceededError) as error:
                    if self.view is before and not self.follow(error, deadline):  # another thread may have found them first
                        raise
            return call()

        return again

    def _checked_link(self, address: str, deadline: Deadline) -> Link:
        """A new connection may lead to a restarted server: look at its settings and its marker before it carries rows."""
        link = self._plain_link(address, deadline)
        try:
            if (view := self.view).markers:  # one and the same, should nodes move meanwhile
                expected = view.expected(address)
                self._server.inspect(address, deadline)
                got = self._ask(link, [MARKER_KEY], deadline)[0]
                view.markers[address] = accept(address, expected, got, link.run_id, view.placements)
        except BaseException:
            link.close()
            raise
        return link

    def _plain_link(self, address: str, deadline: Deadline) -> Link:
        """A connection to our node, whatever state its rows are in, as long as no newer owner of our shard stands there."""
        link = self._server.open_link(address, deadline)
        try:
            if key := self.owner_key:
                (copy,) = self._ask(link, [key], deadline)
                self.require_owner(address, copy, deadline)
            if (view := self.view).markers:
                why_lost(address, view.expected(address), self._ask(link, [MARKER_KEY], deadline)[0], link.run_id, view.placements)
        except BaseException:
            link.close()
            raise
        return link

    def _ask(self, link: Link, keys: Sequence[bytes], deadline: Deadline) -> list[bytes | None]:
        made = [self._codec.get_step(key) for key in keys]
        run([Conversation(link, [step for step, _ in made])], deadline)
        return [value_of(link.address, reply) for _, reply in made]

    @property
    def owner_key(self) -> bytes:
        """Where the record of the shard's owner stands; empty for a store that writes as none."""
        return self._fence.name.encode()

    def require_owner(self, address: str, copy: bytes | None, deadline: Deadline) -> None:
        """Raise where a node's copy of the owner record, or another one where it names none, is a newer owner's; see `OwnerFence`."""
        self._fence.require_ours(copy, f"node {address}", lambda: self.owners_elsewhere(address, deadline))

    # --- what a repair asks --------------------------------------------------------------------------------------------------------

    def look(self, address: str, deadline: Deadline) -> tuple[bytes | None, str]:
        with self.plain_pool.lease([address], deadline) as links:
            return self._ask(links[address], [MARKER_KEY], deadline)[0], links[address].run_id

    def peek(self, address: str, keys: list[bytes], deadline: Deadline) -> list[bytes | None]:
        with self.plain_pool.lease([address], deadline) as links:
            return self._ask(links[address], keys, deadline)

    def owners_elsewhere(self, address: str, deadline: Deadline) -> list[bytes | None]:
        """The other nodes' copies of the owner record; those that hang leave the caller a share of the time."""
        key, found = self._fence.name.encode(), []
        others = [other for other in self.view.addresses if other != address]
        for other, share in zip(others, deadline.shares(len(others) + 1), strict=False):
            with suppress(NodeUnavailableError, DeadlineExceededError):
                found += self.first_look(other, [key], share)
        return found

    def cell(self, address: str, name: str, run_id: str, deadline: Deadline, *, joins: bool = False) -> ValueCell:
        """A node's copy of a small value, written only while its process has this run id; nothing else is expected of a node that joins."""
        key, peek = name.encode(), self.first_look if joins else self.peek
        return ValueCell(
            f"node {address}",
            name,
            lambda: peek(address, [key], deadline)[0],
            lambda old, new: self._server.swap(address, key, old, new, run_id, deadline),
        )

    # --- small values -----------------------------------------------------------------------------------------------------------

    def first_look(self, address: str, keys: Sequence[bytes], deadline: Deadline) -> list[bytes | None]:
        """Read small values of a node of which nothing is expected yet."""
        link = self._server.open_link(address, deadline)
        try:
            return self._ask(link, keys, deadline)
        finally:
            link.close()

    def put_at(self, address: str, key: bytes, value: bytes, deadline: Deadline) -> None:
        """Write a small value to one node, whatever its marker says."""
        with self.plain_pool.lease([address], deadline) as links:
            step, reply = self._codec.put_step(key, value)
            run([Conversation(links[address], [step])], deadline)
        for _, line in reply.errors:
            raise server_error(address, line)

    def each(self, call: Callable[[str, Deadline], R], deadline: Deadline) -> list[R | StorageError]:
        """Call for every node; a hung one leaves time for the others, and errors stand in the place of results."""
        results: list[R | StorageError] = []
        for address, share in deadline.shared(self.view.addresses):
            try:
                results.append(call(address, share))
            except StorageError as error:
                results.append(error)
        return results

    def blobs(self, key: bytes, deadline: Deadline) -> list[bytes | None]:
        """Read every node's copy of a small value."""
        view = self.view
        replies = self._on_every_node(view, deadline, lambda index: self._codec.get_step(key))
        return [value_of(address, reply) for address, reply in zip(view.addresses, replies, strict=True)]

    def put_blobs(self, key: bytes, value: bytes | Sequence[bytes], deadline: Deadline) -> None:
        """Write a small value to each node: the same, or one for each in the order of their numbers."""
        view = self.view
        values = [value] * len(view.addresses) if isinstance(value, bytes) else value
        replies = self._on_every_node(view, deadline, lambda index: self._codec.put_step(key, values[index]))
        for address, reply in zip(view.addresses, replies, strict=True):
            for _, line in reply.errors:
                raise server_error(address, line)

    def _on_every_node(self, view: NodesView, deadline: Deadline, make: Callable[[int], tuple[Step, R]]) -> list[R]:
        addresses = view.addresses  # the same ones all along, should nodes move meanwhile
        with self.meta_pool.lease(addresses, deadline) as links:
            made = [make(index) for index in range(len(addresses))]
            steps = [step for step, _ in made]
            run([Conversation(links[a], [step]) for a, step in zip(addresses, steps, strict=True)], deadline)
        return [reply for _, reply in made]


def value_of(address: str, reply: BlobReply) -> bytes | None:
    """Return a node's answer, or raise its error."""
    if reply.error is not None:
        raise server_error(address, reply.error)
    return reply.value
