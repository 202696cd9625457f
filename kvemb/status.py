"""Writes what `Cluster.status` saw as the tables that `kvemb status` prints. Pure."""

from kvemb.cluster import ClusterStatus, ShardStatus
from kvemb.stores.base import NodeStats

_MB = 1e6


def render(status: ClusterStatus) -> str:
    """Return aligned plain text: nodes with rows and memory headroom, shards with what they have applied and how far they lag."""
    lines = _table(
        ("NODE", "SERVER", "KEYS", "USED", "LIMIT", "HEADROOM", "EVICTED"),
        [_node_row(node) for node in status.nodes],
    )
    if status.nodes_error:
        lines = [f"storage nodes: {status.nodes_error}"]
    shards = _table(
        ("SHARD", "ADDRESS", "ROWS", "BATCHES", "ROWS APPLIED", "PENDING", "LAG", "CACHE HITS", "TRAINERS", "STATE"),
        [_shard_row(shard) for shard in status.shards],
    )
    return "\n".join([*lines, "", *shards])


def healthy(status: ClusterStatus) -> bool:
    """Whether every node and every shard answered and none has failed."""
    nodes_well = not status.nodes_error and not any(node.error for node in status.nodes)
    return nodes_well and all(s.reply is not None and not s.reply.failure for s in status.shards)


def _node_row(node: NodeStats) -> tuple[str, ...]:
    if node.error:
        return (node.address, "-", "-", "-", "-", "-", node.error)
    limit = f"{node.limit_bytes / _MB:,.0f} MB" if node.limit_bytes else "none set"
    headroom = f"{100 * (1 - node.used_bytes / node.limit_bytes):.0f} %" if node.limit_bytes else "-"
    used = f"{node.used_bytes / _MB:,.1f} MB"
    return (node.address, node.server, f"{node.n_keys:,}", used, limit, headroom, f"{node.evicted:,}")


def _shard_row(shard: ShardStatus) -> tuple[str, ...]:
    reply = shard.reply
    if reply is None:
        return (str(shard.shard), shard.address, "-", "-", "-", "-", "-", "-", "-", shard.error)
    state = reply.failure or "ok"
    counts = (f"{reply.n_rows:,}", f"{reply.k:,}", f"{reply.rows_applied:,}", f"{reply.pending_parts:,}")
    hits = f"{100 * reply.cache_hits / reply.cache_lookups:.0f} %" if reply.cache_lookups else "-"
    return (str(shard.shard), shard.address, *counts, f"{reply.lag_s:.2f} s", hits, str(reply.n_trainers), state)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Align columns: text to the left, numbers to the right."""
    # The last column may hold an error of any length; it needs no room of its own beyond the heading's.
    widths = [max(len(row[i]) for row in [head, *rows]) if i < len(head) - 1 else len(head[i]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [
            cell.ljust(width) if i < 2 or (i == len(head) - 1 and not cell[:1].isdigit()) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
