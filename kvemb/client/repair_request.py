"""Asks every shard at once to repair storage nodes. Storage itself is not touched: nodes that need it let nobody connect as usual."""

from collections.abc import Sequence

from kvemb.client.all_shards import AllShards
from kvemb.config import Config
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import RepairReply, RepairRequest

_ANSWER_MARGIN_S = 1.0  # a shard gives up before we do, and says what it waited for


def repair(config: Config, addresses: Sequence[str] = (), *, all_nodes: bool = False, timeout_s: float = 3600.0) -> dict[int, RepairReply]:
    """Restore the rows of every node that has lost them; return what each shard did, by its number, when all have done their part.

    Args:
        config: of the cluster.
        addresses: nodes to compare row by row although they seem to be in order.
        all_nodes: compare every node.
        timeout_s: of the whole call.

    Raises:
        InvalidInputError: no such node.
        LostRowError: a row cannot be restored.
        ShardUnavailableError: a shard does not answer; the others wait for it, and end the repair when it is there.
        DeadlineExceededError: the repair goes on.
    """
    servers = AllShards.of(config.servers)
    try:
        request = RepairRequest(list(addresses), all_nodes, max(timeout_s - _ANSWER_MARGIN_S, timeout_s / 2))
        deadline = Deadline.after(timeout_s)
        servers.ask_map(deadline)
        return servers.call_each("Repair", request, RepairReply, deadline)
    finally:
        servers.close()
