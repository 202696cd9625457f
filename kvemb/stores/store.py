"""The storage port: what every kind of storage must do, in arrays of rows.

A batch is a list of parts, each of one table, or of several whose records have one size (`kvemb.schema.keys.coalesce_keys`). All parts of a
batch travel in one round trip per node. Rows come back grouped by node, because that is how they arrive. `order` says which row is which,
so that the caller's own gather puts them right without a copy here. A missing row and a write conflict are results. What raises is in
`kvemb.errors`. The contract that every store passes is shipped in `kvemb.testing.store_contract`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.coordination.markers import Identity, Marker
from kvemb.coordination.shard_owners import newest_owner, owner_name
from kvemb.errors import KvembError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.bucket_limits import BucketLimits
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import RowKeys
from kvemb.schema.table_def import TableDef
from kvemb.stores.repairable import Repairable
from kvemb.stores.row_io import HeldRows, ReadPart, ReadResult, WritePart, WriteResult


@dataclass(frozen=True)
class Capabilities:
    """What a kind of storage can do; honest flags, asked by callers instead of the kind's name.

    Args:
        cas: writes are compare-and-swap; reads for writing return tokens.
        max_record_bytes: the largest record a node accepts, or None when the store knows no limit.
        pages: takes `kvemb.schema.pages.PagedKeys` and `kvemb.schema.buckets.BucketKeys`: rows of tables with num_ids lie in pages there,
            those of others in buckets; otherwise under keys of their own.
    """

    cas: bool
    max_record_bytes: int | None
    pages: bool = False


@dataclass(frozen=True)
class NodeStats:
    """One node as operators see it. Sizes in bytes; limit_bytes 0 = no limit set; `error` says why a node did not answer.

    `evicted` counts the keys that the server has thrown away by itself; `moved` those of them that went with slab pages (memcached);
    `traffic_bytes` what it has received and sent since it started; `unsafe` says which of its settings may throw rows away, "" for none
    that is not allowed; `answer_s` is how long it took to say all this.
    """

    address: str
    server: str
    n_keys: int
    used_bytes: int
    limit_bytes: int
    evicted: int
    role: str = "primary"
    error: str = ""
    moved: int = 0
    traffic_bytes: int = 0
    unsafe: str = ""
    answer_s: float = 0.0


@dataclass(frozen=True)
class UnfinishedChange:
    """A change of the nodes of a cluster that places its slots itself, begun by a command and not ended.

    Args:
        kind: "add", "remove", "replace" or "rebalance".
        n_left: slots that still have to move.
        aborting: whether it is being taken back.
    """

    kind: str
    n_left: int
    aborting: bool

    def __str__(self) -> str:
        what = "is being taken back" if self.aborting else "has not ended"
        return (
            f"a change of nodes ({self.kind}) {what}: {self.n_left:,} slots to go. Unless a command is at it now, `kvemb moves resume` "
            "goes on with it, `kvemb moves abort` gives every slot back; until then slots may stand open, and nodes have unequal shares"
        )


class OtherNodes(Protocol):
    """Rows of moving slots at their other node."""

    def has(self, keys: RowKeys) -> NDArray[np.bool_]:
        """Return which keys have another node, one that stays in the cluster: bool [n]. The calls below take such keys alone."""

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        """See `Store.read`."""

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        """See `Store.write`."""

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        """See `Store.erase`."""

    def trouble(self, longer_than_s: float) -> str:
        """Why none of these calls has succeeded for so long; "" where one has."""


class Store(Repairable, ABC):
    """A cluster of storage nodes. Thread-safe; after a fork the child opens connections of its own.

    It has more methods than a class should: they are the whole of what a kind of storage can do. A store is one of one kind. A store hands
    on to parts (docs/adr/0041).

    Every method takes a `Deadline` that bounds the whole call over all nodes. After any error the connections that took part are dropped,
    so that no later call can read an older call's reply.
    """

    @abstractmethod
    def __init__(self, config: StorageConfig, role: str) -> None:
        """Take the storage section and who asks ("trainer" or "shard:<n>"); connects at `open`."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this storage can do."""

    @property
    @abstractmethod
    def addresses(self) -> tuple[str, ...]:
        """The nodes, in the order of their numbers in the cluster map."""

    @property
    @abstractmethod
    def cluster_map(self) -> ClusterMap:
        """The map that rows are routed by, of nodes and of shards; known once the store is open. Ask anew for every batch."""

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

    def follow(self, nodes_now: Callable[[], tuple[str, ...]]) -> None:
        """After an error that nodes at other addresses would explain, ask for the addresses; stores that find nodes by themselves need not.

        For a store that only reads: a write that is in doubt at a node's former address could not be told of any more.

        Args:
            nodes_now: returns the addresses that kvemb.yaml says now; ConfigError where it cannot say.
        """

    def find_nodes(self, deadline: Deadline) -> None:
        """Find all nodes of a cluster that is not opened, as far as those of kvemb.yaml tell: for `stats`. Raises nothing."""

    def unfinished_change(self, deadline: Deadline) -> UnfinishedChange | None:
        """The change of nodes that a command has begun and not ended, on a cluster that places its slots itself; None for none.

        Raises:
            StorageError: nobody says.
        """
        return None

    def refresh_map(self, deadline: Deadline) -> bool:
        """Read the cluster map again from the nodes that answer, and follow it from the next batch on; return whether it is another.

        A read that finds another map by itself does this, and is made again; after a write that did, the caller tries again.
        """
        return False

    def publish_map(self, cluster_map: ClusterMap, deadline: Deadline) -> list[str]:
        """Give every node this map unless it has a newer one; return why those that have not got it have not."""
        raise NotImplementedError(f"{type(self).__name__} has a map that does not change")

    def renew_markers(self, deadline: Deadline) -> list[str]:
        """Let every node's marker name the map in force; return why those that do not, do not. See docs/adr/0058 for when."""
        raise NotImplementedError(f"{type(self).__name__} has a map that does not change")

    @property
    def places(self) -> tuple[str, ...]:
        """The address of every node number of the cluster map, "" of those that are gone."""
        return self.addresses

    def require_empty(self, address: str, deadline: Deadline) -> None:
        """Raise unless a node that is not one of the cluster's can be used, and holds nothing.

        Raises:
            WrongNodeError: it holds something.
            StorageError: it cannot be used.
        """
        raise NotImplementedError(f"{type(self).__name__} has nodes that do not change")

    def prepare_node(self, address: str, number: int, metas: Mapping[str, bytes], deadline: Deadline) -> None:
        """Make an empty node one of the cluster's that has no slots yet.

        Args:
            address: where it is.
            number: the one that its marker is to say.
            metas: small values of which it gets copies, by name.
            deadline: of the call.

        Raises:
            WrongNodeError: it is not empty, or of another cluster; nothing was changed.
            StorageError: it cannot be used.
        """
        raise NotImplementedError(f"{type(self).__name__} has nodes that do not change")

    @property
    def other(self) -> "OtherNodes | None":
        """The nodes that rows of slots under way go to, or come from; None while none do. Ask anew for every batch."""
        return None

    @property
    def second(self) -> "OtherNodes | None":
        """The same while rows are written to both. Ask anew for every batch."""
        return self.other if self.cluster_map.second_nodes is not None else None

    @abstractmethod
    def provision(self, cluster_id: bytes, generation: bytes, deadline: Deadline, n_shards: int = 1) -> None:
        """Write the first cluster map and markers on nodes that are all empty; the same arguments again complete a broken-off run.

        Raises:
            WrongNodeError: a node is not empty or carries another marker; nothing is written then.
        """

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

        With tokens (stores with CAS) only those rows are deleted that still are what was read then. So an erase in doubt that lands late
        cannot delete a newer row. A token of 0 says that the row was missing. Without tokens rows are deleted whatever they are.

        Returns:
            Of each part bool [n], in key order: whether the row is gone; False is a conflict, as of a write.
        """

    @abstractmethod
    def get_meta(self, name: str, deadline: Deadline) -> list[bytes | None]:
        """Read a small value that every node holds a copy of; one entry per node (one in all on a cluster that moves its own slots)."""

    def copies_on(self, name: str) -> tuple[str, ...]:
        """Who holds each of the copies that `get_meta` returns, for messages."""
        return tuple(f"node {address}" for address in self.addresses)

    @abstractmethod
    def mend_copies(self, name: str, copies: Sequence[bytes | None], damaged: Sequence[bool], value: bytes, deadline: Deadline) -> None:
        """Put a value in the place of copies that were found damaged, where they still stand.

        Args:
            name: of the value.
            copies: as `get_meta` returned them.
            damaged: of each whether it is to be replaced.
            value: the good one.
            deadline: of the call.
        """

    @abstractmethod
    def put_meta(self, name: str, value: bytes, deadline: Deadline) -> None:
        """Write that value to every node."""

    def metas_where_possible(self, names: Sequence[str], deadline: Deadline) -> list[list[bytes | None]]:
        """The copies of several values, with None for nodes that do not answer: for values of which the newest copy counts."""

        def copies(name: str) -> list[bytes | None]:
            try:
                return self.get_meta(name, deadline)
            except StorageError:
                return []

        return [copies(name) for name in names]

    def put_meta_where_possible(self, name: str, value: bytes, deadline: Deadline) -> None:
        """Write that value to the nodes that take it; raises StorageError where none does."""
        self.put_meta(name, value, deadline)

    @abstractmethod
    def fence(self, shard: int, epoch: int, deadline: Deadline, *, still_ours: Callable[[], None] | None = None) -> None:
        """Write from now on only while no newer owner of the shard stands on the nodes: every new connection reads the owner record first.

        Connections made before are the newer owner's to end (`kill_other_writers`).

        Args:
            shard: the one whose rows this store writes.
            epoch: ours; the owner record that says so has been put already.
            deadline: of the call.
            still_ours: raises FencedError once another process owns the shard, by what it knows apart from the nodes. It is asked where a
                node's copy of the owner record is not what it should be, before that copy is mended. Without it none is.

        Raises:
            FencedError: a higher epoch stands on a node, now, or later when a connection is made.
        """

    @abstractmethod
    def node_of(self, keys: RowKeys) -> str:
        """The address of the node that holds the first of these keys, as far as is known without asking."""

    def whereabouts(self, keys: RowKeys) -> Callable[[int], str]:
        """Return what says of a row, by its number, where it lies and what it is: for messages."""
        return lambda row: f"node {self.node_of(keys[row : row + 1])}, {keys.described(row)}"

    def owner_epoch(self, shard: int, deadline: Deadline) -> int:
        """The highest epoch that any node says owns the shard; 0 when it never had an owner."""
        name = owner_name(shard)
        owner = newest_owner(self.get_meta(name, deadline), shard, self.copies_on(name))
        return 0 if owner is None else owner.epoch

    def kill_other_writers(self, deadline: Deadline) -> int:
        """End the connections of every other process that writes as this store's role; put the owner record first.

        When it returns, none is left, and nothing that was sent on one can land any more. Nodes with compare-and-swap need none of this:
        every write there carries a condition, which a newer write has made false.

        Returns:
            How many were ended.
        """
        return 0

    @abstractmethod
    def stats(self, deadline: Deadline) -> list[NodeStats]:
        """Ask every node for its size and headroom; a node that does not answer has its error in the place of its numbers."""

    def settings(self, address: str, deadline: Deadline) -> dict[str, str]:
        """Return what a node says of its settings and state, in its own words, for operators; {} where a kind of storage says nothing.

        Raises:
            StorageError: it does not answer.
        """
        return {}

    def stats_or_error(self, address: str, deadline: Deadline) -> NodeStats:
        """What `_node_stats` says of a node, or why it says nothing."""
        begun_s = time.monotonic()
        try:
            return replace(self._node_stats(address, deadline), answer_s=time.monotonic() - begun_s)
        except KvembError as error:
            return NodeStats(address, "-", 0, 0, 0, 0, error=str(error))

    def _stats_in_turn(self, deadline: Deadline) -> list[NodeStats]:
        """The same of every node; a hung one leaves time for the others."""
        addresses = self.addresses
        shares = range(len(addresses), 0, -1)
        return [
            self.stats_or_error(address, Deadline.after(deadline.remaining_s() / left))
            for address, left in zip(addresses, shares, strict=True)
        ]

    def _node_stats(self, address: str, deadline: Deadline) -> NodeStats:
        """Ask one node; used by stores whose nodes are asked one by one."""
        raise NotImplementedError

    def held_rows(self, address: str, tables: Sequence[TableDef], deadline: Deadline) -> list[HeldRows | None]:
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

    @abstractmethod
    def close(self) -> None:
        """Drop every connection; later calls raise ClosedError. Idempotent."""

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
