"""Connections to the primaries of a Redis Cluster: how they are opened, which primaries they may lead to, and one batch on several of them.

A store has two pools. One leads to primaries that are known to be whole, for rows. The other leads to primaries in any state, for markers,
small values and repair. Both name themselves on the server and look for a newer owner of the shard before anything else.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from kvemb.coordination.shard_owners import OwnerFence
from kvemb.errors import NodeSuspectError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.net.exchange import Conversation, run
from kvemb.net.link import Link
from kvemb.net.pool import LinkPool
from kvemb.stores.node_batch import NodeSteps, closed_under, unexpected_value
from kvemb.stores.redis_server import compare_and_set
from kvemb.stores.redis_server.redis_login import RedisAccess, RoleLinks
from kvemb.wire.replies import Step, UnexpectedValueError
from kvemb.wire.request_arrays import StepLimit


class PrimaryConnector(RoleLinks):
    """Opens connections of one role, as long as no newer owner of its shard stands in the cluster."""

    def __init__(self, access: RedisAccess, role: str, fence: OwnerFence) -> None:
        super().__init__(access, role)
        self._fence = fence

    def connect(self, address: str, deadline: Deadline) -> Link:
        """Connect to a primary in any state."""
        link = self.open(address, deadline)
        try:
            if self._fence.name:
                copy = compare_and_set.get_following(address, self._access, self._fence.name.encode(), deadline)
                self._fence.require_ours(copy, "the cluster")
        except BaseException:
            link.close()
            raise
        return link


def exchange(
    pool: LinkPool,
    by_node: Mapping[str, list[Step]],
    plans: Sequence[NodeSteps],
    deadline: Deadline,
    run_ids: Mapping[str, str] = MappingProxyType({}),
    limit: StepLimit | None = None,
) -> None:
    """Run the steps of each node."""
    with pool.lease(by_node, deadline) as links:
        for link in links.values():
            if link.run_id != run_ids.get(link.address, link.run_id):
                raise NodeSuspectError(f"node {link.address}: the server was started again while it was being repaired; begin again")
        try:
            run([Conversation(links[address], steps) for address, steps in by_node.items()], deadline)
        except NodeUnavailableError as error:
            raise error if limit is None else closed_under([step for steps in by_node.values() for step in steps], limit, error) from None
        except UnexpectedValueError as error:
            raise unexpected_value(list(plans), error) from error
        if limit is not None and limit.narrow:
            limit.went_well()
