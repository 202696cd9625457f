"""The status of a cluster: every shard and node, or why one of them did not answer, and the tables that `kvemb status` prints.

HEADROOM counts what a node says it stores. memcached counts stored bytes, not the slab pages it has set aside. So it may be out of room for
rows of one size while some headroom remains.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvemb.config import Config
from kvemb.coordination.registry_format import META_NAME, newest_registry
from kvemb.coordination.shard_notes import newest_note, note_name, of_another
from kvemb.errors import ConfigError, KvembError, StorageError, WrongNodeError
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import Empty, RepairReply, StatusReply
from kvemb.stores.row_io import HeldRows
from kvemb.stores.storage_kinds import open_store
from kvemb.stores.store import Store
from kvemb.stores.store_nodes import NodeStats, UnfinishedChange

if TYPE_CHECKING:  # they import gRPC
    from kvemb.client.all_shards import AllShards
    from kvemb.client.shard_client import ShardClient


@dataclass(frozen=True, eq=False)
class ShardStatus:
    """One shard: `reply`, or None and the `error` that says why."""

    shard: int
    address: str
    reply: StatusReply | None
    error: str = ""


@dataclass(frozen=True, eq=False)
class ClusterStatus:
    """Every shard (none on a read-only connection), and every node, or why the nodes did not answer.

    Args:
        held: of each table (name, the rows on each node, None where storage cannot tell), as far as `survey` has looked.
        change: of nodes, that a command has begun and not ended; None if there is none, or it was not looked for.
        strangers: the shard or node that is not the one that kvemb.yaml names, as far as `survey` has looked; "" for none.
    """

    shards: tuple[ShardStatus, ...]
    nodes: tuple[NodeStats, ...]
    nodes_error: str = ""
    strangers: str = ""
    held: tuple[tuple[str, tuple[HeldRows | None, ...]], ...] = ()
    change: UnfinishedChange | None = None


def survey(config: Config) -> ClusterStatus:
    """Ask every shard and node of a kvemb.yaml without connecting to the cluster: so those that are down are reported, too.

    Args:
        config: of the cluster.
    """
    from kvemb.client.all_shards import AllShards

    store = open_store(replace(config.storage, on_lost_node="fail"), role="trainer")
    servers = AllShards.of(config.servers)
    try:
        replies, unknown = ask_all(servers, config.storage.timeout_s)
        shards = tuple(_shard(shard, servers.channels[shard].address, reply) for shard, reply in replies.items())
        try:
            store.nodes.find(Deadline.after(config.storage.timeout_s))
            nodes = tuple(store.nodes.stats(Deadline.after(config.storage.timeout_s)))
        except StorageError as error:
            return ClusterStatus(shards, (), str(error), unknown)
        serve = all(isinstance(reply, StatusReply) and not reply.starting for reply in replies.values())
        nodes_answer = not any(node.error for node in nodes)
        strangers = unknown or (_strangers(config, store, servers if serve else None) if nodes_answer else "")
        held = _held(store, config.storage.timeout_s) if serve and nodes_answer and not strangers else ()
        return ClusterStatus(shards, nodes, strangers=strangers, held=held, change=_change(store, config.storage.timeout_s))
    finally:
        servers.close()
        store.close()


def ask_all(servers: "AllShards", timeout_s: float) -> tuple[dict[int, StatusReply | Exception], str]:
    """Ask every shard for its status: those of kvemb.yaml, and if shard 0 serves, those that it knows.

    Args:
        servers: of a kvemb.yaml, without storage.
        timeout_s: of every round.

    Returns:
        Each shard's answer, or its error; and a fault of kvemb.yaml's shards, "" for none.
    """
    replies = servers.try_each("Status", Empty(), StatusReply, Deadline.after(timeout_s))
    first, unknown = replies.get(0), ""
    if isinstance(first, StatusReply) and not first.starting:
        try:
            servers.ask_map(Deadline.after(timeout_s))
        except ConfigError as error:
            unknown = str(error)
        except KvembError:
            pass  # it was there a moment ago
        joined = {shard: Empty() for shard in servers.numbers if shard not in replies}
        replies |= servers.try_each("Status", joined, StatusReply, Deadline.after(timeout_s))
    return {shard: replies[shard] for shard in servers.numbers}, unknown


def _strangers(config: Config, store: Store, servers: "AllShards | None") -> str:
    """Return the mismatch that connecting would find: markers, cluster map, shards' numbers or names that differ from this kvemb.yaml.

    Args:
        config: of the cluster.
        store: whose nodes answer.
        servers: None if not all of them serve: then only the nodes' cluster is checked.
    """
    deadline = Deadline.after(config.storage.timeout_s)
    try:
        served = [] if servers is None else [servers.describe(config, deadline).cluster_id]
        return " ".join(nodes_of_another(store, config, deadline, served) or ())
    except KvembError as error:
        if servers is None and not isinstance(error, WrongNodeError):  # nodes that are empty, or in repair, wait for the shards
            return ""
        return f"{type(error).__name__}: {error}"


def nodes_of_another(store: Store, config: Config, deadline: Deadline, served: Collection[bytes]) -> tuple[str, str] | None:
    """Open the store, and say whether its nodes are another cluster's; see `of_another`."""
    cluster_id = store.open(deadline)[0].cluster_id
    note = newest_note(store.values.get(note_name(0), deadline))
    return of_another(store.nodes.addresses, cluster_id, note, config.cluster, time.time(), served)


