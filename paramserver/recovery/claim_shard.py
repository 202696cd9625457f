"""Start-up, second half: are we the shard's one owner, and in which state did the last owner leave it?

An epoch names the shard's owner, and each start raises it: first in the data folder (file `epoch`, which a zombie reads before it
acknowledges a push), then on every node, where stores read it before they write. The saved state (file `state`) is as of a position of the
journal, which holds the rest; it is replaced as a whole.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvemb.coordination.replicated_values import DamagedCopyError
from kvemb.coordination.shard_notes import ShardNote, newest_note, note_name, whose
from kvemb.coordination.shard_owners import Owner, newest_owner, owner_name, require_not_fenced
from kvemb.errors import FencedError, LostRowError, ParameterServerError
from kvemb.net.deadline import Deadline
from kvemb.schema.record import MAX_EPOCH, make_version
from kvemb.stores.store import Store

from ..row_log.state_file import STATE, ShardState, encode_state, read_state
from ..shard_process.data_dir import DataDir, for_writes, sweep

CLUSTER_NAME = "cluster-name"  # the file that keeps the name by which trainers know the cluster
EPOCH = "epoch"
log = logging.getLogger("paramserver")


def claim_shard(
    store: Store,
    data: DataDir,
    shard: int,
    cluster_id: bytes,
    timeout_s: float,
    *,
    check: Callable[[ShardState], None] = lambda state: None,
    left: Callable[[], Sequence[tuple[str, int, int]]] = tuple,
    again: Callable[[Callable[[], Any]], Any] = lambda step: step(),
) -> ShardState:
    """Become the shard's owner: return the last owner's state, under our own new epoch, which folder and nodes hold by then.

    A number that the cluster map does not have owns no slot, and so no history that an empty folder would lack: it has never joined, or has
    left. Of the latter epochs, batches and sessions go on.

    Older processes of the shard are fenced when this returns. The start may still be given up: the next one finds the same state.

    Raises:
        LostRowError: the last owner left no state in the folder.
    """
    kept, n_shards = read_epoch(data), store.nodes.cluster_map.n_shards
    stored = again(lambda: _owner(store, shard, timeout_s, kept))
    if kept > stored and again(lambda: store.repair.lost_nodes(Deadline.after(timeout_s))):
        stored = kept  # the nodes that knew are to be repaired
    note = again(lambda: newest_note(store.values.get(note_name(shard), Deadline.after(timeout_s))))
    found = _Traces(shard, cluster_id, stored, kept, note, ", ".join(store.nodes.addresses))
    state = _left_state(data, n_shards, found) if kept or shard in store.nodes.cluster_map.shard_numbers or data.read(STATE) else None
    if state is None:
        state = ShardState(cluster_id, shard, n_shards, sessions=tuple(left() if shard < n_shards else ()))
        if note is not None:
            state = replace(state, k=note.k, cut=make_version(note.epoch, note.k))
            log.info("an owner of this number before this one was %s", whose(cluster_id, shard, note, time.time()))
    again(partial(check, state))
    epoch = max(stored, kept) + 1
    if epoch > MAX_EPOCH:
        raise ParameterServerError(f"shard {shard}: epoch {epoch} does not fit its 16 bits; this cluster has been restarted too often")
    if data.read(STATE) is None:  # the shard has had no owner yet
        data.write(STATE, [encode_state(state)])
    data.write(EPOCH, [b"%d\n" % epoch])
    sweep(data.path)  # after the epoch: files that an older process was about to rename are gone now
    state = read_state(data) or state  # that process may have replaced it since; from here on none can
    again(lambda: _take(store, shard, Owner(epoch, n_shards), partial(require_owner, data, epoch), timeout_s))
    return replace(state, epoch=epoch)


def _take(store: Store, shard: int, owner: Owner, still_ours: Callable[[], None], timeout_s: float) -> None:
    """Write the shard's new owner to the nodes; may be done again."""
    still_ours()  # otherwise a later owner's record could be overwritten
    store.values.update(owner_name(shard), owner.put_back, Deadline.after(timeout_s))
    store.fence(shard, owner.epoch, Deadline.after(timeout_s), still_ours=for_writes(still_ours))
    store.kill_other_writers(Deadline.after(timeout_s))


