"""What `recovery` does to a cluster and how it takes the time: kill and replay, an empty node and its repair; rows must be as they were."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.apply_load import TIMEOUT_S, Load, WrongApplyError, shard_status
from kvemb.errors import KvembError
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import StatusReply
from kvemb.schema.keys import RowKeys
from kvemb.stores.row_io import ReadPart, WritePart
from kvemb.stores.store import Store
from kvemb.stores.store_repair import StoreRepair

_BLOCK_ROWS = 100_000
_POLL_S = 0.01


@dataclass(frozen=True, eq=False)
class Target:
    """A cluster of one node and one shard.

    Args:
        cluster: running.
        load: every row of its only table.
        store: open, to look at the node and to put old records back.
    """

    cluster: LocalCluster
    load: Load
    store: Store


@dataclass(frozen=True)
class Restored:
    """Rows that were brought back.

    Args:
        n_rows: how many.
        seconds: in which that happened.
        waited_s: of a shard, from its start until it served; of a repair, from the node's return until the repair began.
    """

    n_rows: int
    seconds: float
    waited_s: float

    @property
    def rows_per_s(self) -> float:
        """Rows per second of the work itself."""
        return self.n_rows / self.seconds


class WrongRestoreError(AssertionError):
    """The rows brought back differ from those before."""


def kill_and_replay(target: Target, *, n_passes: int, lost: NDArray[np.uint8] | None = None) -> Restored:
    """Kill the shard, start it, and take the time of its replay.

    Args:
        target: everything that was pushed to it is flushed.
        n_passes: how often every row was pushed since the shard was started last.
        lost: records as they were before the last pass, to be put back first, as if no write of it had arrived.

    Raises:
        WrongRestoreError: something was not replayed, or rows, bits or versions are not as they were.
    """
    load = target.load
    expected = rows_of(load)
    target.cluster.shards[0].kill()
    if lost is not None:
        put_back(target, lost)
    start_s = time.perf_counter()
    target.cluster.start_shard(0)
    waited_s = time.perf_counter() - start_s
    status = _status(load)
    if status.recovered_rows != n_passes * load.n_rows:
        raise WrongRestoreError(f"{n_passes * load.n_rows} rows were in the journal; the shard says it replayed {status.recovered_rows}")
    require_same(rows_of(load), expected)
    return Restored(status.recovered_rows, status.recovery_s, waited_s)


def empty_and_repair(target: Target) -> Restored:
    """Kill the node, start it empty, and watch until the shard has brought every row back.

    Raises:
        WrongRestoreError: rows, bits or versions are not as they were.
    """
    expected, (server,) = rows_of(target.load), target.cluster.servers
    server.restart()
    seconds, waited_s = watch_repair(target.store.repair, Deadline.after(TIMEOUT_S))
    require_same(rows_of(target.load), expected)
    return Restored(target.load.n_rows, seconds, waited_s)


def watch_repair(
    repair: StoreRepair,
    deadline: Deadline,
    *,
    clock: Callable[[], float] = time.perf_counter,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[float, float]:
    """Look at the nodes' markers until none is lost any more; return the seconds of the repair, and those before it began.

    Raises:
        WrongRestoreError: no node was lost, or the repair does not end.
    """
    start_s = clock()
    idle_until_s = begun_s = None
    while not deadline.expired:
        now_s = clock()
        lost = repair.lost_nodes(deadline)  # a node that does not answer is not among them
        if any(node.why == "repairing" for node in lost):
            begun_s = begun_s or now_s
        elif lost:
            idle_until_s = now_s
        elif begun_s or idle_until_s:
            begun_s = begun_s or idle_until_s or start_s
            return clock() - begun_s, begun_s - start_s
        pause(_POLL_S)
    raise WrongRestoreError(f"within {deadline.timeout_s:g} s the node was not repaired, or nobody missed anything on it")


def until_snapshot(load: Load, max_bytes: int) -> StatusReply:
    """Wait until a local snapshot has let the journal's old part go.

    Args:
        load: pushed so often that the journal would be larger without one.
        max_bytes: at which it is taken.

    Raises:
        WrongRestoreError: none was taken.
    """
    deadline = Deadline.after(TIMEOUT_S)
    while not deadline.expired:
        status = _status(load)
        if status.journal_bytes <= max_bytes:
            return status
        time.sleep(_POLL_S)
    raise WrongRestoreError(f"no local snapshot was taken, although the journal holds more than {max_bytes} bytes")


def rows_of(load: Load) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
    """Pull every row with its version; every one must exist.

    Raises:
        WrongApplyError: one does not.
    """
    ids = np.concatenate(load.batches)
    pulled = load.table.pull(ids, return_versions=True, timeout_s=TIMEOUT_S)
    if (pulled[1] == 0).any():
        raise WrongApplyError(f"{int((pulled[1] == 0).sum())} of {len(ids)} rows do not exist")
    return pulled


def require_same(got: tuple[NDArray[np.float32], NDArray[np.uint64]], expected: tuple[NDArray[np.float32], NDArray[np.uint64]]) -> None:
    """Refuse rows that differ from the former ones in any bit or version.

    Raises:
        WrongRestoreError: with how many differ.
    """
    differ = (got[0].view(np.uint32) != expected[0].view(np.uint32)).any(axis=1) | (got[1] != expected[1])
    if differ.any():
        raise WrongRestoreError(f"{int(differ.sum())} of {len(differ)} rows are not what they were before")


def records(target: Target) -> NDArray[np.uint8]:
    """Read every record, state too: uint8 [n, record bytes], in the order of the load.

    Raises:
        WrongApplyError: one does not exist.
    """
    size = target.load.table.definition.record.size_bytes
    read = [target.store.rows.read([ReadPart(keys, size, size)], Deadline.after(TIMEOUT_S))[0].in_key_order() for keys in _keys(target)]
    n_missing = sum(int((~one.found).sum()) for one in read)
    if n_missing:
        raise WrongApplyError(f"{n_missing} of {target.load.n_rows} rows do not exist")
    return np.concatenate([one.records for one in read])


def put_back(target: Target, old: NDArray[np.uint8]) -> None:
    """Write records that were read before, over any value there now.

    Raises:
        WrongRestoreError: some were not written.
    """
    store, size = target.store, old.shape[1]
    for number, keys in enumerate(_keys(target)):
        block = old[number * _BLOCK_ROWS :][: len(keys)]
        tokens = None
        if store.capabilities.cas:
            tokens = store.rows.read([ReadPart(keys, size, size, tokens=True)], Deadline.after(TIMEOUT_S))[0].in_key_order().tokens
        stored = store.rows.write([WritePart(keys, block, tokens)], Deadline.after(TIMEOUT_S))[0].stored
        if not stored.all():
            raise WrongRestoreError(f"{int((~stored).sum())} old records could not be put back")


def _status(load: Load) -> StatusReply:
    """What the shard says, which may have been started a moment ago."""
    deadline = Deadline.after(TIMEOUT_S)
    while True:
        try:
            return shard_status(load.table.cluster)
        except KvembError:
            if deadline.expired:
                raise
        time.sleep(_POLL_S)


def _keys(target: Target) -> list[RowKeys]:
    ids = np.concatenate(target.load.batches)
    definition, pages = target.load.table.definition, target.store.capabilities.pages
    return [definition.keys(ids[at : at + _BLOCK_ROWS], pages=pages) for at in range(0, len(ids), _BLOCK_ROWS)]
