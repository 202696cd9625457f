"""Opens a cluster: reads kvemb.yaml, opens storage and shards.

The only source of storage addresses while a program runs: kvemb.yaml is read again when a node has been replaced at another address. The
node's marker says whether it is the right one (`kvemb.stores`).
"""

from __future__ import annotations  # help() shows types as they are written here

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from kvemb.api.cluster import Cluster
from kvemb.api.plaintext import require_encrypted
from kvemb.config import Config, load
from kvemb.connection import Connection
from kvemb.errors import ConfigError, InvalidInputError
from kvemb.net.deadline import Deadline
from kvemb.stores.storage_kinds import open_store
from kvemb.stores.store import Store

if TYPE_CHECKING:
    from kvemb.scaling.slot_moves import NodeMoves


_PAUSE_S = 1.0


class NodesInFile:
    """Returns the storage nodes' addresses from the current kvemb.yaml. Thread-safe: at worst two threads read the file at once."""

    def __init__(self, source: str | os.PathLike[str], config: Config) -> None:
        text = os.fspath(source)
        self._source = text if "://" in text else os.path.abspath(text)  # the program may go to another folder
        self._config = config
        self._known = config.storage.nodes, ""
        self._read_at = float("-inf")

    def __call__(self) -> tuple[str, ...]:
        """Return the addresses, read at most a second ago."""
        if time.monotonic() - self._read_at >= _PAUSE_S:
            self._known = self._read()
            self._read_at = time.monotonic()
        nodes, trouble = self._known
        if trouble:
            raise ConfigError(trouble)
        return nodes

    def _read(self) -> tuple[tuple[str, ...], str]:
        """Return the addresses, or why there are none."""
        before = self._config
        try:
            now = load(self._source, os.environ)
        except ConfigError as error:  # perhaps the file is being written
            return (), f"kvemb.yaml was read again for the nodes' addresses, and cannot be used: {error}"
        got, expected = ((c.cluster, c.storage.kind) for c in (now, before))
        if got != expected:
            return (), (
                f"{self._source} was read again for the nodes' addresses: (cluster, storage kind) is {got!r}, "
                f"expected {expected!r}. A program that runs follows nodes to other addresses only: put it back, or connect again."
            )
        return now.storage.nodes, ""


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
        source: path or file:// URL of its kvemb.yaml, or a dict of the same content. Passwords are read from the environment variables
            it names. A file is read again to find nodes that were replaced at other addresses.
        read_only: only pull; needs no parameter server.
        trainer: this process's name in the job, unique there: a second process of the same name fences the first. Drawn
            from host, process and chance unless given. In a sync job give it, so that a restarted trainer takes its place again.
        timeout_s: of connecting. Unless given, storage and a shard that is starting are waited for as long as they may be away
            (`parameter_servers.away_timeout_s`; with `storage.on_lost_node: fail` storage is not), a shard that does not answer for
            `storage.timeout_s`.
        metrics_port: serve this process's figures to Prometheus there, until the cluster is closed. A program with a registry of its own
            registers `Cluster.metrics_collector` instead. Each process of a machine needs another port.

    Raises:
        InvalidInputError: an option is out of range, or would have no effect.
        ConfigError: kvemb.yaml is wrong, or the servers were started with another one.
        ShardUnavailableError, StorageError: naming shard 0 or the node, within the timeout. Another shard that is away is named in the log:
            pulls go on, and pushes wait for it, as they do for one that goes away later.

    Example: see `kvemb`.
    """
    config = load(source, os.environ)
    if trainer is not None and (read_only or not trainer or len(trainer) > 255):
        raise InvalidInputError(f"trainer is {trainer!r}: give a name of 1 to 255 characters, and none with read_only=True")
    require_encrypted(config)
    waits = config.node_waits
    if read_only:
        return _served(_open_reader(source, config, waits, timeout_s), metrics_port)
    from kvemb.client.opening import open_shards  # imports gRPC, which a read-only process does not need

    store = _store_of(source, config)
    try:
        deadline = Deadline.of_caller(waits[0] if timeout_s is None else timeout_s, waits[1])
        shards = open_shards(config, trainer, store, deadline, answers_s=timeout_s or config.storage.timeout_s)
        connection = Connection(store, shards, *waits, config.cluster)
        return _served(Cluster(config, connection, partial(connect, source)), metrics_port)
    except BaseException:
        store.close()
        raise


def connect_to_serve(source: str | os.PathLike[str] | Mapping[str, Any]) -> Cluster:
    """Open a cluster to only pull; a read waits for a node for `storage.timeout_s` at most: whoever asks does not wait for a repair."""
    config = load(source, os.environ)
    require_encrypted(config)
    return _open_reader(source, config, (config.storage.timeout_s, math.inf), None)


def _open_reader(
    source: str | os.PathLike[str] | Mapping[str, Any], config: Config, waits: tuple[float, float], timeout_s: float | None
) -> Cluster:
    store = _store_of(source, config)
    try:
        store.open(Deadline.of_caller(waits[0] if timeout_s is None else timeout_s, waits[1]))
        return Cluster(config, Connection(store, None, *waits, config.cluster), partial(connect, source, read_only=True))
    except BaseException:
        store.close()
        raise


def _store_of(source: str | os.PathLike[str] | Mapping[str, Any], config: Config) -> Store:
    store = open_store(config.storage, role="trainer")
    if not isinstance(source, Mapping):
        store.nodes.follow(NodesInFile(source, config))
    return store


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
    from kvemb.scaling.slot_moves import NodeMoves

    config = load(source, os.environ)
    require_encrypted(config)
    if config.storage.kind == "redis-cluster":
        raise ConfigError("a Redis Cluster moves its slots itself: `kvemb nodes` prints the commands of redis-cli")
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
