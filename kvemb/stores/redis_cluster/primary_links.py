"""Connections to the primaries of a Redis Cluster: how they are opened, which primaries they may lead to, and one batch on several of them.

A store has two pools. One leads to primaries that are known to be whole, for rows. The other leads to primaries in any state, for markers,
small values and repair. Both name themselves on the server and look for a newer owner of the shard before anything else.
"""

from collections.abc import Iterable, Mapping, Sequence

from kvemb.errors import NodeSuspectError
from kvemb.net.deadline import Deadline
from kvemb.net.exchange import Conversation, run
from kvemb.net.link import Link
from kvemb.net.pool import LinkPool
from kvemb.stores.node_batch import NodeSteps, unexpected_value
from kvemb.stores.owner_fence import OwnerFence
from kvemb.stores.redis_server import compare_and_set, redis_admin
from kvemb.stores.redis_server.redis_commands import RedisAccess
from kvemb.wire.replies import Step, UnexpectedValueError


class PrimaryConnector:
    """Opens connections of one role, and ends those on which a write may still be in flight.

    Args:
        access: how servers are reached.
        role: of this process, see `Store`.
        fence: the owner that the store writes as.
    """

    def __init__(self, access: RedisAccess, role: str, fence: OwnerFence) -> None:
        self._access, self._role, self._fence = access, role, fence
        self._in_doubt: dict[str, set[redis_admin.ConnectionId]] = {}
        self._own: set[redis_admin.ConnectionId] = set()

    def connect(self, address: str, deadline: Deadline) -> Link:
        """Connect to a primary in any state, as long as no newer owner of our shard stands in the cluster."""
        link = redis_admin.open_link(address, self._access, self._role, self._in_doubt.setdefault(address, set()), deadline)
        try:
            self._own.add((link.run_id, link.connection_id))
            if self._fence.name:
                copy = compare_and_set.get_following(address, self._access, self._fence.name.encode(), deadline)
                self._fence.require_ours(copy, "the cluster")
        except BaseException:
            link.close()
            raise
        return link

    def dropped(self, link: Link) -> None:
        """A link was given up with requests in flight."""
        self._in_doubt.setdefault(link.address, set()).add((link.run_id, link.connection_id))
        self._own.discard((link.run_id, link.connection_id))

    def kill_other_writers(self, addresses: Iterable[str], deadline: Deadline) -> int:
        """See `Store.kill_other_writers`."""
        own = frozenset(self._own)
        return sum(redis_admin.kill_writers(address, self._access, self._role, own, deadline) for address in addresses)


def exchange(
    pool: LinkPool, by_node: Mapping[str, list[Step]], plans: Sequence[NodeSteps], deadline: Deadline, run_id: str | None = None
) -> None:
    """Run the steps of each node.

    Args:
        pool: lends the links.
        by_node: steps by address.
        plans: which rows each step is about, for messages.
        deadline: of all of it.
        run_id: the only server process that may answer, None for any.
    """
    with pool.lease(by_node, deadline) as links:
        for link in links.values():
            if run_id is not None and link.address in by_node and link.run_id != run_id:
                raise NodeSuspectError(f"node {link.address}: the server was started again while it was being repaired; begin again")
        try:
            run([Conversation(links[address], steps) for address, steps in by_node.items()], deadline)
        except UnexpectedValueError as error:
            raise unexpected_value(list(plans), error) from error
