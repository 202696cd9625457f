"""Writes what `Cluster.status` saw as the tables that `kvemb status` prints. Pure.

HEADROOM counts what a node says it stores. memcached counts stored bytes, not the slab pages it has set aside. So it may be out of room for
rows of one size while some headroom is left.
"""

from collections.abc import Mapping

from kvemb.protocol.messages import RepairReply
from kvemb.status.cluster_status import ClusterStatus, ShardStatus
from kvemb.stores.store import NodeStats

_MB = 1e6
_STOPPED = "the shard stopped applying"  # what a ShardFailedError begins with; any other trouble is tried again


def render(status: ClusterStatus) -> str:
    """Return aligned plain text: nodes with keys and memory headroom, shards with what they have applied and how far they lag.

    A key is a row, a bucket or a page. Of tables in buckets the rows on each node are counted. Above the tables: what is
    not of the cluster that kvemb.yaml means. Below them, each on its own line: what is the matter with a shard, what it repairs, how far it
    has compared cold rows.
    """
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
    troubles = [f"shard {shard.shard}: {_trouble(shard)}" for shard in status.shards if _trouble(shard)]
    repairs = [f"shard {s.shard} repairs: {s.reply.repair}" for s in status.shards if s.reply is not None and s.reply.repair]
    compared = [
        f"shard {s.shard} compares storage with its index: {s.reply.compared}" for s in status.shards if s.reply and s.reply.compared
    ]
    strangers = [f"not as kvemb.yaml says: {' '.join(status.strangers.split())}"] if status.strangers else []
    unsafe = [node.unsafe for node in status.nodes if node.unsafe]
    change = [str(status.change)] if status.change is not None else []
    return "\n".join([*strangers, *lines, *_held_lines(status), *unsafe, *change, "", *shards, *troubles, *repairs, *compared])


def _held_lines(status: ClusterStatus) -> list[str]:
    """How many rows each node holds of the tables of which it can tell."""
    told = [(name, of) for name, of in status.held if None not in of]
    if not told:
        return []
    rows = [(name, *(f"{'' if one.exact else 'about '}{one.n_rows:,}" for one in of if one is not None)) for name, of in told]
    return ["", *_table(("ROWS OF", *(node.address for node in status.nodes)), rows)]


def render_repair(replies: Mapping[int, RepairReply]) -> str:
    """Return what a repair did, shard by shard and in all.

    Example:
        >>> print(render_repair({0: RepairReply(1, 4000, 0.5), 2: RepairReply(1, 2000, 0.25)}))
        shard 0: 4,000 rows rewritten on 1 node in 0.5 s (8,000 rows/s)
        shard 2: 2,000 rows rewritten on 1 node in 0.2 s (8,000 rows/s)
        in all: 6,000 rows in 0.5 s (12,000 rows/s)
    """
    if not any(reply.nodes for reply in replies.values()):
        return "no node has lost its rows; give --node or --all to compare nodes row by row"
    lines = []
    for shard, reply in replies.items():
        nodes = f"{reply.nodes} node{'s' if reply.nodes != 1 else ''}"
        lines.append(f"shard {shard}: {reply.rows:,} rows rewritten on {nodes} in {_rate(reply.rows, reply.seconds)}")
    n_rows, seconds = sum(reply.rows for reply in replies.values()), max(reply.seconds for reply in replies.values())
    return "\n".join([*lines, f"in all: {n_rows:,} rows in {_rate(n_rows, seconds)}"])


def _rate(n_rows: int, seconds: float) -> str:
    return f"{seconds:.1f} s ({n_rows / max(seconds, 1e-9):,.0f} rows/s)"


def healthy(status: ClusterStatus) -> bool:
    """Whether every node and every shard answered, is one of this cluster, and none has failed or still starts."""
    nodes_well = not status.nodes_error and not status.strangers and not any(node.error for node in status.nodes)
    return nodes_well and all(s.reply is not None and not s.reply.failure and not s.reply.starting for s in status.shards)


def _node_row(node: NodeStats) -> tuple[str, ...]:
    if node.error:
        return (node.address, "-", "-", "-", "-", "-", node.error)
    limit = f"{node.limit_bytes / _MB:,.0f} MB" if node.limit_bytes else "none set"
    headroom = f"{max(0, round(100 * (1 - node.used_bytes / node.limit_bytes)))} %" if node.limit_bytes else "-"
    used = f"{node.used_bytes / _MB:,.1f} MB"
    return (node.address, node.server, f"{node.n_keys:,}", used, limit, headroom, f"{node.evicted:,}")


def _shard_row(shard: ShardStatus) -> tuple[str, ...]:
    reply = shard.reply
    if reply is None:
        return (str(shard.shard), shard.address, *["-"] * 7, "no answer")
    if reply.starting:
        return (str(shard.shard), shard.address, *["-"] * 7, "starting")
    state = "ok" if not reply.failure else "failed" if reply.failure.startswith(_STOPPED) else "retrying"
    counts = (f"{reply.n_rows:,}", f"{reply.k:,}", f"{reply.rows_applied:,}", f"{reply.pending_parts:,}")
    hits = f"{100 * reply.cache_hits / reply.cache_lookups:.0f} %" if reply.cache_lookups else "-"
    return (str(shard.shard), shard.address, *counts, f"{reply.lag_s:.2f} s", hits, str(reply.n_trainers), state)


def _trouble(shard: ShardStatus) -> str:
    return " ".join((shard.error if shard.reply is None else shard.reply.starting or shard.reply.failure).split())


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