def _change(store: Store, timeout_s: float) -> UnfinishedChange | None:
    try:
        return store.nodes.unfinished_change(Deadline.after(timeout_s))
    except KvembError:  # the fault stands beside the node
        return None


def _held(store: Store, timeout_s: float) -> tuple[tuple[str, tuple[HeldRows | None, ...]], ...]:
    """Count the rows of every table on every node."""
    try:
        registry = newest_registry(store.values.get(META_NAME, Deadline.after(timeout_s)), store.values.copies_on(META_NAME))
        tables = [table for _, table in sorted(registry.tables.items())]
        nodes = [store.rows.held_on(address, tables, Deadline.after(timeout_s)) for address in store.nodes.addresses]
    except KvembError:  # the fault stands beside the node at the next look
        return ()
    return tuple((table.name, tuple(of)) for table, of in zip(tables, zip(*nodes, strict=True), strict=True))


def read_status(store: Store, client: "ShardClient | None", timeout_s: float) -> ClusterStatus:
    """Ask every shard and node; one that does not answer is reported as such, not raised.

    Args:
        store: the storage nodes.
        client: of the shards, None on a read-only connection.
        timeout_s: of the shards, and of the nodes.
    """
    shards = () if client is None else _shards(client, timeout_s)
    try:
        nodes = tuple(store.nodes.stats(Deadline.of_caller(timeout_s)))
    except StorageError as error:
        return ClusterStatus(shards, (), str(error))
    return ClusterStatus(shards, nodes)


def _shards(client: "ShardClient", timeout_s: float) -> tuple[ShardStatus, ...]:
    replies = client.questions.status(timeout_s)
    addresses = {shard: channel.address for shard, channel in client.servers.channels.items()}
    return tuple(_shard(shard, addresses.get(shard, ""), reply) for shard, reply in replies.items())


def _shard(index: int, address: str, reply: StatusReply | Exception) -> ShardStatus:
    return ShardStatus(index, address, None, str(reply)) if isinstance(reply, Exception) else ShardStatus(index, address, reply)


_MB = 1e6
_STOPPED = "the shard stopped applying"  # what a ShardFailedError begins with; any other trouble is tried again


def render(status: ClusterStatus) -> str:
    """Return aligned plain text: nodes with keys and memory headroom, shards with their applied batches and their lag.

    A key is a row, a bucket or a page. Of tables in buckets the rows on each node are counted. Above the tables: servers that are not of
    the cluster that kvemb.yaml means. Below them, each on its own line: a shard's error, its repair, its progress in comparing cold rows.
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
    """Return how many rows of each table every node holds, for the tables where it can tell."""
    told = [(name, of) for name, of in status.held if None not in of]
    if not told:
        return []
    rows = [(name, *(f"{'' if one.exact else 'about '}{one.n_rows:,}" for one in of if one is not None)) for name, of in told]
    return ["", *_table(("ROWS OF", *(node.address for node in status.nodes)), rows)]


def render_repair(replies: Mapping[int, RepairReply]) -> str:
    """Return the results of a repair in words, shard by shard and in all.

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
    """Whether every node and every shard answered, is one of this cluster, and none has failed or is still starting."""
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
