"""Start-up: is this storage ours, whole and safe, and are we the shard's one owner? Nothing is served before every answer is yes.

Two facts are kept apart. Who we belong to: the file `cluster` in the data folder, against the markers of the nodes. Who owns the shard: an
epoch on every node, raised at each start and put there before anything is served. The state of the last clean stop is claimed by renaming:

    state            a clean stop; its epoch must be the owner epoch on the nodes
    state.claiming   a start that has not served yet (or was broken off before it did): still good
    state.loaded     a process has served since: no use, kept for a person to look at
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import msgpack

from kvemb.errors import (
    ConfigError,
    DeadlineExceededError,
    KvembError,
    LostRowError,
    NodeLostError,
    NodeUnavailableError,
    NotProvisionedError,
    ParameterServerError,
    ProtocolError,
    WrongNodeError,
)
from kvemb.net.deadline import Deadline
from kvemb.record import MAX_EPOCH
from kvemb.stores.base import Store
from paramserver.data_dir import DataDir
from paramserver.state_file import ShardState, decode, encode

CLUSTER, INTENT = "cluster", "provision-intent"
STATE, CLAIMING, LOADED = "state", "state.claiming", "state.loaded"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
log = logging.getLogger("paramserver")

Wait = Callable[[float], None]
"""Waits so many seconds, or raises when the process is told to stop."""


def join_cluster(store: Store, data: DataDir, shard: int, *, deadline: Deadline, timeout_s: float, wait: Wait) -> bytes:
    """Open the store, waiting for nodes that are not up yet; shard 0 provisions a new cluster.

    Args:
        store: not open yet.
        data: this shard's folder.
        shard: number.
        deadline: of the whole start.
        timeout_s: of one storage call.
        wait: between tries.

    Returns:
        The cluster's id, 16 bytes.

    Raises:
        NodeLostError: the cluster was provisioned before and a node has lost its marker.
        WrongNodeError: the nodes belong to another cluster than this data folder.
        StorageError: whatever a node has against us; for those that may come up, only once the deadline has passed.
    """
    pause_s, said = _FIRST_PAUSE_S, ""
    while True:
        try:
            return _try_to_join(store, data, shard, timeout_s)
        except (NodeUnavailableError, DeadlineExceededError, NotProvisionedError, NodeLostError) as error:
            if not _may_pass(error, data) or deadline.expired:
                raise
            if said != (said := str(error)):
                log.info("waiting for storage: %s", error)
        wait(min(pause_s, deadline.remaining_s()))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def claim(store: Store, data: DataDir, shard: int, n_shards: int, cluster_id: bytes, timeout_s: float) -> ShardState:
    """Become the shard's owner: return what the last owner left, under our own new epoch, which every node holds by then.

    Until `confirm` the start may still be given up: the next one finds the same state.

    Raises:
        ConfigError: the cluster has another number of shards.
        LostRowError: the last owner ended without saving its state.
        ParameterServerError: the state is damaged or not the last owner's.
    """
    epochs = [_owner(store, number, n_shards, timeout_s) for number in sorted({0, shard})]
    stored = epochs[-1]
    state = _left_state(data, shard, n_shards, cluster_id, stored)
    epoch = stored + 1
    if epoch > MAX_EPOCH:
        raise ParameterServerError(f"shard {shard}: epoch {epoch} does not fit its 16 bits; this cluster has been restarted too often")
    if data.read(STATE) is not None:
        data.rename(STATE, CLAIMING)
    else:
        data.write(CLAIMING, encode(state))
    store.put_meta(_owner_name(shard), msgpack.packb({"epoch": epoch, "n_shards": n_shards}), Deadline.after(timeout_s))
    return state.with_epoch(epoch)


def confirm(data: DataDir) -> None:
    """Use up the claimed state, right before serving: from here on only a clean stop leaves one."""
    data.rename(CLAIMING, LOADED)


def _try_to_join(store: Store, data: DataDir, shard: int, timeout_s: float) -> bytes:
    try:
        markers = store.open(Deadline.after(timeout_s))
    except (NotProvisionedError, NodeLostError) as error:
        if shard != 0 or not _may_provision(error, data):
            raise
        _provision(store, data, timeout_s)
        markers = store.open(Deadline.after(timeout_s))
    found = markers[0].cluster_id
    ours = _unpack(data.read(CLUSTER), "cluster_id") or (shard == 0 and _unpack(data.read(INTENT), "cluster_id"))
    if ours and ours != found:
        raise WrongNodeError(
            f"the nodes belong to cluster {found.hex()}, the data folder {data.path} to cluster {ours.hex()}; check storage.nodes and "
            "parameter_servers.data_dir"
        )
    if data.read(CLUSTER) is None:
        data.write(CLUSTER, [msgpack.packb({"cluster_id": found})])
    return found


def _may_provision(error: KvembError, data: DataDir) -> bool:
    """A folder that belongs to a cluster never provisions again; a broken-off provisioning is completed."""
    if data.read(CLUSTER) is not None:
        if isinstance(error, NotProvisionedError):
            raise NodeLostError(
                f"the cluster of {data.path} was provisioned before, and no node has a marker any more: the nodes lost their data, or "
                "storage.nodes names others. Bring the data back; to start anew, empty the nodes and remove every shard's data folder."
            ) from error
        return False
    return isinstance(error, NotProvisionedError) or data.read(INTENT) is not None


def _provision(store: Store, data: DataDir, timeout_s: float) -> None:
    if data.read(INTENT) is None:
        data.write(INTENT, [msgpack.packb({"cluster_id": os.urandom(16), "generation": os.urandom(8)})])
    intent = data.read(INTENT)
    cluster_id, generation = _unpack(intent, "cluster_id"), _unpack(intent, "generation")
    store.provision(cluster_id, generation, Deadline.after(timeout_s))
    log.info("provisioned cluster %s on %s", cluster_id.hex(), ", ".join(store.addresses))


def _may_pass(error: KvembError, data: DataDir) -> bool:
    """Whether waiting can help. Half-written markers are a loss only for a shard that has seen the cluster whole."""
    return not isinstance(error, (NotProvisionedError, NodeLostError)) or data.read(CLUSTER) is None


def _owner_name(shard: int) -> str:
    return f"kvemb:owner:{shard}"


def _owner(store: Store, shard: int, n_shards: int, timeout_s: float) -> int:
    """The highest owner epoch of a shard on any node; 0 when it never had an owner."""
    epochs = [0]
    for data in store.get_meta(_owner_name(shard), Deadline.after(timeout_s)):
        if data is None:
            continue
        epoch, stored_shards = _unpack(data, "epoch"), _unpack(data, "n_shards")
        if stored_shards != n_shards:
            raise ConfigError(
                f"parameter_servers.shards: {n_shards} given, this cluster was made with {stored_shards}; rows are owned by shard, so "
                "the number is part of the cluster"
            )
        epochs.append(epoch)
    return max(epochs)


def _left_state(data: DataDir, shard: int, n_shards: int, cluster_id: bytes, stored_epoch: int) -> ShardState:
    """What the last owner left, checked against the nodes."""
    name = STATE if data.read(STATE) is not None else CLAIMING
    raw = data.read(name)
    if raw is None:
        if stored_epoch:
            raise LostRowError(
                f"shard {shard}: its last owner (epoch {stored_epoch}) ended without saving its index in {data.path}: rows that were "
                "acknowledged but not applied may be lost, and lost rows could not be told from new ones. Bring back nodes and data "
                "folders from one backup, or start a new cluster on emptied nodes with empty data folders."
            )
        return ShardState(cluster_id, shard, n_shards)
    state = decode(raw, str(data.path / name))
    if (state.cluster_id, state.shard, state.n_shards) != (cluster_id, shard, n_shards):
        raise ParameterServerError(
            f"{data.path / name}: of shard {state.shard} of {state.n_shards} in cluster {state.cluster_id.hex()}, expected "
            f"shard {shard} of {n_shards} in cluster {cluster_id.hex()}; check parameter_servers.data_dir"
        )
    if state.epoch > stored_epoch or (name == STATE and state.epoch != stored_epoch):
        raise ParameterServerError(
            f"{data.path / name}: saved in epoch {state.epoch}, but the nodes say that epoch {stored_epoch} owned the shard last; use the "
            "data folder of the last owner, and nodes and folders from the same time"
        )
    return state


def _unpack(data: bytes | None, key: str) -> Any:
    if data is None:
        return None
    try:
        return msgpack.unpackb(data, max_map_len=16)[key]
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise ProtocolError(f"expected a small record with {key!r}, got {data[:40]!r}") from error
