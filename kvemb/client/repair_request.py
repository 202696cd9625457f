"""Asks every shard at once to repair storage nodes. Storage itself is not touched: nodes that need it let nobody connect as usual."""

from collections.abc import Sequence

from kvemb.client.all_shards import AllShards
from kvemb.config import Config
from kvemb.errors import ShardUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import Empty, RepairReply, RepairRequest, StatusReply

_PRESENT_S = 30.0  # a command is no trainer: whoever runs it can start a shard, and ask again
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
        ShardUnavailableError: a shard is away, half a minute long: nothing was begun; or went away since: the others wait for it, and end
            the repair when it is there.
        DeadlineExceededError: the repair goes on.
    """
    servers = AllShards.of(config.servers)
    try:
        request = RepairRequest(list(addresses), all_nodes, max(timeout_s - _ANSWER_MARGIN_S, timeout_s / 2))
        deadline = Deadline.after(timeout_s)
        _require_all(servers, deadline)
        return servers.call_each("Repair", request, RepairReply, deadline)
    finally:
        servers.close()


def _require_all(servers: AllShards, deadline: Deadline) -> None:
    """Find out which shards there are, and that each of them is there; one that starts is, and is waited for."""
    replies = servers.try_each("Status", Empty(), StatusReply, deadline.within(_PRESENT_S))
    if not isinstance(replies.get(0), ShardUnavailableError):
        servers.ask_map(deadline)
        joined = {shard: Empty() for shard in servers.numbers if shard not in replies}
        replies |= servers.try_each("Status", joined, StatusReply, deadline.within(_PRESENT_S))
    away = [str(replies[shard]) for shard in servers.numbers if isinstance(replies[shard], ShardUnavailableError)]
    if away:
        raise ShardUnavailableError(f"{len(away)} of {len(servers.numbers)} shards are away, and nothing was begun: {' '.join(away)}")
