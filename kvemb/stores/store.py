"""The storage port: the duties of every kind of storage. A store has four facets.

    rows      read, write, erase: batches of records (below)
    values    small values that every node holds a copy of (below)
    repair    a node that has lost its rows, and gets them back (`kvemb.stores.store_repair`)
    nodes     which nodes there are, the cluster map, moves of slots, servers' own statistics (`kvemb.stores.store_nodes`)

A batch is a list of parts, each of one table, or of several whose records have one size (`kvemb.schema.keys.coalesce_keys`). All parts of a
batch travel in one round trip per node. Rows come back grouped by node, because that is how they arrive. `order` says which row is which,
so that the caller's own gather puts them right without a copy here. A missing row and a write conflict are results. Exceptions are in
`kvemb.errors`. The contract that every store passes is shipped in `kvemb.testing.store_contract`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.coordination.markers import Identity, Marker
from kvemb.coordination.replicated_values import Change
from kvemb.coordination.shard_owners import newest_owner, owner_name
from kvemb.errors import StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.bucket_limits import BucketLimits
from kvemb.schema.keys import RowKeys
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import HeldRows, ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.store_nodes import StoreNodes
from kvemb.stores.store_repair import StoreRepair


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a kind of storage; honest flags, which callers ask instead of the kind's name.

    Args:
        cas: writes are compare-and-swap; reads for writing return tokens.
        pages: takes `kvemb.schema.pages.PagedKeys` and `kvemb.schema.buckets.BucketKeys`: rows of tables with num_ids lie in pages there,
            those of others in buckets; otherwise under keys of their own.
    """

    cas: bool
    pages: bool = False


class OtherNodes(Protocol):
    """Rows of moving slots at their other node (`kvemb.stores.standalone.node_rows`, which may not be imported here).

    Attributes:
        written: whether rows are written there, too; otherwise they are only erased there.
        flipped: whether that is where the slots were; otherwise they go there.
        slots: bool [16384], those that have another node, one that stays in the cluster.
    """

    written: bool
    flipped: bool
    slots: NDArray[np.bool_]

    def has(self, keys: RowKeys) -> NDArray[np.bool_]:
        """Return which keys have another node, one that stays in the cluster: bool [n]. The calls below take such keys alone."""

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        """See `StoreRows.read`."""

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        """See `StoreRows.write`."""

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        """See `StoreRows.erase`."""

    def trouble(self, longer_than_s: float) -> str:
        """Why none of these calls has succeeded for so long; "" where one has."""


class StoreRows(ABC):
    """Rows of a store: a part of `Store`, as `rows`."""

    @abstractmethod
    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        """Read rows; the marker of every node that answered was checked last on each connection.

        Raises:
            StorageError: see `kvemb.errors`; no part of the batch is returned.
        """

    @abstractmethod
    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        """Write records; returns when every node has answered for every row.

        Raises:
            NodeFullError: a node has no room; rows of the batch may or may not have been written (memcached may have deleted them).
            StorageError: any row of the batch may or may not have been written, some possibly later.
        """

    @abstractmethod
    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        """Delete rows; missing ones are fine. The parts' records are ignored.

        With tokens (stores with CAS) only those rows are deleted that have not changed since they were read. So a late erase cannot delete
        a newer row. A token of 0 says that the row was missing. Without tokens rows are deleted whatever they are.

        Returns:
            Of each part bool [n], in key order: whether the row is gone; False is a conflict, as of a write.
        """

    @property
    def moving(self) -> OtherNodes | None:
        """Rows of slots under way, at the nodes that they go to or come from; None while none do. Read it again for every batch."""
        return None

    @abstractmethod
    def node_of(self, keys: RowKeys) -> str:
        """The address of the node that holds the first of these keys, as far as is known without asking."""

    def whereabouts(self, keys: RowKeys) -> Callable[[int], str]:
        """Return a function that describes a row by its number, for messages: its node, its table and its id."""
        return lambda row: f"node {self.node_of(keys[row : row + 1])}, {keys.described(row)}"

    def held_on(self, address: str, tables: Sequence[TableDef], deadline: Deadline) -> list[HeldRows | None]:
        """Count the rows of tables on a node; None for those that it cannot tell without looking at every row.

        Raises:
            KvembError: the node does not answer.
        """
        return [None] * len(tables)

    def bucket_limits(self, address: str, deadline: Deadline) -> BucketLimits | None:
        """Up to where a node keeps buckets as compact strings; None on storage that has no buckets.

        Raises:
            KvembError: the node does not answer, or does not tell.
        """
        return None

    def set_bucket_limits(self, address: str, limits: BucketLimits, deadline: Deadline) -> None:
        """Change a node's limits, and those of its replicas, until they are started again; raises as `bucket_limits`."""
        raise NotImplementedError("storage without buckets has no limits of them")


