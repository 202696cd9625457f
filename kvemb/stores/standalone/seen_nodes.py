"""A look at nodes before anything is expected of them: which cluster they are of, which number each has, and the newest map they know."""

import logging
from collections.abc import Iterable

from kvemb.coordination.map_copies import MAP_NAME, map_in_force, newest_map
from kvemb.coordination.markers import MARKER_KEY, Identity, Marker, first_identity
from kvemb.errors import ConfigError, KvembError, NotProvisionedError, WrongNodeError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from kvemb.stores.standalone.node_links import NodeLinks, NodeServer
from kvemb.stores.standalone.nodes_view import NodesView, places_of

log = logging.getLogger("kvemb")


class SeenNodes:
    """The answers of nodes, each asked once. For one call.

    Args:
        server: of their kind.
        links: to them.
    """

    def __init__(self, server: NodeServer, links: NodeLinks) -> None:
        self._server, self._links = server, links
        self._run_ids: dict[str, str] = {}
        self._values: dict[str, list[bytes | None]] = {}  # marker and map
        self._errors: dict[str, KvembError] = {}

    def view(self, known: Identity | None, deadline: Deadline, *, inspect: bool = True) -> NodesView:
        """Return the nodes of a cluster, found from those that kvemb.yaml names; markers are as they should be, not as they are.

        Args:
            known: the cluster, for a caller that knows it without markers; None: the markers say it.
            deadline: of all of it.
            inspect: whether their settings are to be looked at, too.

        Raises:
            NotProvisionedError: no node has a marker.
            KvembError: a node that there is cannot be used.
        """
        self._look(self._links.in_file, deadline, inspect=inspect)
        if not self._values or (self._errors and not any(marker for marker, _ in self._values.values())):
            raise next(iter(self._errors.values()))
        identity = known or self._identity()
        cluster_map = map_in_force([copy for _, copy in self._values.values()], [f"node {a}" for a in self._values], identity)
        places = places_of(cluster_map, self._links.in_file, self._numbers(identity.cluster_id))
        markers = {address: new_marker(identity, number, cluster_map, "") for number, address in enumerate(places) if address}
        return NodesView(cluster_map, places, markers)

    def places(self, before: NodesView, known: ClusterMap, deadline: Deadline) -> tuple[ClusterMap, tuple[str, ...]]:
        """Return the newest map, and where the nodes are by it; nodes that do not answer say nothing.

        Args:
            before: the view until now.
            known: the newest map that is known.
            deadline: of all of it.
        """
        self._look([*before.addresses, *self._links.in_file], deadline, inspect=False)
        copies = [copy for _, copy in self._values.values()]
        cluster_map = newest_map(copies, [f"node {address}" for address in self._values], known) or known
        ours = next(iter(before.markers.values())).cluster_id
        try:
            return cluster_map, places_of(cluster_map, self._links.in_file, self._numbers(ours))
        except ConfigError as error:  # addresses lead elsewhere just now; the known ones stay in use until they lead right again
            log.warning("the cluster map of version %d is not followed yet: %s", cluster_map.version, error)
            return before.map, before.places

    def require(self, address: str, deadline: Deadline) -> tuple[str, bytes | None]:
        """Return a node's run id, and the value in the place of its marker.

        Raises:
            KvembError: it does not answer, or its settings may lose rows.
        """
        self._look([address], deadline, inspect=True)
        if address in self._errors:
            raise self._errors[address]
        return self._run_ids[address], self._values[address][0]

    def _look(self, addresses: Iterable[str], deadline: Deadline, *, inspect: bool) -> None:
        left = [address for address in dict.fromkeys(addresses) if address not in self._values and address not in self._errors]
        for index, address in enumerate(left):
            share = Deadline.after(deadline.remaining_s() / (len(left) - index))  # a hung node leaves time for the others
            try:
                if inspect:
                    self._run_ids[address] = self._server.inspect(address, share)[0]
                self._values[address] = self._links.first_look(address, [MARKER_KEY, MAP_NAME.encode()], share)
            except KvembError as error:
                self._errors[address] = error

    def _numbers(self, cluster_id: bytes) -> dict[str, int | None]:
        """Of every address that answered the number that its marker says; None where there is none of ours."""
        return {address: number_in(address, marker, cluster_id) for address, (marker, _) in self._values.items()}

    def _identity(self) -> Identity:
        found = first_identity(list(self._values), [marker for marker, _ in self._values.values()])
        if found is not None:
            return found
        raise NotProvisionedError(
            f"none of the nodes {', '.join(self._values)} holds a marker: the cluster is new, or all of its data is gone. "
            "Parameter-server shard 0 provisions empty nodes when it starts for the first time."
        )


def new_marker(identity: Identity, number: int, cluster_map: ClusterMap, run_id: str) -> Marker:
    """Return the marker of a node that was never repaired."""
    return Marker(identity.cluster_id, number, identity.generation, cluster_map.digest, cluster_map.serial, run_id)


def number_in(address: str, value: bytes | None, cluster_id: bytes) -> int | None:
    """Return the number in a cluster that a node's marker says; None where it is none of that cluster's."""
    try:
        marker = None if value is None else Marker.decode(value, address)
    except WrongNodeError:
        return None
    return marker.node if marker is not None and marker.cluster_id == cluster_id else None
