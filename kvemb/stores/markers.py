"""Markers: how a node proves that it is still the node whose rows it should hold. Pure.

A restarted, flushed, evicted or swapped node answers "missing" for rows that exist, and a missing row looks like a new one. So every node
holds a marker, read on connect and LAST in every batch on each connection that carried it; anything but the expected bytes fails the
batch. On Redis Cluster there is one marker per slot, because keys belong to slots and a node-wide one would migrate away.
"""

from dataclasses import dataclass

import msgpack

from kvemb.errors import NodeLostError, NodeSuspectError, StorageError, WrongNodeError

MARKER_KEY = b"kvemb:marker"
_MAGIC = "kvemb-marker"
_VERSION = 1


@dataclass(frozen=True)
class Marker:
    """What a node's marker says.

    Args:
        cluster_id: 16 bytes, drawn when the cluster was provisioned.
        node: index in the node map; for Redis Cluster the slot.
        generation: 8 bytes, one lifetime of the node's data.
        map_digest: 64-bit digest of the ordered node map (0 on Redis Cluster, which keeps its own).
        topology_epoch: version of the node map.
        run_id: the server process that the marker was written for ("" where the server has none).
    """

    cluster_id: bytes
    node: int
    generation: bytes
    map_digest: int
    topology_epoch: int
    run_id: str

    def encode(self) -> bytes:
        """The bytes stored under the marker's key."""
        body = [self.cluster_id, self.node, self.generation, self.map_digest, self.topology_epoch, self.run_id]
        packed: bytes = msgpack.packb([_MAGIC, _VERSION, *body])
        return packed

    @staticmethod
    def decode(data: bytes, node: str) -> "Marker":
        """Read a marker's bytes.

        Raises:
            WrongNodeError: they are no marker of this version.
        """
        try:
            magic, version, *body = msgpack.unpackb(data, max_array_len=16, max_map_len=0, max_bin_len=64, max_str_len=64)
            marker = Marker(*body)
            if [type(value) for value in body] != [bytes, int, bytes, int, int, str]:
                raise ValueError("a field of another type")
            well_formed = (magic, version) == (_MAGIC, _VERSION) and marker.encode() == data
        except Exception as error:
            raise WrongNodeError(f"node {node}: the value under {MARKER_KEY.decode()} is not a marker") from error
        if not well_formed:
            raise WrongNodeError(f"node {node}: marker of another version ({magic} {version}); use the same kvemb release")
        return marker


def diagnose(node: str, expected: Marker, got: bytes | None) -> StorageError:
    """Return the error that says why a batch's marker was not the expected one."""
    if got is None:
        return NodeLostError(
            f"node {node}: its marker is gone. The server was restarted empty, flushed, or evicted keys; the rows it held are lost "
            "there. Nothing was re-initialised. Stop training and bring its data back."
        )
    try:
        marker = Marker.decode(got, node)
    except WrongNodeError as error:
        return error
    if marker.cluster_id != expected.cluster_id:
        return WrongNodeError(
            f"node {node}: belongs to cluster {marker.cluster_id.hex()}, expected {expected.cluster_id.hex()}. Check the addresses."
        )
    if marker.node != expected.node:
        return WrongNodeError(
            f"node {node}: is node {marker.node} of its cluster, expected node {expected.node}. Addresses are swapped in kvemb.yaml, "
            "or a container address was reused."
        )
    if (marker.map_digest, marker.topology_epoch) != (expected.map_digest, expected.topology_epoch):
        return WrongNodeError(
            f"node {node}: holds another node map (digest {marker.map_digest:016x}, epoch {marker.topology_epoch}; expected "
            f"{expected.map_digest:016x}, {expected.topology_epoch}). Reload kvemb.yaml: nodes were added, removed or reordered."
        )
    if marker.run_id != expected.run_id:
        return NodeSuspectError(
            f"node {node}: its marker names server process {marker.run_id or '-'}, expected {expected.run_id or '-'}. The server was "
            "restarted from a snapshot or failed over, and its rows may be old; or its marker was renewed meanwhile: then reconnect."
        )
    return NodeLostError(
        f"node {node}: its data is of generation {marker.generation.hex()}, expected {expected.generation.hex()}: the node was emptied "
        "and provisioned anew while this process ran. Reconnect."
    )
