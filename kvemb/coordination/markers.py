"""Markers: how a node proves that it is still the node whose rows it should hold. Pure.

A restarted, flushed, evicted or swapped node answers "missing" for rows that exist, and a missing row looks like a new one. So every node
holds a marker. It is read on connect, and LAST in every batch on each connection that carried it; anything but the expected bytes fails the
batch. On Redis Cluster there is one marker per slot, because keys belong to slots and a node-wide one would migrate away.

While a node's rows are brought back (`kvemb.stores.store_repair`), `repairing` stands in its marker, and afterwards the repair's nonce. Two
lifetimes of a node's data never have the same marker: a batch that began before a loss cannot take the repaired node for whole. Nonces
rise from repair to repair, and so do maps: a marker from before the last repair or map that is known brings a node's older rows.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import msgpack

from kvemb.errors import MapChangedError, NodeLostError, NodeSuspectError, StorageError, WrongNodeError, other_format
from kvemb.process.cached_property import cached_property
from kvemb.schema.cluster_map import ClusterMap

Why = Literal["empty", "suspect", "repairing"]
"""Why a node cannot be relied on; see `kvemb.stores.marked_nodes.LostNode`."""

MARKER_KEY = b"kvemb:marker"
_MAGIC = "kvemb-marker"
_VERSION, _REPAIRED_VERSION = 5, 6  # 1 and 2: rows under keys of their own, without buckets; 3 and 4: without a cluster map


@dataclass(frozen=True)
class Identity:
    """Which cluster, and which lifetime of its data. A shard remembers it, and so knows its nodes without a marker."""

    cluster_id: bytes  # 16 bytes
    generation: bytes  # 8 bytes
    cluster_map: ClusterMap | None = None  # the last one that was seen; None where only markers are known
    nodes: tuple[str, ...] = ()  # addresses at which they were; () where none is known
    repairs: Mapping[int, str] = field(default_factory=dict)  # by node number the nonce of its last repair, of those that are known


@dataclass(frozen=True)
class Marker:
    """The content of a node's marker."""

    cluster_id: bytes  # 16 bytes, drawn when the cluster was provisioned
    node: int  # index in the cluster map; for Redis Cluster the slot
    generation: bytes  # 8 bytes, one lifetime of the node's data
    map_digest: int  # 64-bit digest of the cluster map
    map_serial: int  # of that map
    run_id: str  # the server process that the marker was written for ("" where the server has none)
    repair: str = ""  # nonce of the node's last repair, 16 hex digits that rise from one to the next; "" before the first
    repairing: bool = False  # whether that repair goes on; this is no marker that a normal batch may accept

    def encode(self) -> bytes:
        """The bytes stored under the marker's key."""
        return self.encoded

    def naming(self, cluster_map: ClusterMap) -> "Marker":
        """Return the same marker under this map."""
        return replace(self, map_digest=cluster_map.digest, map_serial=cluster_map.serial)

    @cached_property  # every batch compares it
    def encoded(self) -> bytes:
        """The same, kept."""
        return self.of_nodes([self.node])[0]

    def of_nodes(self, nodes: Sequence[int]) -> list[bytes]:
        """The bytes of markers that differ from this one in the node alone: of thousands of slots, in one go."""
        before = [_MAGIC, _REPAIRED_VERSION if self.repair else _VERSION, self.cluster_id]
        after = [self.generation, self.map_digest, self.map_serial, self.run_id, *([self.repair, self.repairing] if self.repair else [])]
        packer = msgpack.Packer()
        head = packer.pack_array_header(len(before) + 1 + len(after)) + b"".join(map(packer.pack, before))
        tail = b"".join(map(packer.pack, after))
        return [b"%b%b%b" % (head, packer.pack(node), tail) for node in nodes]

    @staticmethod
    def decode(data: bytes, node: str) -> "Marker":
        """Read a marker's bytes."""
        try:
            magic, version, *body = msgpack.unpackb(data, max_array_len=16, max_map_len=0, max_bin_len=64, max_str_len=64)
            if magic != _MAGIC:
                raise ValueError("another magic")
            if type(version) is int and version not in (_VERSION, _REPAIRED_VERSION):
                raise WrongNodeError(other_format(f"node {node}: its marker", version, (_VERSION, _REPAIRED_VERSION)))
            marker = Marker(*body)
            types = [bytes, int, bytes, int, int, str]
            if [type(value) for value in body] != types + [str, bool] * (version == _REPAIRED_VERSION):
                raise ValueError("a field of another type")
            if marker.encode() != data or (marker.repair and f"{int(marker.repair, 16):016x}" != marker.repair):
                raise ValueError("written otherwise than by us")
        except WrongNodeError:
            raise
        except Exception as error:
            raise DamagedMarkerError(
                f"node {node}: the value under {MARKER_KEY.decode()} is not a marker (got {data[:40]!r}): another program wrote there, or "
                "it is damaged. Shards that know the cluster compare the node's rows with what they know and renew the marker; a new "
                "cluster wants other nodes, which are empty."
            ) from error
        return marker