class StoreValues(ABC):
    """Small values that every node holds a copy of, by name: a part of `Store`, as `values`."""

    @abstractmethod
    def get(self, name: str, deadline: Deadline) -> list[bytes | None]:
        """Read a value; one entry per node (one in all on a cluster that moves its own slots)."""

    @abstractmethod
    def put(self, name: str, value: bytes, deadline: Deadline) -> None:
        """Write a value to every node."""

    @abstractmethod
    def update(self, name: str, change: Change, deadline: Deadline) -> None:
        """Change each copy of a value, on the condition that it is still what `change` was given; raises what `change` raises."""

    def get_where_possible(self, names: Sequence[str], deadline: Deadline) -> list[list[bytes | None]]:
        """The copies of several values on nodes that answer: for values of which the newest copy counts."""

        def copies(name: str) -> list[bytes | None]:
            try:
                return self.get(name, deadline)
            except StorageError:
                return []

        return [copies(name) for name in names]

    def put_where_possible(self, name: str, value: bytes, deadline: Deadline) -> None:
        """Write a value to the nodes that take it; raises StorageError where none does."""
        self.put(name, value, deadline)

    @abstractmethod
    def copies_on(self, name: str) -> tuple[str, ...]:
        """Where each of the copies lies that `get` returns, for messages."""

    @abstractmethod
    def mend(self, name: str, copies: Sequence[bytes | None], damaged: Sequence[bool], value: bytes, deadline: Deadline) -> None:
        """Put a value in the place of copies that were found damaged, where they still stand.

        Args:
            name: of the value.
            copies: as `get` returned them.
            damaged: of each whether it is to be replaced.
            value: the good one.
            deadline: of the call.
        """

    def owner_epoch(self, shard: int, deadline: Deadline) -> int:
        """The highest epoch that any node says owns the shard; 0 when it never had an owner."""
        name = owner_name(shard)
        owner = newest_owner(self.get(name, deadline), shard, self.copies_on(name))
        return 0 if owner is None else owner.epoch


class Store(ABC):
    """A cluster of storage nodes. Thread-safe; after a fork the child opens connections of its own.

    Every call takes a `Deadline` that bounds it over all nodes. After any error the connections that took part are dropped, so that no
    later call can read an older call's reply.

    Attributes:
        rows, values, repair, nodes: the four facets.
    """

    rows: StoreRows
    values: StoreValues
    repair: StoreRepair
    nodes: StoreNodes

    @abstractmethod
    def __init__(self, config: StorageConfig, role: str) -> None:
        """Take the storage section and this process's role ("trainer" or "shard:<n>"); connects at `open`."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The capabilities of this storage."""

    @abstractmethod
    def open(self, deadline: Deadline, known: Identity | None = None) -> list[Marker]:
        """Connect to every node, refuse unsafe settings, check and pin the markers; from then on every batch checks them.

        Args:
            deadline: of the call.
            known: a shard that can repair says which cluster it belongs to. Nodes that have lost their rows, even all of them, are no error
                then, but listed by `lost_nodes`. Batches that touch them fail until they are repaired.

        Raises:
            NotProvisionedError: no node has a marker.
            ConfigError: no address is known for a node of the cluster map.
            NodeLostError, WrongNodeError, NodeSuspectError, UnsafeNodeError, NodeUnavailableError, DeadlineExceededError.
        """

    @abstractmethod
    def provision(self, cluster_id: bytes, generation: bytes, deadline: Deadline, n_shards: int = 1) -> None:
        """Write the first cluster map and markers on nodes that are all empty; the same arguments again complete a broken-off run.

        Raises:
            WrongNodeError: a node is not empty or carries another marker; nothing is written then.
        """

    @abstractmethod
    def fence(self, shard: int, epoch: int, deadline: Deadline, *, still_ours: Callable[[], None] | None = None) -> None:
        """Write from now on only while no newer owner of the shard stands on the nodes: every new connection reads the owner record first.

        Connections made before are the newer owner's to end (`kill_other_writers`).

        Args:
            shard: the one whose rows this store writes.
            epoch: ours; the owner record that says so has been put already.
            deadline: of the call.
            still_ours: raises FencedError once another process owns the shard, by what it knows apart from the nodes. It is asked where a
                node's copy of the owner record is not as it should be, before that copy is mended. Without it none is.

        Raises:
            FencedError: a higher epoch stands on a node, now, or later when a connection is made.
        """

    def kill_other_writers(self, deadline: Deadline) -> int:
        """End the connections of every other process that writes as this store's role; put the owner record first.

        When it returns, none remains, and nothing that was sent on one can land any more. Nodes with compare-and-swap need none of this:
        every write there carries a condition, which a newer write has made false.

        Returns:
            How many were ended.
        """
        return 0

    @abstractmethod
    def close(self) -> None:
        """Drop every connection; later calls raise ClosedError. Idempotent."""

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
