"""The nodes of a store: which there are and where, the cluster map, moves of slots between them, and servers' own statistics."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvemb.errors import KvembError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap


@dataclass(frozen=True)
class NodeStats:
    """One node as operators see it. Sizes in bytes; limit_bytes 0 = no limit set; `error` says why a node did not answer.

    `evicted` counts the keys that the server has thrown away by itself; `moved` those of them that went with slab pages (memcached);
    `traffic_bytes`: received and sent since it started; `unsafe` says which of its settings may throw rows away, "" for none
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


class StoreNodes(ABC):
    """The nodes of a store: a part of `Store`, as `nodes`."""

    @property
    @abstractmethod
    def addresses(self) -> tuple[str, ...]:
        """The nodes, in the order of their numbers in the cluster map."""

    @property
    @abstractmethod
    def cluster_map(self) -> ClusterMap:
        """The map that rows are routed by, of nodes and of shards; known once the store is open. Read it again for every batch."""

    @property
    def places(self) -> tuple[str, ...]:
        """The address of every node number of the cluster map, "" of those that are gone."""
        return self.addresses

    @property
    def repairs(self) -> Mapping[int, str]:
        """By node number the nonce of its last repair, of those that are known; a process that is started again is to know them, too."""
        return {}

    def follow(self, nodes_now: Callable[[], tuple[str, ...]]) -> None:
        """After an error that nodes at other addresses would explain, ask for the addresses; stores that find nodes by themselves need not.

        For a store that only reads: a write that is in doubt at a node's former address could not be told of any more.

        Args:
            nodes_now: returns the addresses that kvemb.yaml says now; ConfigError where it cannot say.
        """
        return

    def find(self, deadline: Deadline) -> None:
        """Find all nodes of a cluster that is not opened, as far as those of kvemb.yaml tell: for `stats`. Raises nothing."""
        return

    def refresh_map(self, deadline: Deadline) -> bool:
        """Read the cluster map again from the nodes that answer, and follow it from the next batch on; return whether it has changed.

        A read that finds a newer map does this by itself, and is repeated; after a write that finds one, the caller tries again.
        """
        return False

    def publish_map(self, cluster_map: ClusterMap, deadline: Deadline) -> list[str]:
        """Give every node this map unless it has a newer one; return the failures, in words."""
        raise NotImplementedError(f"{type(self).__name__} has a map that does not change")

    def renew_markers(self, deadline: Deadline) -> list[str]:
        """Let every node's marker name the map in force; return the failures, in words. See docs/adr/0058 for when."""
        raise NotImplementedError(f"{type(self).__name__} has a map that does not change")

    def require_empty(self, address: str, deadline: Deadline) -> None:
        """Raise unless a node that is not one of the cluster's can be used, and holds nothing.

        Raises:
            WrongNodeError: it holds something.
            StorageError: it cannot be used.
        """
        raise NotImplementedError(f"{type(self).__name__} has nodes that do not change")

    def prepare(self, address: str, number: int, metas: Mapping[str, bytes], deadline: Deadline) -> None:
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

    def open_slots(self, deadline: Deadline) -> list[int]:
        """The slots that stand open between two nodes, on a cluster that places its slots itself.

        Raises:
            StorageError: a node does not say.
        """
        return []

    def stats(self, deadline: Deadline) -> list[NodeStats]:
        """Ask every node for its size and headroom; one that does not answer leaves time for the others, and has its error there."""
        return [self._stats_or_error(address, share) for address, share in deadline.shared(self.addresses)]

    def _stats_or_error(self, address: str, deadline: Deadline) -> NodeStats:
        begun_s = time.monotonic()
        try:
            return replace(self.stats_of(address, deadline), answer_s=time.monotonic() - begun_s)
        except KvembError as error:
            return NodeStats(address, "-", 0, 0, 0, 0, error=str(error))

    @abstractmethod
    def stats_of(self, address: str, deadline: Deadline) -> NodeStats:
        """Ask one node; raises a KvembError when it does not answer."""

    def max_record_bytes(self, address: str, deadline: Deadline) -> int | None:
        """Return the largest record that a node takes, by its settings as they are now; None where it takes any.

        Raises:
            StorageError: it does not answer.
        """
        return None

    def settings(self, address: str, deadline: Deadline) -> dict[str, str]:
        """Return a node's settings and state, in its own words, for operators; {} where a kind of storage has none.

        Raises:
            StorageError: it does not answer.
        """
        return {}
