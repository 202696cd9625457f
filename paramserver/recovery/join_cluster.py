"""Start-up, first half: is this storage ours, whole and safe? Nothing is served before the answer is yes; the other half is `claim_shard`.

The file `cluster` of the data folder names our cluster, and is compared with the markers of the nodes. Shard 0 provisions a new cluster; a
folder that has seen one never provisions again.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from kvemb.coordination.map_copies import decode_map
from kvemb.coordination.markers import Identity
from kvemb.coordination.shard_notes import newest_note, note_name, of_another, whose
from kvemb.errors import (
    DeadlineExceededError,
    KvembError,
    NodeLostError,
    NodeRefusesError,
    NodeUnavailableError,
    NotProvisionedError,
    ProtocolError,
    StorageError,
    WrongNodeError,
)
from kvemb.net.deadline import Deadline, WhyWaiting, pauses
from kvemb.schema.cluster_map import ClusterMap
from kvemb.stores.store import Store
from kvemb.stores.store_nodes import StoreNodes

from ..shard_process.data_dir import DataDir, folder_of
from .start_report import StartReport

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
ABSENT = (NodeUnavailableError, DeadlineExceededError)
T = TypeVar("T")
log = logging.getLogger("paramserver")

Wait = Callable[[float], None]
"""Waits so many seconds, or raises StoppedError."""


class StoppedError(Exception):
    """The process was told to stop while it was starting."""


class StorageWait:
    """Tries a step of the start again while storage is away."""

    def __init__(self, deadline: Deadline, wait: Wait, report: StartReport) -> None:
        self.deadline, self._wait, self._report = deadline, wait, report
        self._waiting = WhyWaiting()

    def __call__(
        self,
        step: Callable[[], T],
        errors: tuple[type[KvembError], ...] = ABSENT,
        may_pass: Callable[[KvembError], bool] = lambda error: True,
    ) -> T:
        """Take a step that may be taken again after any of these errors."""
        waits = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                return step()
            except errors as error:
                if isinstance(error, NodeRefusesError) or not may_pass(error) or self.deadline.expired:
                    raise
                if self._waiting.is_news(str(error)):
                    log.info("waiting for %s: %s", "storage" if isinstance(error, StorageError) else "shard 0", error)
                self._report.waits(str(error))
            self._wait(min(next(waits), self.deadline.remaining_s()))


CLUSTER, INTENT = "cluster", "provision-intent"


def join_cluster(store: Store, data: DataDir, shard: int, n_shards: int, *, name: str, timeout_s: float, again: StorageWait) -> Identity:
    """Open the store, waiting for nodes that are not up yet; shard 0 provisions a new cluster.

    Nodes that have lost their rows are no obstacle to a shard that has seen the cluster whole: they are repaired.

    Returns:
        The cluster. The folder has not noted it yet: `keep_identity` does, once this shard may claim its number there.
    """

    def step() -> Identity:
        nonlocal timeout_s
        try:
            return _try_to_join(store, data, shard, n_shards, name, timeout_s)
        except DeadlineExceededError:
            timeout_s = max(timeout_s, min(2 * timeout_s, again.deadline.remaining_s()))
            raise

    return again(step, (*ABSENT, NotProvisionedError, NodeLostError), lambda error: _may_pass(error, data))


def _try_to_join(store: Store, data: DataDir, shard: int, n_shards: int, name: str, timeout_s: float) -> Identity:
    known, wrong = _identity(data), None
    try:
        markers = store.open(Deadline.after(timeout_s), known)
    except WrongNodeError as error:
        if known is None:
            raise
        markers, wrong = store.open(Deadline.after(timeout_s)), error  # whose are they? nothing is done with them
    except (NotProvisionedError, NodeLostError) as error:
        if shard != 0 or not _may_provision(error, data):
            if isinstance(error, NotProvisionedError) and data.read(CLUSTER) is not None:
                mend = "For a new cluster name another, empty folder in kvemb.yaml (parameter_servers.data_dir)."
                raise NotProvisionedError(f"{error} The data folder {data.path} is an older cluster's. {mend}") from error
            raise
        _provision(store, data, n_shards, timeout_s)
        markers = store.open(Deadline.after(timeout_s))
    found = markers[0].cluster_id
    ours = _unpack(data.read(CLUSTER), "cluster_id") or (shard == 0 and _unpack(data.read(INTENT), "cluster_id"))
    if ours != found:
        note = newest_note(store.values.get(note_name(0), Deadline.after(timeout_s)))
        if ours:
            where = f"storage.nodes ({', '.join(store.nodes.addresses)}) hold the rows of {whose(found, 0, note, time.time())}"
            raise WrongNodeError(
                f"{where}. The data folder {data.path} is of cluster {ours.hex()}. Nothing was changed. Correct storage.nodes, or "
                "parameter_servers.data_dir, in kvemb.yaml."
            )
        if (another := of_another(store.nodes.addresses, found, note, name, time.time())) is not None:
            raise WrongNodeError(" ".join(another))
    if wrong is not None:
        raise wrong
    return Identity(found, markers[0].generation, store.nodes.cluster_map, store.nodes.addresses, store.nodes.repairs)


def keep_identity(data: DataDir, identity: Identity) -> None:
    """Note in the folder which cluster it is of."""
    if data.read(CLUSTER) != (packed := _packed(identity)):
        data.write(CLUSTER, [packed])


def keep_map(data: DataDir, nodes: StoreNodes, cluster_map: ClusterMap, check: Callable[[], None]) -> None:
    """Keep a newer map in the folder of a shard that has joined, and what else it has learnt of the nodes.

    Raises:
        OSError, FencedError: the older one is kept.
    """
    kept = data.read(CLUSTER)
    known = Identity(_unpack(kept, "cluster_id"), _unpack(kept, "generation"), cluster_map, nodes.addresses, nodes.repairs)
    data.write(CLUSTER, [_packed(known)], check=check)


def kept_place(root: Path, shard: int, in_file: Sequence[str]) -> str:
    """Return where a shard is, as its folder has kept the cluster's map, else by its position in the file; "" where neither says.

    Once shards have left, the file's order is not that of numbers: the place of another shard is none. Nothing is opened for that.
    """
    listed = next(iter(in_file[shard : shard + 1]), "")
    try:
        kept = _unpack((folder_of(root, shard) / CLUSTER).read_bytes(), "map", b"")
        if not kept:
            return listed
        cluster_map = decode_map(kept)
        taken = {cluster_map.place_of(other, in_file) for other in cluster_map.shard_numbers}
        return cluster_map.place_of(shard, in_file) or ("" if listed in taken else listed)
    except (OSError, KvembError):  # the start will raise it
        return listed


def _packed(known: Identity) -> bytes:
    assert known.cluster_map is not None
    fields = {"cluster_id": known.cluster_id, "generation": known.generation, "map": known.cluster_map.encode()}
    packed: bytes = msgpack.packb(fields | {"nodes": known.nodes, "repairs": sorted(known.repairs.items())})
    return packed


def _identity(data: DataDir) -> Identity | None:
    """The cluster as this shard has seen it whole; None before that."""
    kept = data.read(CLUSTER)
    if kept is None or (cluster_map := _unpack(kept, "map", b"")) == b"":  # of an earlier release: the nodes' markers say which
        return None
    nodes, repairs = tuple(_unpack(kept, "nodes", ())), dict(_unpack(kept, "repairs", ()))
    return Identity(_unpack(kept, "cluster_id"), _unpack(kept, "generation"), decode_map(cluster_map), nodes, repairs)


def _may_provision(error: KvembError, data: DataDir) -> bool:
    """A folder that belongs to a cluster never provisions again; a broken-off provisioning is completed."""
    return data.read(CLUSTER) is None and (isinstance(error, NotProvisionedError) or data.read(INTENT) is not None)


def _provision(store: Store, data: DataDir, n_shards: int, timeout_s: float) -> None:
    if data.read(INTENT) is None:
        data.write(INTENT, [msgpack.packb({"cluster_id": os.urandom(16), "generation": os.urandom(8)})])
    intent = data.read(INTENT)
    cluster_id, generation = _unpack(intent, "cluster_id"), _unpack(intent, "generation")
    store.provision(cluster_id, generation, Deadline.after(timeout_s), n_shards)
    log.info("provisioned cluster %s on %s", cluster_id.hex(), ", ".join(store.nodes.addresses))


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
