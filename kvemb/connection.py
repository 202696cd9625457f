"""The parts that the tables of one connection share: storage, the shards, how often it has written, how long a pull may take.

Also the connection's figures, for prometheus-client's registries. The times of its pulls, by table, are counted from the moment they are
first asked for.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import Unique
from kvemb.coordination.registry_format import META_NAME, Registered, newest_registry
from kvemb.datapath.multi_table_read import Missing
from kvemb.datapath.prefetched_rows import PrefetchedRows
from kvemb.datapath.pull import Pulled, PullRequest, pull
from kvemb.errors import ClosedError, ReadOnlyError
from kvemb.net.deadline import Deadline
from kvemb.process import ForkLock
from kvemb.process.metrics import SECONDS, BucketCounts, MetricFamilies
from kvemb.protocol.message_format import TableRows
from kvemb.schema.table_def import TableDef
from kvemb.stores.store import Store

if TYPE_CHECKING:  # gRPC is imported when a cluster with parameter servers is opened
    from prometheus_client.metrics_core import Metric

    from kvemb.client.ack import Ack
    from kvemb.client.shard_client import ShardClient


class WriteCounter:
    """Counts the changes of rows that one connection has begun and ended: do rows pulled earlier change by its own doing?

    Thread-safe. In a fork's child, which can change nothing, the number stands still and nothing is waited for. No lock is taken there
    that another thread may have held.

    Strategy: each change counts twice, when it begins and when it is over. So two equal numbers mean that no change began or ended in
    between. One may have been under way all the time: its rows change after the second number, and a third one tells. Pushes are over when
    they are released, which is looked up when the number is asked for. Some are released before storage has them; `wait_stored` waits
    for those, and pulls call it first.
    """

    def __init__(self) -> None:
        self._lock, self._process = threading.Lock(), os.getpid()
        self._n = 0
        self._pushes: list[Ack] = []  # as many as may be on their way
        self._unstored: list[Ack] = []  # released, and on their way to storage when that was looked up last
        self.may_wait = False  # for `wait_stored`: pushes were on their way when that was looked up last

    @contextmanager
    def change(self) -> Iterator[None]:
        """Count a change that is over at the end, also if it fails."""
        self.count()
        try:
            yield
        finally:
            self.count()

    def count(self) -> None:
        """Count that a push is about to be sent, or was not sent in spite of that; `pushed` counts the end of one that was."""
        if os.getpid() == self._process:
            with self._lock:
                self._n += 1

    def pushed(self, ack: Ack) -> None:
        """Count the end of the push when its ack says so."""
        with self._lock:
            self.may_wait = True
            self._pushes.append(ack)
            self._settle()

    def now(self) -> int:
        """Return the number; it only rises."""
        if os.getpid() != self._process:
            return self._n
        with self._lock:
            self._settle()
            return self._n

    def all_stored(self) -> bool:
        """Whether storage has everything that was released: then rows that are pulled from now on have all that the number counts."""
        return not self._still_unstored()

    def wait_stored(self, deadline: Deadline) -> None:
        """Wait until storage has everything that was released before the call, or it has failed."""
        for ack in self._still_unstored():
            ack.wait_settled(deadline.remaining_s())

    def forget_pushes(self) -> None:
        """Wait for no push any more: the connection is closed, and its pushes are no longer reported."""
        if os.getpid() == self._process:
            with self._lock:
                self._pushes, self._unstored, self.may_wait = [], [], False

    def _still_unstored(self) -> list[Ack]:
        if os.getpid() != self._process:
            return []
        with self._lock:
            self._settle()
            self._unstored = [ack for ack in self._unstored if not ack.settled]
            self.may_wait = bool(self._pushes or self._unstored)
            return list(self._unstored)

    def _settle(self) -> None:
        if self._pushes:
            looked_at = [(ack, ack.released) for ack in self._pushes]  # once each: it may change meanwhile
            released = [ack for ack, is_released in looked_at if is_released]
            self._n += len(released)
            self._pushes = [ack for ack, is_released in looked_at if not is_released]
            self._unstored = [ack for ack in (*self._unstored, *released) if not ack.settled]


class PullTimes:
    """Times of pulls. A pull of several tables counts whole for each of them. Thread-safe."""

    def __init__(self) -> None:
        self.counted = False
        self._lock, self._tables = ForkLock(), dict[str, BucketCounts]()

    def count(self) -> None:
        """Count from now on."""
        self.counted = True

    def add(self, requests: Sequence[PullRequest], took_s: float) -> None:
        """Count a pull that took so long; one that fails is not counted."""
        with self._lock:
            for request in requests:
                self._tables.setdefault(request.definition.name, BucketCounts(SECONDS)).add(took_s)

    def tables(self) -> list[tuple[str, BucketCounts]]:
        """Return the counts of each table, by name."""
        with self._lock:
            return sorted(self._tables.items())


class Closable(Protocol):
    """Something that is closed with the connection that opened it."""

    def close(self) -> None:
        """End it. Idempotent."""
        ...


@dataclass(eq=False)
class Connection:
    """The parts that the tables of one connection share.

    The store, the client of the shards (None = read-only), how long a read waits for nodes in all and for one that is silent, the cluster's
    name, the counter of writes, how long pulls took, whether it was closed, and what is closed with it.
    """

    store: Store
    shards: ShardClient | None
    wait_s: float
    silent_s: float = math.inf
    cluster: str = ""
    changes: WriteCounter = field(default_factory=WriteCounter)
    pull_times: PullTimes = field(default_factory=PullTimes)
    closed: bool = False
    closes_with: WeakSet[Closable] = field(default_factory=WeakSet)

    def storage_deadline(self) -> Deadline:
        """Return the deadline of a read that begins now, whose caller gave none."""
        return Deadline.after(self.wait_s, self.silent_s)

    def require_open(self) -> None:
        """Refuse to go on after the connection was closed."""
        if self.closed:
            raise ClosedError(f"this connection to cluster {self.cluster!r} was closed; kvemb.connect(source) opens another one")

    def require_shards(self, verb: str) -> ShardClient:
        """Return the client of the shards, or raise ReadOnlyError, or ClosedError."""
        self.require_open()
        if self.shards is None:
            raise ReadOnlyError(
                f"{verb} goes through the parameter servers, and this cluster was opened with read_only=True. "
                "Open it with kvemb.connect(source)."
            )
        return self.shards

    def push(self, rows: Sequence[TableRows], timeout_s: float | None, prefetched: Sequence[PrefetchedRows] = ()) -> Ack:
        """Send a push, and count it."""
        shards = self.require_shards("push")
        if shards.missing.untold:
            shards.missing.tell()
        self.changes.count()
        try:
            ack = shards.push(rows, timeout_s, prefetched)
        except BaseException:
            self.changes.count()
            raise
        self.changes.pushed(ack)
        return ack

    def pull(self, requests: Sequence[PullRequest], timeout_s: float | None, *, versions: bool, stored: bool = True) -> list[Pulled]:
        """Pull once storage has every push of this connection that was released; without `stored`, pull at once.

        Unless the caller has given a timeout, that wait may be as long as a step may take: a step was released before it was stored.
        """
        started_s = time.perf_counter()
        if self.closed:
            self.require_open()
        if stored and self.changes.may_wait and timeout_s is None:
            self.wait_stored()
        deadline = Deadline.after(self.wait_s, self.silent_s) if timeout_s is None else Deadline.of_caller(timeout_s, self.silent_s)
        if stored and self.changes.may_wait and timeout_s is not None:
            self.changes.wait_stored(deadline)
        if self.shards is not None and self.shards.missing.untold:
            self.shards.missing.tell()
        missing: Missing | None = None if self.shards is None else []
        pulled = pull(self.store, requests, deadline, versions=versions, renewed=timeout_s is None, missing=missing)
        if missing and self.shards is not None:
            self.shards.missing.note(missing)
        if self.pull_times.counted:
            self.pull_times.add(requests, time.perf_counter() - started_s)
        return pulled

    def pull_known(
        self, wanted: Sequence[tuple[TableDef, NDArray[np.uint64]]], timeout_s: float | None = None
    ) -> list[tuple[NDArray[Any], NDArray[np.uint64]]]:
        """Pull rows by ids that come from the cluster itself, or were checked before: none is padding, and -1 is an id like any other.

        Args:
            wanted: of each table its definition, and the 64 bits of n ids, uint64 [n], each once.

        Returns:
            Of each table its rows, [n, dim] as `Table.pull` gives them, and their versions, uint64 [n], 0 where a row does not exist.
        """
        requests = [PullRequest(definition, Unique(ids, None), ids.shape, None) for definition, ids in wanted]
        return [(got.rows, got.versions) for got in self.pull(requests, timeout_s, versions=True)]

    def known_ids(self, table: str) -> Iterator[NDArray[np.uint64]]:
        """Yield the 64 bits of the ids of rows that exist, page by page from the shards: of all that was pushed here before."""
        shards = self.require_shards("export")
        self.wait_stored()
        yield from shards.questions.ids(table)

    def assign(self, prepared: TableRows, timeout_s: float | None) -> None:
        """Set rows that were checked; raises as `Table.assign`."""
        shards = self.require_shards("assign")
        with self.changes.change():
            shards.assign(prepared, timeout_s)

    def registered(self) -> Registered:
        """Return the registry's copy in storage, which is complete before shard 0 answers a creation."""
        values = self.store.values
        return newest_registry(values.get(META_NAME, self.storage_deadline()), values.copies_on(META_NAME))

    def wait_stored(self) -> None:
        """Wait until storage has every push released to this connection; raises as `WriteCounter.wait_stored`."""
        if self.shards is not None:
            self.changes.wait_stored(Deadline.after(self.shards.timeout_s))


@dataclass(frozen=True, eq=False)
class TrainerMetrics:
    """The collector of one connection; asks no server. Any thread. Make it with `of`."""

    cluster: str
    connection: Connection

    @staticmethod
    def of(cluster: str, connection: Connection) -> TrainerMetrics:
        """Return the collector of a connection, whose pulls are timed from now on."""
        connection.pull_times.count()
        return TrainerMetrics(cluster, connection)

    def collect(self) -> Iterable[Metric]:
        """Return every family as it is now."""
        shards = self.connection.shards
        families = MetricFamilies({"cluster": self.cluster, "trainer": "" if shards is None else shards.trainer})
        times = [({"table": name}, counts) for name, counts in self.connection.pull_times.tables()]
        families.histogram("kvemb_pull_seconds", "Time of a pull that the table had a part in.", times)
        if shards is not None:
            families.gauge("kvemb_trainer_undelivered_pushes", "Pushes that not every shard has accepted.", shards.n_undelivered)
        return families
