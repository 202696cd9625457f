"""What operators see of a cluster: every shard, every node, or why one of them did not answer."""

from dataclasses import dataclass

from kvemb.errors import StorageError
from kvemb.messages import StatusReply
from kvemb.stores.base import NodeStats
from kvemb.table import Access


@dataclass(frozen=True, eq=False)
class ShardStatus:
    """One shard: `reply`, or None and the `error` that says why."""

    shard: int
    address: str
    reply: StatusReply | None
    error: str = ""


@dataclass(frozen=True, eq=False)
class ClusterStatus:
    """Every shard (none on a read-only connection), and every node, or why the nodes did not answer."""

    shards: tuple[ShardStatus, ...]
    nodes: tuple[NodeStats, ...]
    nodes_error: str = ""


def read_status(access: Access, timeout_s: float | None) -> ClusterStatus:
    """Ask every shard and node; what does not answer is reported as such, not raised."""
    shards = _shards(access, access.pull_timeout_s if timeout_s is None else timeout_s)
    try:
        nodes = tuple(access.store.stats(access.pull_deadline(timeout_s)))
    except StorageError as error:
        return ClusterStatus(shards, (), str(error))
    return ClusterStatus(shards, nodes)


def _shards(access: Access, timeout_s: float) -> tuple[ShardStatus, ...]:
    if access.shards is None:
        return ()
    pairs = zip(access.shards.addresses, access.shards.status(timeout_s), strict=True)
    return tuple(
        ShardStatus(shard, address, None, str(reply)) if isinstance(reply, Exception) else ShardStatus(shard, address, reply)
        for shard, (address, reply) in enumerate(pairs)
    )