_PLACE_AT = len(msgpack.packb([0] * 10)[:1] + b"".join(map(msgpack.packb, (_MAGIC, _VERSION, bytes(16)))))


def alike(places: Sequence[int], values: Sequence[bytes | bool | None]) -> list[list[int]]:
    """Group values in the places of markers by what they say besides their place, as lists of numbers: thousands judged as one."""
    groups: dict[object, list[int]] = {}
    for at, (place, value) in enumerate(zip(places, values, strict=True)):
        says: object = value
        if isinstance(value, bytes):
            packed = msgpack.packb(place)
            end = _PLACE_AT + len(packed)
            says = (value[:_PLACE_AT], value[end:]) if value[_PLACE_AT:end] == packed else at
        groups.setdefault((type(says), says), []).append(at)
    return list(groups.values())


class DamagedMarkerError(WrongNodeError):
    """The value in the place of a marker is no marker; `why_lost` and `diagnose` say what follows for the node."""


def first_identity(nodes: Iterable[str], values: Sequence[bytes | None]) -> Identity | None:
    """Return the identity that the first good marker names; None where no node has a marker."""
    damaged: WrongNodeError | None = None
    for node, value in zip(nodes, values, strict=True):
        try:
            if value is not None:
                marker = Marker.decode(value, node)
                return Identity(marker.cluster_id, marker.generation)
        except DamagedMarkerError as error:
            damaged = damaged or error
    if damaged is not None:
        raise NodeSuspectError(str(damaged))
    return None


