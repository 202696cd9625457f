"""Which nodes there are, where, and which marker each should have: one value, replaced as a whole when the cluster map changes. Pure.

A node has a number, which its marker says too, and an address. Addresses come from kvemb.yaml and from the cluster map; the marker that is
found at one proves whose it is.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from kvemb.coordination.markers import Marker, Placements, as_under, diagnose, placements_of
from kvemb.errors import ConfigError, NodeSuspectError, WrongNodeError
from kvemb.process.cached_property import cached_property
from kvemb.schema.cluster_map import BY_COMMAND, GONE, IN_FILE, ClusterMap


@dataclass(frozen=True, eq=False)
class NodesView:
    """The nodes as one map sees them."""

    map: ClusterMap  # the cluster map
    places: tuple[str, ...]  # address of each number; "" of those that are gone
    # by address the one that is expected, as it was found last; entries are replaced when one is found renewed. None before the store is
    # opened.
    markers: dict[str, Marker] = field(default_factory=dict)

    @staticmethod
    def unopened(nodes: tuple[str, ...]) -> "NodesView":
        """Return the view before anything was asked: the nodes of kvemb.yaml in its order."""
        return NodesView(ClusterMap.first(len(nodes), 1), nodes)

    @cached_property
    def addresses(self) -> tuple[str, ...]:
        """Of the nodes that there are, in the order of their numbers."""
        return tuple(place for place in self.places if place)

    @cached_property
    def placements(self) -> Placements:
        """The placements that markers may name."""
        return placements_of(self.map)

    def changed(self, cluster_map: ClusterMap, places: tuple[str, ...]) -> "NodesView":
        """Return the view under another map, or with nodes at other addresses.

        Nodes that were known have to show the markers that they had, but for the map; new ones are looked at when they are connected to.
        """
        known = {marker.node: marker for marker in list(self.markers.values())}
        any_ = next(iter(known.values()))
        markers = {}
        for number, address in enumerate(places):
            if address:
                marker = known[number] if number in known else replace(any_, node=number, run_id="", repair="")
                markers[address] = marker.naming(cluster_map)
        return NodesView(cluster_map, places, markers)

    def require(self, address: str, expected: Marker, got: bytes | None) -> None:
        """Refuse a marker read after a batch, unless it is the expected one, or that one renewed for a map that is in force too."""
        if got == expected.encode():
            return
        marker = None
        if got is not None:
            with suppress(WrongNodeError):
                marker = Marker.decode(got, address)
        if marker is None or as_under(marker, expected, self.placements) != expected:
            raise diagnose(address, expected, got)
        if not expected.repairing:
            self.renew(address, marker)

    def renew(self, address: str, marker: Marker) -> None:
        """Expect a marker that was found renewed at a node from now on."""
        if address in self.markers:
            self.markers[address] = marker

    @property
    def repairs(self) -> dict[int, str]:
        """See `StoreNodes.repairs`."""
        return {marker.node: marker.repair for marker in list(self.markers.values()) if marker.repair}

    def number_of(self, address: str) -> int:
        """The number of a node."""
        if address not in self.places:
            raise moved_meanwhile(address)
        return self.places.index(address)

    def expected(self, address: str) -> Marker:
        """The marker that a node should have; raises as `number_of`."""
        expected = self.markers.get(address)
        if expected is None:
            raise moved_meanwhile(address)
        return expected


def places_of(cluster_map: ClusterMap, in_file: Sequence[str], numbers: Mapping[str, int | None]) -> tuple[str, ...]:
    """Return the address of each node number, "" for nodes that are gone.

    The first of these: the address of kvemb.yaml whose marker has the number; the address that a command gave; the position in kvemb.yaml
    (for a node that has moved and lost its rows at once, while no address there is known to be out of order); its last address.
    """
    proven = {number: address for address, number in numbers.items() if number is not None and address in in_file}
    elsewhere = {place.address: number for number, place in enumerate(cluster_map.places)}
    # A file that was rewritten after nodes had come or gone need not list them in the order of their numbers.
    in_order = all({elsewhere.get(address, at), numbers.get(address, at)} <= {at, None} for at, address in enumerate(in_file))
    places: list[str] = []
    for number in range(cluster_map.n_nodes):
        said = cluster_map.places[number] if cluster_map.places else None
        if said is not None and said.said_by == GONE:
            places.append("")
            continue
        by_file = in_file[number] if in_order and number < len(in_file) and numbers.get(in_file[number]) is None else ""
        if said is not None and said.said_by != IN_FILE:
            by_file = ""
        found = proven.get(number) or by_file or (said.address if said is not None else "")
        if not found or found in places:
            raise ConfigError(
                f"storage.nodes: {len(in_file)} given, the cluster map (serial {cluster_map.serial}) has {cluster_map.n_nodes}, and no "
                f"address is known for node {number}. List every node that `kvemb config show` prints."
            )
        places.append(found)
    return tuple(places)


def places_to_write(before: NodesView, cluster_map: ClusterMap, places: Sequence[str]) -> tuple[str, ...]:
    """Return where a process that writes goes on: a node stays where it was, unless a command has said another address.

    A write that is in doubt at a node's address could not be told of any more once the node is sought elsewhere.
    """
    known, said_before, kept = before.places, before.map.places, list(places)
    for number, address in enumerate(known):
        said = cluster_map.places[number] if cluster_map.places else None
        moved = said is not None and said.said_by == BY_COMMAND and (number >= len(said_before) or said != said_before[number])
        if address and kept[number] and not moved:
            kept[number] = address
    return tuple(kept)


def moved_meanwhile(address: str) -> NodeSuspectError:
    """Return the error of a batch that was begun before nodes moved."""
    return NodeSuspectError(f"node {address}: while it was asked, nodes moved to other addresses; try again.")
