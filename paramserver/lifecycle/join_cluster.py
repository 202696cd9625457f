"""Start-up, first half: is this storage ours, whole and safe? Nothing is served before the answer is yes; the other half is `claim_shard`.

Who we belong to stands in the file `cluster` of the data folder, and is compared with the markers of the nodes. Shard 0 provisions a new
cluster; a folder that has seen one never provisions again.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import msgpack

from kvemb.coordination.map_copies import decode_map
from kvemb.coordination.markers import Identity
from kvemb.errors import (
    DeadlineExceededError,
    KvembError,
    NodeLostError,
    NotProvisionedError,
    ProtocolError,
    WrongNodeError,
)
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from kvemb.stores.store import Store

from ..disk.data_dir import DataDir
from .storage_wait import ABSENT, StorageWait, Wait

CLUSTER, INTENT = "cluster", "provision-intent"
log = logging.getLogger("paramserver")


def join_cluster(store: Store, data: DataDir, shard: int, n_shards: int, *, deadline: Deadline, timeout_s: float, wait: Wait) -> bytes:
    """Open the store, waiting for nodes that are not up yet; shard 0 provisions a new cluster.

    Nodes that have lost their rows are no obstacle to a shard that has seen the cluster whole: they are repaired.

    Args:
        store: not open yet.
        data: this shard's folder.
        shard, n_shards: which of how many.
        deadline: of the whole start.
        timeout_s: of one storage call; more is given from try to try, since a Redis Cluster has thousands of markers to read.
        wait: between tries.

    Returns:
        The cluster's id, 16 bytes.

    Raises:
        NodeLostError: a node has lost its marker, and this folder has never seen the cluster whole.
        WrongNodeError: the nodes belong to another cluster than this data folder.
        StorageError: whatever a node has against us; for those that may come up, only once the deadline has passed.
    """

    def step() -> bytes:
        nonlocal timeout_s
        try:
            return _try_to_join(store, data, shard, n_shards, timeout_s)
        except DeadlineExceededError:
            timeout_s = max(timeout_s, min(2 * timeout_s, deadline.remaining_s()))
            raise

    return StorageWait(deadline, wait)(step, (*ABSENT, NotProvisionedError, NodeLostError), lambda error: _may_pass(error, data))


def _try_to_join(store: Store, data: DataDir, shard: int, n_shards: int, timeout_s: float) -> bytes:
    try:
        markers = store.open(Deadline.after(timeout_s), _identity(data))
    except (NotProvisionedError, NodeLostError) as error:
        if shard != 0 or not _may_provision(error, data):
            raise
        _provision(store, data, n_shards, timeout_s)
        markers = store.open(Deadline.after(timeout_s))
    found = markers[0].cluster_id
    ours = _unpack(data.read(CLUSTER), "cluster_id") or (shard == 0 and _unpack(data.read(INTENT), "cluster_id"))
    if ours and ours != found:
        raise WrongNodeError(
            f"the nodes belong to cluster {found.hex()}, the data folder {data.path} to cluster {ours.hex()}; check storage.nodes and "
            "parameter_servers.data_dir"
        )
    if data.read(CLUSTER) != (packed := _packed(found, markers[0].generation, store.cluster_map)):
        data.write(CLUSTER, [packed])
    return found


def keep_map(data: DataDir, cluster_map: ClusterMap, check: Callable[[], None]) -> None:
    """Keep a newer map in the folder of a shard that has joined.

    Args:
        data: the folder.
        cluster_map: of the cluster.
        check: raises once another process owns the shard.

    Raises:
        OSError, FencedError: the older one is kept.
    """
    kept = data.read(CLUSTER)
    data.write(CLUSTER, [_packed(_unpack(kept, "cluster_id"), _unpack(kept, "generation"), cluster_map)], check=check)


def _packed(cluster_id: bytes, generation: bytes, cluster_map: ClusterMap) -> bytes:
    packed: bytes = msgpack.packb({"cluster_id": cluster_id, "generation": generation, "map": cluster_map.encode()})
    return packed


def _identity(data: DataDir) -> Identity | None:
    """The cluster as this shard has seen it whole; None before that."""
    kept = data.read(CLUSTER)
    if kept is None or (cluster_map := _unpack(kept, "map", b"")) == b"":  # of an earlier release: the nodes' markers say which
        return None
    return Identity(_unpack(kept, "cluster_id"), _unpack(kept, "generation"), decode_map(cluster_map))


def _may_provision(error: KvembError, data: DataDir) -> bool:
    """A folder that belongs to a cluster never provisions again; a broken-off provisioning is completed."""
    return data.read(CLUSTER) is None and (isinstance(error, NotProvisionedError) or data.read(INTENT) is not None)


def _provision(store: Store, data: DataDir, n_shards: int, timeout_s: float) -> None:
    if data.read(INTENT) is None:
        data.write(INTENT, [msgpack.packb({"cluster_id": os.urandom(16), "generation": os.urandom(8)})])
    intent = data.read(INTENT)
    cluster_id, generation = _unpack(intent, "cluster_id"), _unpack(intent, "generation")
    store.provision(cluster_id, generation, Deadline.after(timeout_s), n_shards)
    log.info("provisioned cluster %s on %s", cluster_id.hex(), ", ".join(store.addresses))


def _may_pass(error: KvembError, data: DataDir) -> bool:
    """Whether waiting can help. Half-written markers are a loss only for a shard that has seen the cluster whole."""
    return not isinstance(error, (NotProvisionedError, NodeLostError)) or data.read(CLUSTER) is None


def _unpack(data: bytes | None, key: str, missing: Any = None) -> Any:
    if data is None:
        return None
    try:
        fields = msgpack.unpackb(data, max_map_len=16)
        return fields[key] if missing is None else fields.get(key, missing)
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"expected a small record with {key!r}, got {data[:40]!r}") from error
