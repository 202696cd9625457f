"""The copies of the cluster map on the nodes: the one of the highest version counts. Pure."""

from collections.abc import Iterable, Sequence

from kvemb.coordination.markers import Identity
from kvemb.coordination.replicated_values import DamagedCopyError, ValueCell, intact_copies, unless_newer
from kvemb.errors import NodeLostError, ProtocolError
from kvemb.schema.cluster_map import ClusterMap, OtherFormatError

MAP_NAME = "kvemb:map"


def decode_map(data: bytes) -> ClusterMap:
    """Read a copy."""
    try:
        return ClusterMap.decode(data)
    except OtherFormatError as error:
        raise ProtocolError(str(error)) from error
    except ValueError as error:
        raise DamagedCopyError(f"expected a cluster map, got {data[:40]!r} ({error})") from error


def newest_map(copies: Iterable[bytes | None], where: Sequence[str] = (), known: ClusterMap | None = None) -> ClusterMap | None:
    """Return the newest of the nodes' copies and the one that is known; None for none."""
    try:
        found = intact_copies(copies, decode_map, MAP_NAME, where)
    except DamagedCopyError:
        if known is None:
            raise
        found = []
    return max([*found, *([known] if known is not None else [])], key=lambda one: one.version, default=None)


def put_newer(copy: ValueCell, cluster_map: ClusterMap) -> None:
    """Let a copy be this map, unless it is a newer one."""
    copy.update(unless_newer(cluster_map.encode(), lambda found: decode_map(found).version >= cluster_map.version))


def map_in_force(copies: Iterable[bytes | None], where: Sequence[str], identity: Identity) -> ClusterMap:
    """Return the map of a cluster whose nodes have markers: the newest of the copies and of the one that the identity knows."""
    found = newest_map(copies, where, identity.cluster_map)
    if found is None:
        raise NodeLostError(
            f"{', '.join(where)}: no cluster map, though there are markers: it was deleted, or lost with rows. Nothing was re-initialised. "
            "Parameter servers that run, or start with their data folders, put it back."
        )
    return found
