"""Opens a cluster: reads kvemb.yaml, opens storage and shards.

What must not live here: what is done with an open cluster (kvemb.cluster.cluster).
"""

from __future__ import annotations  # help() shows types as they are written here

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from kvemb.cluster.cluster import Cluster
from kvemb.config import load
from kvemb.connection.access import Access
from kvemb.connection.moved_nodes import NodesInFile
from kvemb.connection.plaintext import require_encrypted
from kvemb.errors import ConfigError, InvalidInputError
from kvemb.net.deadline import Deadline
from kvemb.stores.storage_kinds import open_store

if TYPE_CHECKING:
    from kvemb.client.slot_moves import NodeMoves


def connect(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    read_only: bool = False,
    trainer: str | None = None,
    timeout_s: float | None = None,
    metrics_port: int | None = None,
) -> Cluster:
    """Open a cluster.

    Args:
        source: path or file:// URL of its kvemb.yaml, or a dict of what that holds. Passwords are read from the environment variables
            it names. From a file, nodes that are replaced at other addresses later are found by reading it again.
        read_only: only pull; needs no parameter server.
        trainer: this process's name in the job, unique there: a second process of the same name fences the first. Drawn
            from host, process and chance unless given. In a sync job give it, so that a restarted trainer takes its place again.
        timeout_s: of connecting; storage.timeout_s unless given. A shard that says it is starting is waited for as long as one may be away
            (`parameter_servers.away_timeout_s`).
        metrics_port: serve this process's figures to Prometheus there, until the cluster is closed. A program with a registry of its own
            registers `Cluster.metrics_collector` instead. Each process of a machine needs another port.

    Raises:
        InvalidInputError: an option is out of range, or would have no effect.
        ConfigError: kvemb.yaml is wrong, or the servers were started with another one.
        ShardUnavailableError, StorageError: naming the shard or node, within the timeout.

    Example: see `kvemb`.
    """
    config = load(source, os.environ)
    if trainer is not None and (read_only or not trainer or len(trainer) > 255):
        raise InvalidInputError(f"trainer is {trainer!r}: give a name of 1 to 255 characters, and none with read_only=True")
    require_encrypted(config)
    deadline = Deadline.of_caller(config.storage.timeout_s if timeout_s is None else timeout_s)
    store = open_store(config.storage, role="trainer")
    if not isinstance(source, Mapping):
        store.nodes.follow(NodesInFile(source, config))
    try:
        if read_only:
            store.open(deadline)
            access = Access(store, None, config.storage.timeout_s, config.cluster)
            return _served(Cluster(config, access, partial(connect, source, read_only=True)), metrics_port)
        from kvemb.client.opening import open_shards  # imports gRPC, which a read-only process does not need

        shards = open_shards(config, trainer, store, deadline)
        access = Access(store, shards, config.storage.timeout_s, config.cluster)
        return _served(Cluster(config, access, partial(connect, source)), metrics_port)
    except BaseException:
        store.close()
        raise


@contextmanager
def nodes(source: str | os.PathLike[str] | Mapping[str, Any]) -> Iterator[NodeMoves]:
    """Ask a cluster's shards about its storage nodes, and have them come and go, without connecting to any of them: some may be dead.

    Args:
        source: as of `connect`.

    Raises:
        ConfigError: kvemb.yaml is wrong, or of a Redis Cluster, which moves its slots itself.

    Example:
        >>> with kvemb.nodes("kvemb.yaml") as nodes:  # doctest: +SKIP
        ...     nodes.replace_dead("10.0.0.2:6379", "10.0.0.4:6379")
    """
    from kvemb.client.all_shards import AllShards  # imports gRPC
    from kvemb.client.slot_moves import NodeMoves

    config = load(source, os.environ)
    require_encrypted(config)
    if config.storage.kind == "redis-cluster":
        raise ConfigError(
            "a Redis Cluster moves its slots itself: use `kvemb nodes`, or kvemb.stores.redis_cluster.scaling.node_scaling.NodeScaling"
        )
    servers = AllShards.of(config.servers)
    try:
        yield NodeMoves(servers)
    finally:
        servers.close()


def _served(cluster: Cluster, metrics_port: int | None) -> Cluster:
    if metrics_port is None:
        return cluster
    try:
        cluster.serve_metrics(metrics_port)
    except BaseException:
        cluster.close()
        raise
    return cluster
