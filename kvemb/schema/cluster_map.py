"""The cluster map: which node holds each slot, and which shard writes it. Pure; no I/O.

Every process of a cluster routes by one such map, and every node holds a copy of it. Its digest is in the nodes' markers, so a batch that
was routed by another map fails. On Redis Cluster the nodes' half is the cluster's own, and the map has only the shards'.

As bytes a half is its runs: where each begins, and who has it.
"""

from dataclasses import dataclass
from functools import cached_property

import msgpack
import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import digest64
from kvemb.schema.keys import RowKeys
from kvemb.schema.slots import N_SLOTS

_MAGIC, _VERSION = "kvemb-map", 1
_FIELDS = 7
_MOST_OWNERS = N_SLOTS


@dataclass(frozen=True, eq=False)
class ClusterMap:
    """One map; make the first of a cluster with `first`.

    Args:
        serial: the first map has 1, each later one the next.
        n_nodes: storage nodes, by their order in kvemb.yaml; 0 on a cluster that moves its own slots.
        slot_nodes: uint16 [16384], which of them holds each slot; of no meaning with n_nodes = 0.
        n_shards: parameter-server shards.
        slot_shards: uint16 [16384], which of them writes each slot.

    Example:
        >>> cluster_map = ClusterMap.first(2, 4)
        >>> cluster_map.slot_nodes[[0, 8191, 8192]].tolist(), cluster_map.slot_shards[[0, 4096, 16383]].tolist()
        ([0, 0, 1], [0, 1, 3])
    """

    serial: int
    n_nodes: int
    slot_nodes: NDArray[np.uint16]
    n_shards: int
    slot_shards: NDArray[np.uint16]

    @staticmethod
    def first(n_nodes: int, n_shards: int) -> "ClusterMap":
        """Return the first map of a cluster: nodes and shards have equal runs of slots, in order.

        Raises:
            ValueError: there are more of them than slots.
        """
        if not 0 <= n_nodes <= _MOST_OWNERS or not 1 <= n_shards <= _MOST_OWNERS:
            raise ValueError(f"{n_nodes} nodes and {n_shards} shards share {N_SLOTS} slots; each needs one")
        return ClusterMap(1, n_nodes, _equal_runs(max(1, n_nodes)), n_shards, _equal_runs(n_shards))

    def nodes_of(self, keys: RowKeys) -> NDArray[np.uint16] | None:
        """Return each key's node: uint16 [n]; None when there is one node only."""
        return None if self.n_nodes == 1 else self.slot_nodes[keys.slots()]

    def shards_of(self, slots: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Return the shard of each slot: uint16 [n]."""
        return self.slot_shards[slots]

    @cached_property
    def digest(self) -> int:
        """64-bit digest of all of it.

        Nodes are digested by their positions, not their addresses: a node may move to another address (a new container IP) and keep its
        rows. The marker's node index tells when two addresses were swapped.
        """
        return digest64("cluster map", self.encode())

    @cached_property
    def shard_runs(self) -> tuple[int, ...]:
        """The shards' half as runs: of each its first slot and its shard."""
        return tuple(np.frombuffer(runs_of(self.slot_shards), dtype="<u2").tolist())

    def encode(self) -> bytes:
        """Return the map's bytes, the same for equal maps."""
        packed: bytes = msgpack.packb(
            [_MAGIC, _VERSION, self.serial, self.n_nodes, runs_of(self.slot_nodes), self.n_shards, runs_of(self.slot_shards)]
        )
        return packed

    @staticmethod
    def decode(data: bytes) -> "ClusterMap":
        """Read a map's bytes.

        Raises:
            ValueError: they are none.
        """
        try:
            items = msgpack.unpackb(data, max_array_len=_FIELDS, max_map_len=0, max_str_len=16, max_bin_len=4 * N_SLOTS, max_ext_len=0)
        except Exception as error:  # msgpack raises ValueError, UnpackException, TypeError: all mean bad bytes
            raise ValueError(f"no msgpack: {error}") from error
        if not isinstance(items, list) or len(items) != _FIELDS or items[:2] != [_MAGIC, _VERSION]:
            raise ValueError("no cluster map of this release")
        serial, n_nodes, nodes, n_shards, shards = items[2:]
        if [type(number) for number in (serial, n_nodes, n_shards)] != [int] * 3:
            raise ValueError("a field of another type")
        if not (serial >= 1 and 0 <= n_nodes <= _MOST_OWNERS and 1 <= n_shards <= _MOST_OWNERS):
            raise ValueError("a number out of range")
        return ClusterMap(serial, n_nodes, from_runs(nodes, max(1, n_nodes)), n_shards, from_runs(shards, n_shards))


def runs_of(owners: NDArray[np.uint16]) -> bytes:
    """Return an owner per slot as runs: of each its first slot and its owner, uint16, least significant byte first."""
    begins = np.flatnonzero(np.concatenate([[True], owners[1:] != owners[:-1]]))
    return np.stack([begins, owners[begins]], axis=1).astype("<u2").tobytes()


def from_runs(data: object, n_owners: int) -> NDArray[np.uint16]:
    """Return the owner of each slot: uint16 [16384].

    Raises:
        ValueError: these are no runs, or one's owner is not below n_owners.
    """
    if not isinstance(data, bytes) or not data or len(data) % 4:
        raise ValueError("no runs of slots")
    begins, owners = np.frombuffer(data, dtype="<u2").astype(np.int64).reshape(-1, 2).T
    if begins[0] != 0 or (np.diff(begins) <= 0).any() or begins[-1] >= N_SLOTS or owners.max() >= n_owners:
        raise ValueError("runs of slots that overlap, leave slots out, or name an owner that there is not")
    return np.repeat(owners, np.diff(begins, append=N_SLOTS)).astype(np.uint16)


def _equal_runs(n_owners: int) -> NDArray[np.uint16]:
    return (np.arange(N_SLOTS) * n_owners // N_SLOTS).astype(np.uint16)
