"""The parts that the tables of one connection share: storage, the shards, how often it has written, how long a pull may take.

Also the connection's figures, for prometheus-client's registries. The times of its pulls, by table, are counted from the moment they are
first asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvemb.api.write_counter import WriteCounter
from kvemb.datapath.multi_table_read import Missing
from kvemb.datapath.prefetched_rows import PrefetchedRows
from kvemb.datapath.pull import Pulled, PullRequest, pull
from kvemb.errors import ClosedError, ReadOnlyError
from kvemb.net.deadline import Deadline
from kvemb.process import ForkLock
from kvemb.process.metrics import SECONDS, BucketCounts, MetricFamilies
from kvemb.protocol.message_format import TableRows
from kvemb.stores.store import Store

if TYPE_CHECKING:  # gRPC is imported when a cluster with parameter servers is opened
    from prometheus_client.metrics_core import Metric

    from kvemb.client.ack import Ack
    from kvemb.client.shard_client import ShardClient


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


@dataclass(eq=False)
class SharedConnection:
    """The parts that the tables of one connection share.

    The store, the client of the shards (None = read-only), how long a read waits for nodes in all and for one that is silent, the cluster's
    name, the counter of writes, how long pulls took, and whether it was closed.
    """

    store: Store
    shards: ShardClient | None
    wait_s: float
    silent_s: float = math.inf
    cluster: str = ""
    changes: WriteCounter = field(default_factory=WriteCounter)
    pull_times: PullTimes = field(default_factory=PullTimes)
    closed: bool = False

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

    def wait_stored(self) -> None:
        """Wait until storage has every push released to this connection; raises as `WriteCounter.wait_stored`."""
        if self.shards is not None:
            self.changes.wait_stored(Deadline.after(self.shards.timeout_s))


@dataclass(frozen=True, eq=False)
class TrainerMetrics:
    """The collector of one connection; asks no server. Any thread. Make it with `of`."""

    cluster: str
    shared: SharedConnection

    @staticmethod
    def of(cluster: str, shared: SharedConnection) -> TrainerMetrics:
        """Return the collector of a connection, whose pulls are timed from now on."""
        shared.pull_times.count()
        return TrainerMetrics(cluster, shared)

    def collect(self) -> Iterable[Metric]:
        """Return every family as it is now."""
        shards = self.shared.shards
        families = MetricFamilies({"cluster": self.cluster, "trainer": "" if shards is None else shards.trainer})
        times = [({"table": name}, counts) for name, counts in self.shared.pull_times.tables()]
        families.histogram("kvemb_pull_seconds", "Time of a pull that the table had a part in.", times)
        if shards is not None:
            families.gauge("kvemb_trainer_undelivered_pushes", "Pushes that not every shard has accepted.", shards.n_undelivered)
        return families
