"""The cluster map: which node holds each slot, which shard writes it, and the move under way. Pure; no I/O.

Every process of a cluster routes by one such map, and every node holds a copy. The digest of the owners is in the nodes' markers, so a
batch that was routed by another map fails. On Redis Cluster the nodes' half is the cluster's own: the map has only the shards', and no
marker names it.

As bytes a half is its runs: where each begins, and its owner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import digest64
from kvemb.errors import ConfigError, other_format
from kvemb.process.cached_property import cached_property
from kvemb.schema.keys import RowKeys
from kvemb.schema.move_plan import NODES, SHARDS, MovePlan
from kvemb.schema.slots import N_SLOTS, from_runs, runs_of

_MAGIC, FORMAT_VERSION = "kvemb-map", 3
_FIELDS = {2: 11, 3: 12}  # by format
_MOST_OWNERS = N_SLOTS
IN_FILE, BY_COMMAND, GONE = "file", "command", "gone"


class NodePlace(NamedTuple):
    """Where a node is, or a shard."""

    address: str  # "host:port"; "" of one that is gone
    # the source of the address. "file": kvemb.yaml, which may name another one later; "command": an operator's command alone; "gone": the
    # number is not in use any more.
    said_by: str


@dataclass(frozen=True, eq=False)
class ClusterMap:
    """One map; make the first of a cluster with `first`."""

    serial: int  # of the owners, which markers name: the first map has 1, and it rises by 1 whenever owners change
    n_nodes: int  # numbers given to storage nodes, those gone included; 0 on a cluster that moves its own slots
    slot_nodes: NDArray[np.uint16]  # uint16 [16384], which of them holds each slot; of no meaning with n_nodes = 0
    n_shards: int  # numbers given to parameter-server shards, those gone included; a process with a higher one waits to be taken in
    slot_shards: NDArray[np.uint16]  # uint16 [16384], which of them writes each slot
    version: int = 1  # of the whole map: the first has 1, and every change, plans included, makes the next. The highest counts.
    places: tuple[NodePlace, ...] = ()  # where each node is; () while no address is noted
    shards: tuple[NodePlace, ...] = ()  # where each shard is; () while no address is noted: then kvemb.yaml's addresses hold
    plan: MovePlan | None = None  # a move under way
    n_node_moves: int = 0  # how many of the last serials changed nothing but nodes

    @staticmethod
    def first(n_nodes: int, n_shards: int, nodes: tuple[str, ...] = ()) -> "ClusterMap":
        """Return the first map of a cluster: nodes and shards have equal runs of slots, in order."""
        if not 0 <= n_nodes <= _MOST_OWNERS or not 1 <= n_shards <= _MOST_OWNERS:
            raise ValueError(f"{n_nodes} nodes and {n_shards} shards share {N_SLOTS} slots; each needs one")
        places = tuple(NodePlace(address, IN_FILE) for address in nodes)
        return ClusterMap(1, n_nodes, equal_runs(max(1, n_nodes)), n_shards, equal_runs(n_shards), places=places)

    def nodes_of(self, keys: RowKeys) -> NDArray[np.uint16] | None:
        """Return each key's node: uint16 [n]; None when there is one node only."""
        return None if self.n_nodes == 1 else self.slot_nodes[keys.slots()]

    def shards_of(self, slots: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Return the shard of each slot: uint16 [n]."""
        return self.slot_shards[slots]

    def shard_places(self, in_file: Sequence[str]) -> tuple[str, ...]:
        """Return where each shard is, "" for those that are gone.

        An address from a command comes first. Then the noted address, if kvemb.yaml still names it; then the one at the shard's position
        there, unless that one is known to be another shard's (an edit of the file need not leave holes); then the noted one.
        """
        noted = {place.address for place in self.shards}
        places = []
        for number, (address, said_by) in enumerate(self.shards or [NodePlace("", IN_FILE)] * self.n_shards):
            by_file = in_file[number] if number < len(in_file) and in_file[number] not in noted else ""
            found = address if said_by != IN_FILE or address in in_file else by_file or address
            if not found and said_by != GONE:
                raise ConfigError(
                    f"parameter_servers.shards: {len(in_file)} given, the cluster map (serial {self.serial}) has {self.n_shards}, and "
                    f"no address is known for shard {number}. List every shard that `kvemb config show` prints."
                )
            places.append(found)
        return tuple(places)

    def place_of(self, shard: int, in_file: Sequence[str]) -> str:
        """Return where one shard is, "" if it is not one of the cluster's, or gone."""
        return self.shard_places(in_file)[shard] if shard in self.shard_numbers else ""

    @cached_property
    def shard_numbers(self) -> tuple[int, ...]:
        """The existing shards, ascending, with and without slots."""
        return tuple(number for number in range(self.n_shards) if not self.shards or self.shards[number].said_by != GONE)

    @cached_property
    def shards_serial(self) -> int:
        """The serial with which the shards' half came into force: writes are routed by that half alone."""
        return self.serial - self.n_node_moves

    def free_shards(self, n: int) -> tuple[int, ...]:
        """The numbers of the next shards that join: numbers of shards that are gone come first."""
        gone = [number for number in range(self.n_shards) if number not in self.shard_numbers]
        return tuple([*gone, *range(self.n_shards, self.n_shards + n)][:n])

    @cached_property
    def writing_shards(self) -> frozenset[int]:
        """The shards that have slots."""
        return frozenset(np.unique(self.slot_shards).tolist())

    @cached_property
    def digest(self) -> int:
        """64-bit digest of the owners, without addresses and plans.

        Nodes are digested by their numbers: a node may move to another address (a new container IP) and keep its rows. The number in the
        marker tells when two addresses were swapped.
        """
        return digest64("cluster map", msgpack.packb([self.serial, runs_of(self.slot_nodes), runs_of(self.slot_shards)]))

    @cached_property
    def shard_runs(self) -> tuple[int, ...]:
        """The shards' half as runs: of each its first slot and its shard."""
        return tuple(np.frombuffer(runs_of(self.slot_shards), dtype="<u2").tolist())

    @cached_property
    def second_nodes(self) -> NDArray[np.uint16] | None:
        """uint16 [16384], the second node that each slot's rows are written to while slots move between nodes; None if none move."""
        plan = self.plan
        return plan.slot_owners if plan is not None and plan.kind == NODES and plan.writes_both else None

    def gives(self, shard: int) -> NDArray[np.bool_]:
        """Return which slots a plan takes from a shard, before and after its flip: bool [16384]."""
        before, after = self._shards_of_plan
        which: NDArray[np.bool_] = (before == shard) & (after != shard)
        return which

    def takes(self, shard: int) -> NDArray[np.bool_]:
        """Return which slots a plan brings to a shard, before and after its flip: bool [16384]."""
        before, after = self._shards_of_plan
        which: NDArray[np.bool_] = (before != shard) & (after == shard)
        return which

    @property
    def _shards_of_plan(self) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
        """Return the shard of each slot when a plan begins and when it is done, uint16 [16384] each; the same if no slots move."""
        plan = self.plan
        if plan is None or plan.kind != SHARDS:
            return self.slot_shards, self.slot_shards
        return (plan.slot_owners, self.slot_shards) if plan.flipped else (self.slot_shards, plan.slot_owners)

    @cached_property
    def former(self) -> "ClusterMap | None":
        """The map before this one, which markers may still name; None for none."""
        plan = self.plan
        if plan is None or not plan.renews_markers:
            return None
        slot_nodes = plan.slot_owners if plan.kind == NODES else self.slot_nodes
        slot_shards = plan.slot_owners if plan.kind == SHARDS else self.slot_shards
        return replace(self, serial=self.serial - 1, plan=None, slot_nodes=slot_nodes, slot_shards=slot_shards)

    def encode(self) -> bytes:
        """Return the map's bytes, the same for equal maps."""
        halves = [self.n_nodes, runs_of(self.slot_nodes), self.n_shards, runs_of(self.slot_shards)]
        places, shards = ([list(place) for place in some] for some in (self.places, self.shards))
        plan = self.plan and self.plan.to_list()
        ours = [self.version, self.serial, *halves, places, shards, plan, self.n_node_moves]
        packed: bytes = msgpack.packb([_MAGIC, FORMAT_VERSION, *ours])
        return packed

    @staticmethod
    def decode(data: bytes) -> "ClusterMap":
        """Read a map's bytes."""
        try:
            items = msgpack.unpackb(
                data, max_array_len=_MOST_OWNERS, max_map_len=0, max_str_len=4096, max_bin_len=4 * N_SLOTS, max_ext_len=0
            )
        except Exception as error:  # msgpack raises ValueError, UnpackException, TypeError: all mean bad bytes
            raise ValueError(f"no msgpack: {error}") from error
        if not isinstance(items, list) or len(items) < 2 or items[0] != _MAGIC:
            raise ValueError("no cluster map")
        if type(items[1]) is int and items[1] not in _FIELDS:
            raise OtherFormatError(items[1])
        if type(items[1]) is not int or len(items) != _FIELDS[items[1]]:
            raise ValueError("no cluster map of this release")
        version, serial, n_nodes, nodes, n_shards, shards, places, addresses, plan, n_moves = [*items, 0][2:12]
        if [type(number) for number in (version, serial, n_nodes, n_shards, n_moves)] != [int] * 5:
            raise ValueError("a field of another type")
        in_range = 0 <= n_nodes <= _MOST_OWNERS and 1 <= n_shards <= _MOST_OWNERS and 0 <= n_moves < serial
        if not (serial >= 1 and version >= 1 and in_range):
            raise ValueError("a number out of range")
        owners = from_runs(nodes, max(1, n_nodes)), from_runs(shards, n_shards)
        found = None if plan is None else MovePlan.from_list(plan, {NODES: max(1, n_nodes), SHARDS: n_shards})
        where = _places(places, n_nodes), _places(addresses, n_shards)
        return ClusterMap(serial, n_nodes, owners[0], n_shards, owners[1], version, *where, found, n_moves)


class OtherFormatError(ValueError):
    """A cluster map of another release of kvemb."""

    def __init__(self, version: int) -> None:
        super().__init__(other_format("the cluster map", version, tuple(_FIELDS)))


def equal_runs(n_owners: int) -> NDArray[np.uint16]:
    """Return an owner for each slot, uint16 [16384]: equal runs, in order."""
    return (np.arange(N_SLOTS) * n_owners // N_SLOTS).astype(np.uint16)


def _places(items: object, n: int) -> tuple[NodePlace, ...]:
    if not isinstance(items, list) or len(items) not in (0, n):
        raise ValueError("not as many places as nodes, or shards")
    places = []
    for item in items:
        if not isinstance(item, list) or [type(text) for text in item] != [str, str] or item[1] not in (IN_FILE, BY_COMMAND, GONE):
            raise ValueError("no place of a node, or shard")
        places.append(NodePlace(*item))
    return tuple(places)