def diagnose(node: str, expected: Marker, got: bytes | None) -> StorageError:
    """Return the error that says why a batch's marker was not the expected one."""
    if got is None:
        return NodeLostError(
            f"node {node}: its marker is gone. The server was restarted empty, flushed, or evicted keys; the rows it held are lost "
            "there. Nothing was re-initialised. Parameter servers with a journal bring them back; without, stop training and restore "
            "a backup."
        )
    try:
        marker = Marker.decode(got, node)
    except DamagedMarkerError as error:
        return NodeSuspectError(str(error))
    except WrongNodeError as error:
        return error
    if marker.cluster_id != expected.cluster_id:
        return WrongNodeError(
            f"node {node}: belongs to cluster {marker.cluster_id.hex()}, expected {expected.cluster_id.hex()}. Check the addresses."
        )
    if marker.node != expected.node:
        return WrongNodeError(
            f"node {node}: is node {marker.node} of its cluster, expected node {expected.node}. Addresses are swapped in kvemb.yaml, "
            "or a container address was reused. Or it was a replica of that node, and has its rows: FLUSHALL it, and shards bring its own "
            "back."
        )
    if marker.map_serial < expected.map_serial:
        return NodeSuspectError(
            f"node {node}: follows the cluster map of serial {marker.map_serial}, {expected.map_serial} is in force: the server was "
            "restarted from a snapshot that is older than the last move. Its rows may be old until the parameter servers compared them."
        )
    if (marker.map_digest, marker.map_serial) != (expected.map_digest, expected.map_serial):
        return MapChangedError(
            f"node {node}: follows the cluster map of serial {marker.map_serial} (digest {marker.map_digest:016x}), this process that of "
            f"serial {expected.map_serial} ({expected.map_digest:016x}): slots have moved between nodes or shards. Read the map again."
        )
    if expected.repairing and not (marker.repairing and marker.repair == expected.repair):
        return NodeLostError(f"node {node}: repair {expected.repair} no longer goes on there; it is finished, or has to begin again.")
    if marker.repairing and not expected.repairing:
        return NodeLostError(
            f"node {node}: lost its rows, or may hold old ones; the parameter servers are bringing them back (repair {marker.repair}). Try "
            "again later."
        )
    if marker.run_id != expected.run_id:
        return NodeSuspectError(
            f"node {node}: its marker names server process {marker.run_id or '-'}, expected {expected.run_id or '-'}. The server was "
            "restarted from a snapshot or failed over, and its rows may be old until the parameter servers have compared them; or its "
            "marker was renewed meanwhile: then try again."
        )
    if marker.generation == expected.generation and marker.repair < expected.repair:
        return NodeSuspectError(
            f"node {node}: its content is older than its last repair ({expected.repair}): the server has got an earlier state back "
            "(SWAPDB, DEBUG RELOAD). Its rows may be old until the parameter servers have compared them."
        )
    if marker.generation == expected.generation and marker.repair != expected.repair:
        return NodeSuspectError(f"node {node}: its rows were brought back meanwhile (repair {marker.repair}); try again.")
    return NodeLostError(
        f"node {node}: its data is of generation {marker.generation.hex()}, expected {expected.generation.hex()}: the node was emptied "
        "and provisioned again while this process ran. Reconnect."
    )


Placements = Collection[tuple[int, int]]
"""(digest, serial) of the maps that a marker may name: more than one only while markers are being renewed (`ClusterMap.former`)."""


def placements_of(cluster_map: ClusterMap) -> Placements:
    """Return the placements that markers may name under this map."""
    maps = [cluster_map] if cluster_map.former is None else [cluster_map, cluster_map.former]
    return [(one.digest, one.serial) for one in maps]


def as_under(marker: Marker, expected: Marker, placements: Placements) -> Marker:
    """Return a marker that names any of these maps as if it named the one that is expected."""
    if (marker.map_digest, marker.map_serial) not in placements:
        return marker
    return replace(marker, map_digest=expected.map_digest, map_serial=expected.map_serial)


def accept(node: str, expected: Marker, got: bytes | None, run_id: str, placements: Placements = ()) -> Marker:
    """Return the marker to expect of a node from now on: the one expected, or its renewal after a repair or a move; else see `diagnose`."""
    wanted = replace(expected, run_id=run_id)
    if got is not None:
        with suppress(DamagedMarkerError):  # which `diagnose` says
            marker = Marker.decode(got, node)
            if marker.repair >= expected.repair and as_under(marker, wanted, placements) == replace(wanted, repair=marker.repair):
                return marker
    raise diagnose(node, wanted, got)


def why_lost(node: str, expected: Marker, got: bytes | None, run_id: str, placements: Placements = ()) -> tuple[Why, str | None] | None:
    """Judge a node as `accept`: None when it can be relied on, else why not, and the nonce of the repair that goes on there."""
    if got is None:
        return "empty", None
    try:
        marker = as_under(Marker.decode(got, node), expected, placements)
    except DamagedMarkerError:
        return "suspect", None
    older_map = marker.map_serial < expected.map_serial
    same = replace(marker, generation=expected.generation, run_id=expected.run_id, repair=expected.repair, repairing=expected.repairing)
    if (same if not older_map else as_under(same, expected, [(same.map_digest, same.map_serial)])) != expected:
        raise diagnose(node, expected, got)
    older = older_map or (marker.repair, not marker.repairing) < (expected.repair, not expected.repairing)
    if older or marker.run_id != run_id or marker.generation != expected.generation:
        return "suspect", None
    return ("repairing", marker.repair) if marker.repairing else None