class Claim:
    """This process's hold on the shard, and the epoch that it has it in. Thread-safe."""

    def __init__(self, data: DataDir, store: Store, shard: int, epoch: int, timeout_s: float) -> None:
        self._data, self._store, self._shard, self._timeout_s = data, store, shard, timeout_s
        self._lock = threading.Lock()
        self._said = self._told = self.epoch = epoch  # the epochs that some node may have, that all nodes have, and that counts

    def require(self) -> None:
        """Raise FencedError once another process owns the shard."""
        with self._lock:
            require_owner(self._data, self.epoch)

    def rise_above(self, other: int, risen: Callable[[int], None]) -> None:
        """Go on in an epoch above another shard's, which is to hand slots over; folder and nodes have it when this returns."""
        deadline, name = Deadline.after(self._timeout_s), owner_name(self._shard)
        # Another process of this number may have a folder of its own, while it has no slots: the nodes know.
        require_not_fenced(self._store.values.get(name, deadline), self._shard, self._said)
        with self._lock:
            require_owner(self._data, self.epoch)
            if other >= self.epoch:
                if other + 1 > MAX_EPOCH:
                    raise ParameterServerError(f"shard {self._shard}: epoch {other + 1} does not fit its 16 bits")
                self._data.write(EPOCH, [b"%d\n" % (other + 1)])
                self.epoch = other + 1
                risen(self.epoch)
        if self._told != self.epoch:
            # First the epoch that is compared with the nodes' record, then that record: in between a lower record is no reason to stop.
            self._store.fence(self._shard, self.epoch, deadline, still_ours=for_writes(self.require))
            self._said = self.epoch
            self._store.values.update(name, Owner(self.epoch, self._store.nodes.cluster_map.n_shards).put_back, deadline)
            self._store.fence(self._shard, self.epoch, deadline, still_ours=for_writes(self.require))
            self._told = self.epoch


def read_epoch(data: DataDir) -> int:
    """Return the shard's epoch by its data folder; 0 before the first start."""
    try:
        raw = (data.path / EPOCH).read_bytes()
    except FileNotFoundError:
        return 0
    try:
        return int(raw)
    except ValueError as error:
        raise ParameterServerError(f"{data.path / EPOCH}: expected a number, got {raw[:40]!r}; put the file back from a backup") from error


def require_owner(data: DataDir, epoch: int) -> None:
    """Refuse to go on once a newer process has claimed the shard."""
    found = read_epoch(data)
    if not found:  # a process that takes a shard over writes its own
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(data.path / EPOCH))
    if found != epoch:
        raise FencedError(f"{data.path}: a process with epoch {found} has taken the shard over from this one (epoch {epoch})")


def _owner(store: Store, shard: int, timeout_s: float, kept: int) -> int:
    """The highest owner epoch of a shard on any node; 0 when it never had an owner.

    Where every node's copy is damaged it is `kept`, the epoch in the shard's data folder.
    """
    name = owner_name(shard)
    try:
        owner = newest_owner(store.values.get(name, Deadline.after(timeout_s)), shard, store.values.copies_on(name))
    except DamagedCopyError as error:
        if kept == 0:
            raise
        log.error("%s", error)
        return kept
    return 0 if owner is None else owner.epoch


@dataclass(frozen=True)
class _Traces:
    """The traces of a shard in folder and nodes: its owner's epoch by each, and the shard's own note."""

    shard: int
    cluster_id: bytes
    stored: int
    kept: int
    note: ShardNote | None
    nodes: str

    def refusal(self, fact: str) -> str:
        """Name the nodes' cluster before any advice: it may be another one than the operator means."""
        last = f", which was {self.note.place} at last" if self.note is not None and self.note.place else ""
        return (
            f"{fact}. The nodes ({self.nodes}) hold the rows of {whose(self.cluster_id, self.shard, self.note, time.time())}. Nothing "
            "was changed. If this is to be another cluster, correct storage.nodes in kvemb.yaml. If it is that one, its shard "
            f"{self.shard} goes on from its own data folder alone{last}: correct parameter_servers.data_dir, or put that folder back "
            "(docs/guarantees.md says what can be done without it)."
        )

    def way_back(self, data: DataDir) -> str:
        """Say what helps where later owners may have been refused after their claim: they came with another copy of the folder, say."""
        if self.note is None or not self.note.epoch <= self.kept < self.stored:
            return ""
        return (
            f" The nodes were last told of a batch in epoch {self.note.epoch}. Where later starts were refused, with another copy of this "
            f"folder, and this is the one that served last, let it go on: write {self.stored} to {data.path / EPOCH}."
        )


def _left_state(data: DataDir, n_shards: int, found: _Traces) -> ShardState:
    """The last owner's state, checked against the epochs of nodes and folder."""
    state, shard, stored, kept = read_state(data), found.shard, found.stored, found.kept
    if state is None:
        if kept:
            raise LostRowError(
                found.refusal(f"shard {shard}: its last owner (epoch {max(stored, kept)}) ended without saving its index in {data.path}")
            )
        if stored:
            raise ParameterServerError(
                found.refusal(f"shard {shard}: it had an owner before (epoch {stored}), and {data.path} has never been its data folder")
            )
        return ShardState(found.cluster_id, shard, n_shards)
    if (state.cluster_id, state.shard) != (found.cluster_id, shard):
        raise ParameterServerError(
            found.refusal(
                f"{data.path / STATE}: of shard {state.shard} in cluster {state.cluster_id.hex()}, expected shard {shard} in cluster "
                f"{found.cluster_id.hex()}"
            )
        )
    if state.epoch > stored or stored > kept:
        raise ParameterServerError(
            found.refusal(
                f"{data.path / STATE}: saved in epoch {state.epoch}, but the nodes say that epoch {stored} owned the shard last (this "
                f"folder: {kept}): the folder is an older copy, or the nodes are of an earlier time"
            )
            + found.way_back(data)
        )
    return state
