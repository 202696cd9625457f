"""What changes the cluster map on nodes: a copy on each, markers that name it, a node that joins. For shard 0, which carries moves."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from kvemb.coordination.map_copies import MAP_NAME
from kvemb.coordination.markers import MARKER_KEY, Marker, diagnose
from kvemb.coordination.shard_notes import note_name, whose_keys
from kvemb.errors import ProtocolError, StorageError, WrongNodeError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from kvemb.stores.standalone.node_links import NodeLinks, NodeServer
from kvemb.stores.standalone.node_repair import put_map
from kvemb.stores.standalone.seen_nodes import number_in

_MAX_TRIES = 100


class MapPublisher:
    """Writes maps and markers.

    Args:
        links: to the nodes.
        server: of their kind.
    """

    def __init__(self, links: NodeLinks, server: NodeServer) -> None:
        self._links, self._server = links, server

    def publish_map(self, cluster_map: ClusterMap, addresses: Iterable[str], deadline: Deadline) -> list[str]:
        """Give nodes this map unless they have a newer one; return why those that have not got it have not."""
        missed = []
        for address in addresses:
            try:
                put_map(self._links, address, cluster_map, self._links.look(address, deadline)[1], deadline)
            except StorageError as error:
                missed.append(str(error))
        return missed

    def renew_markers(self, deadline: Deadline) -> list[str]:
        """See `Store.renew_markers`."""
        missed = []
        for address in self._links.addresses:
            try:
                if trouble := self._renew_marker(address, deadline):
                    missed.append(trouble)
            except StorageError as error:
                missed.append(str(error))
        return missed

    def _renew_marker(self, address: str, deadline: Deadline) -> str:
        """Let a node's marker name the map in force; return "" or why it does not."""
        view = self._links.view
        for _ in range(_MAX_TRIES):
            got, run_id = self._links.look(address, deadline)
            if got is None:
                return f"node {address}: its marker is gone; the parameter servers bring its rows back first"
            marker = Marker.decode(got, address)
            if (marker.map_digest, marker.map_serial) == (view.map.digest, view.map.serial):
                return ""
            if (marker.map_digest, marker.map_serial) not in view.placements:
                raise diagnose(address, view.expected(address), got)
            if self._links.swap(address, MARKER_KEY, got, marker.naming(view.map).encode(), run_id, deadline):
                return ""
        raise ProtocolError(f"node {address}: its marker changed {_MAX_TRIES} times while it was to be renewed")

    def require_empty(self, address: str, deadline: Deadline) -> None:
        """See `Store.require_empty`."""
        n_keys = self._server.inspect(address, deadline)[1]
        if n_keys:
            raise self._not_empty(address, n_keys, deadline)

    def prepare_node(self, address: str, number: int, metas: Mapping[str, bytes], deadline: Deadline) -> None:
        """See `Store.prepare_node`."""
        view = self._links.view
        run_id, n_keys = self._server.inspect(address, deadline)
        any_ = next(iter(view.markers.values()))
        wanted = replace(any_, node=number, run_id=run_id, repair="", repairing=False).naming(view.map)
        value, copy = self._links.first_look(address, [MARKER_KEY, MAP_NAME.encode()], deadline)
        if value == wanted.encode():
            return  # an earlier try came so far
        if value is not None or n_keys > len(metas) + 1 or (n_keys and copy is None):
            raise self._not_empty(address, n_keys, deadline)
        for name, value_ in {MAP_NAME: view.map.encode(), **metas}.items():
            self._put(address, name.encode(), value_, run_id, deadline)
        if not self._server.swap(address, MARKER_KEY, None, wanted.encode(), run_id, deadline):
            raise WrongNodeError(f"node {address}: another program writes there; nothing was changed in the cluster. Look, and try again.")

    def _not_empty(self, address: str, n_keys: int, deadline: Deadline) -> WrongNodeError:
        """Say whose keys there are before any advice: the address may be another cluster's, or one of this one's under another name."""
        value, note = self._links.first_look(address, [MARKER_KEY, note_name(0).encode()], deadline)
        fact, view = whose_keys(address, n_keys, value, note, time.time()), self._links.view
        ours = next(iter(view.markers.values())).cluster_id
        number = number_in(address, value, ours)
        if number is None:
            return WrongNodeError(f"{fact}. A node that joins has to be empty: give the address of another one.")
        place = view.places[number] if number < len(view.places) else ""
        if place:
            return WrongNodeError(
                f"{fact}. Its marker says that it is node {number} of this cluster, which is at {place}: give another one."
            )
        return WrongNodeError(
            f"{fact}. It was node {number} of this cluster and has left it: these keys are not read any more. A node that joins "
            "has to be empty: empty this one (FLUSHALL, flush_all), and ask again."
        )

    def _put(self, address: str, key: bytes, value: bytes, run_id: str, deadline: Deadline) -> None:
        for _ in range(_MAX_TRIES):
            (found,) = self._links.first_look(address, [key], deadline)
            if found == value or self._server.swap(address, key, found, value, run_id, deadline):
                return
        raise ProtocolError(f"node {address}: {key.decode()} changed {_MAX_TRIES} times while it was to be written")
