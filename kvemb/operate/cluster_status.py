"""The status of a cluster: every shard and node, or why one of them did not answer. Asks them, and changes nothing."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvemb.config import Config
from kvemb.coordination.registry_format import META_NAME, newest_registry
from kvemb.coordination.shard_notes import newest_note, note_name, of_another
from kvemb.errors import ConfigError, KvembError, StorageError, WrongNodeError, n_of
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import GET_STATUS, Empty, StatusReply
from kvemb.schema.cluster_map import ClusterMap
from kvemb.stores.row_io import HeldRows
from kvemb.stores.storage_kinds import open_store
from kvemb.stores.store import Store
from kvemb.stores.store_nodes import NodeStats

if TYPE_CHECKING:  # they import gRPC
    from kvemb.client.all_shards import AllShards
    from kvemb.client.shard_client import ShardClient


LOOK_S = 10.0  # for each question of a look at the cluster, at most: storage.timeout_s says how long training may wait for a node


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
        strangers: the shard or node that is not the one that kvemb.yaml names, as far as `survey` has looked; "" for none.
        open_slots: of a Redis Cluster, those that stand open between two nodes.
    """

    shards: tuple[ShardStatus, ...]
    nodes: tuple[NodeStats, ...]
    nodes_error: str = ""
    strangers: str = ""
    held: tuple[tuple[str, tuple[HeldRows | None, ...]], ...] = ()
    open_slots: tuple[int, ...] = ()

    def __repr__(self) -> str:
        n_shards, n_nodes = sum(one.reply is not None for one in self.shards), sum(not one.error for one in self.nodes)
        return f"<ClusterStatus: {n_shards} of {n_of(len(self.shards), 'shard')} and {n_nodes} of {n_of(len(self.nodes), 'node')} answer>"


def survey(config: Config) -> ClusterStatus:
    """Ask every shard and node of a kvemb.yaml without connecting to the cluster: so those that are down are reported, too."""
    from kvemb.client.all_shards import AllShards

    config = hasty(config)
    store = open_store(replace(config.storage, on_lost_node="fail"), role="trainer")
    servers = AllShards.of(config.servers)
    try:
        store.nodes.find(Deadline.after(config.storage.timeout_s))
        replies, unknown = ask_all(servers, config.storage.timeout_s, store.nodes.cluster_map)
        shards = tuple(_shard(shard, servers.channels[shard].address, reply) for shard, reply in replies.items())
        try:
            nodes = tuple(store.nodes.stats(Deadline.after(config.storage.timeout_s)))
        except StorageError as error:
            return ClusterStatus(shards, (), str(error), unknown)
        serve = all(isinstance(reply, StatusReply) and not reply.starting for reply in replies.values())
        nodes_answer = not any(node.error for node in nodes)
        strangers = unknown or (_strangers(config, store, servers if serve else None) if nodes_answer else "")
        held = _held(store, config.storage.timeout_s) if serve and nodes_answer and not strangers else ()
        return ClusterStatus(shards, nodes, strangers=strangers, held=held, open_slots=_open_slots(store, config.storage.timeout_s))
    finally:
        servers.close()
        store.close()


def hasty(config: Config) -> Config:
    """Return a config for a look at the cluster: its questions have `LOOK_S` at most, and so what does not answer is named soon."""
    return replace(config, storage=replace(config.storage, timeout_s=min(config.storage.timeout_s, LOOK_S)))


def ask_all(servers: "AllShards", timeout_s: float, on_nodes: ClusterMap) -> tuple[dict[int, StatusReply | Exception], str]:
    """Ask every shard for its status, those that shard 0 or the map knows too; return answers or errors, and a fault of the file or ""."""
    asked = {shard: servers.channels[shard].address for shard in servers.numbers}
    replies = servers.try_each(GET_STATUS, Empty(), Deadline.after(timeout_s))
    first, unknown = replies.get(0), ""
    try:
        if isinstance(first, StatusReply) and not first.starting:
            servers.ask_map(Deadline.after(timeout_s))
        elif on_nodes.version > servers.cluster_map.version:
            servers.follow(on_nodes)
    except ConfigError as error:
        unknown = str(error)
    except KvembError:
        pass  # it was there a moment ago
    elsewhere = {shard: Empty() for shard in servers.numbers if servers.channels[shard].address != asked.get(shard)}
    replies |= servers.try_each(GET_STATUS, elsewhere, Deadline.after(timeout_s))
    return {shard: replies[shard] for shard in servers.numbers}, unknown


def _strangers(config: Config, store: Store, servers: "AllShards | None") -> str:
    """Return the mismatch that connecting would find: markers, cluster map, shards' numbers or names that differ from this kvemb.yaml."""
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


def open_slots_line(slots: Sequence[int]) -> str:
    """Say which slots of a Redis Cluster stand open; "" for none."""
    some = ", ".join(map(str, slots[:5])) + (", …" if len(slots) > 5 else "")
    return f"slots stand open between two nodes, which serve them together ({some}): redis-cli moves them, or was stopped" if slots else ""


def _open_slots(store: Store, timeout_s: float) -> tuple[int, ...]:
    try:
        return tuple(store.nodes.open_slots(Deadline.after(timeout_s)))
    except KvembError:  # the fault stands beside the node
        return ()


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
    """Ask every shard and node; one that does not answer is reported as such, not raised."""
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


def healthy(status: ClusterStatus) -> bool:
    """Whether every node and shard answered, is one of this cluster and has its rows, and none has failed or is still starting."""
    nodes_well = not status.nodes_error and not status.strangers and not any(node.error for node in status.nodes)
    return nodes_well and all(s.reply is not None and not (s.reply.failure or s.reply.starting or s.reply.repair) for s in status.shards)
