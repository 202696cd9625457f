"""The nodes of a store under a cluster map of ours: the map is followed, published, and named by markers; nodes join.

Publishing, renewing and joining are for shard 0, which carries moves. Before anything is expected of nodes they are looked at: which
cluster they are of, which number each has, and the newest map they know.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from kvemb.config import StorageConfig
from kvemb.coordination.map_copies import MAP_NAME, map_in_force, newest_map, put_newer
from kvemb.coordination.markers import MARKER_KEY, Identity, Marker, diagnose, first_identity
from kvemb.coordination.shard_notes import note_name, whose_keys
from kvemb.errors import (
    ConfigError,
    KvembError,
    MapChangedError,
    NodeLostError,
    NodeUnavailableError,
    NotProvisionedError,
    StorageError,
    WrongNodeError,
)
from kvemb.net.deadline import Deadline
from kvemb.process import ForkLock
from kvemb.schema.cluster_map import ClusterMap
from kvemb.stores.standalone.node_links import NodeLinks, NodeServer
from kvemb.stores.standalone.nodes_view import NodesView, places_of, places_to_write
from kvemb.stores.store_nodes import NodeStats, StoreNodes

_FOLLOW_PAUSE_S, _FOLLOW_TIMEOUT_S = 1.0, 2.0
log = logging.getLogger("kvemb")


class MappedNodes(StoreNodes):
    """The facet `nodes` of a store under a map of ours; methods without a docstring are those of `StoreNodes`."""

    def __init__(self, links: NodeLinks, server: NodeServer, config: StorageConfig, *, writes: bool) -> None:
        self._links, self._server, self._config, self._writes = links, server, config, writes
        self._nodes_now: Callable[[], tuple[str, ...]] | None = None
        self._changing, self._not_before_s = ForkLock(), 0.0
        self._look: threading.Thread | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._links.view.addresses

    @property
    def cluster_map(self) -> ClusterMap:
        return self._links.view.map

    @property
    def places(self) -> tuple[str, ...]:
        return self._links.view.places

    @property
    def repairs(self) -> dict[int, str]:
        return self._links.view.repairs

    def follow(self, nodes_now: Callable[[], tuple[str, ...]]) -> None:
        self._nodes_now = nodes_now

    def find(self, deadline: Deadline) -> None:
        with suppress(KvembError):
            view = SeenNodes(self._server, self._links).view(None, deadline, inspect=False)
            self._links.view = NodesView(view.map, view.places)

    def refresh_map(self, deadline: Deadline) -> bool:
        return not self._has_newest(deadline) and self._refresh_map(deadline)

    def _has_newest(self, deadline: Deadline) -> bool:
        """Whether every node answers, on connections that there are, and none has a newer map."""
        view, half = self._links.view, Deadline.after(deadline.remaining_s() / 2)
        found = self._links.each(lambda address, share: self._links.peek(address, [MAP_NAME.encode()], share)[0], half)
        if any(isinstance(copy, StorageError) for copy in found):
            return False
        copies = [copy for copy in found if not isinstance(copy, StorageError)]
        newest = newest_map(copies, view.addresses, view.map)
        return newest is not None and newest.version <= view.map.version

    def _refresh_map(self, deadline: Deadline, newest: ClusterMap | None = None) -> bool:
        before = self._links.view
        seen = SeenNodes(self._server, self._links)
        cluster_map, places = seen.places(before, newest or before.map, deadline)
        with self._changing:
            now = self._links.view
            overtaken = cluster_map.version < now.map.version  # by another thread, which knows of nodes that have joined since
            if self._writes and not overtaken:
                places = places_to_write(now, cluster_map, places)
            if overtaken or (cluster_map.version, places) == (now.map.version, now.places):
                return now is not before
            self._links.view = now.changed(cluster_map, places)
        if (addresses := self._links.view.addresses) != now.addresses:
            log.info("storage nodes are now at %s; until now %s", ", ".join(addresses), ", ".join(now.addresses))
        return True

    def follow_error(self, error: StorageError, deadline: Deadline | None = None) -> bool:
        """Follow nodes at other addresses, or another map, where these explain an error; return whether there are any.

        A deadline that leaves no time to look is kept: a thread of its own looks, for those who come later.
        """
        if not isinstance(error, MapChangedError):
            if time.monotonic() < self._not_before_s:  # a node that is down for long is asked for again and again
                return False
            self._not_before_s = time.monotonic() + _FOLLOW_PAUSE_S
        if self._nodes_now is not None:
            try:
                self._links.in_file = self._nodes_now()
            except ConfigError as why:
                raise type(error)(f"{error} {why}") from error
        elif not isinstance(error, (MapChangedError, NodeUnavailableError, WrongNodeError)):
            return False
        looks_s = min(self._config.timeout_s, _FOLLOW_TIMEOUT_S)
        if deadline is None or deadline.remaining_s() >= looks_s:
            return self._refresh_map(Deadline.after(looks_s))
        before = self._links.view
        with self._changing:
            if self._look is None or not self._look.is_alive():
                self._look = threading.Thread(target=self._look_beside, args=(looks_s,), name="kvemb-nodes", daemon=True)
                self._look.start()
            look = self._look
        look.join(deadline.remaining_s())
        return self._links.view is not before

    def _look_beside(self, looks_s: float) -> None:
        with suppress(KvembError):
            self._refresh_map(Deadline.after(looks_s))

    def close(self) -> None:
        """Wait for a thread that looks for nodes; its look is bounded."""
        if self._look is not None:
            self._look.join(_FOLLOW_TIMEOUT_S)

    # --- changing the map ---------------------------------------------------------------------------------------------------------

    def publish_map(self, cluster_map: ClusterMap, deadline: Deadline) -> list[str]:
        before = self.addresses  # nodes that leave get it, too
        if cluster_map.version > self.cluster_map.version:
            self._refresh_map(deadline, cluster_map)
        missed = []
        for address in dict.fromkeys([*self.addresses, *before]):
            try:
                put_newer(self._links.cell(address, MAP_NAME, self._links.look(address, deadline)[1], deadline), cluster_map)
            except StorageError as error:
                missed.append(str(error))
        return missed

    def renew_markers(self, deadline: Deadline) -> list[str]:
        missed = []
        for address in self._links.view.addresses:
            try:
                self._renew_marker(address, deadline)
            except StorageError as error:
                missed.append(str(error))
        return missed

    def _renew_marker(self, address: str, deadline: Deadline) -> None:
        """Let a node's marker name the map in force."""
        view = self._links.view

        def renewed(got: bytes | None) -> bytes:
            if got is None:
                raise NodeLostError(f"node {address}: its marker is gone; the parameter servers bring its rows back first")
            marker = Marker.decode(got, address)
            if (marker.map_digest, marker.map_serial) not in view.placements:
                raise diagnose(address, view.expected(address), got)
            return marker.naming(view.map).encode()

        self._links.cell(address, MARKER_KEY.decode(), self._links.look(address, deadline)[1], deadline).update(renewed)

    def require_empty(self, address: str, deadline: Deadline) -> None:
        n_keys = self._server.inspect(address, deadline)[1]
        if n_keys:
            raise self._not_empty(address, n_keys, deadline)

    def prepare(self, address: str, number: int, metas: Mapping[str, bytes], deadline: Deadline) -> None:
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
            self._links.cell(address, name, run_id, deadline, joins=True).put(value_)
        if not self._server.swap(address, MARKER_KEY, None, wanted.encode(), run_id, deadline):
            raise WrongNodeError(f"node {address}: another program writes there; nothing was changed in the cluster. Look, and try again.")

    def _not_empty(self, address: str, n_keys: int, deadline: Deadline) -> WrongNodeError:
        """Say which cluster's keys these are before any advice: the address may be another cluster's, or a node of ours by another name."""
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

    # --- the servers' own statistics ------------------------------------------------------------------------------------------------

    def stats(self, deadline: Deadline) -> list[NodeStats]:
        self._links.pool.require_open()
        return super().stats(deadline)

    def stats_of(self, address: str, deadline: Deadline) -> NodeStats:
        return self._server.stats(address, deadline)

    def max_record_bytes(self, address: str, deadline: Deadline) -> int | None:
        return self._server.max_record_bytes(address, deadline)

    def settings(self, address: str, deadline: Deadline) -> dict[str, str]:
        return self._server.settings(address, deadline)


class SeenNodes:
    """The answers of nodes, each asked once. For one call."""

    def __init__(self, server: NodeServer, links: NodeLinks) -> None:
        self._server, self._links = server, links
        self._run_ids: dict[str, str] = {}
        self._values: dict[str, list[bytes | None]] = {}  # marker and map
        self._errors: dict[str, KvembError] = {}

    def view(self, known: Identity | None, deadline: Deadline, *, inspect: bool = True) -> NodesView:
        """Return the nodes of a cluster, found from those that kvemb.yaml names or that are known; markers are as they should be."""
        self._look([*self._links.in_file, *(() if known is None else known.nodes)], deadline, inspect=inspect)
        if not self._values or (self._errors and not any(marker for marker, _ in self._values.values())):
            raise next(iter(self._errors.values()))
        identity = known or self._identity()
        cluster_map = map_in_force([copy for _, copy in self._values.values()], [f"node {a}" for a in self._values], identity)
        places = places_of(cluster_map, self._links.in_file, self._numbers(identity.cluster_id))
        markers = {address: new_marker(identity, number, cluster_map) for number, address in enumerate(places) if address}
        return NodesView(cluster_map, places, markers)

    def places(self, before: NodesView, known: ClusterMap, deadline: Deadline) -> tuple[ClusterMap, tuple[str, ...]]:
        """Return the newest map, and where the nodes are by it; nodes that do not answer say nothing."""
        self._look([*before.addresses, *self._links.in_file], deadline, inspect=False)
        copies = [copy for _, copy in self._values.values()]
        cluster_map = newest_map(copies, [f"node {address}" for address in self._values], known) or known
        ours = next(iter(before.markers.values())).cluster_id
        try:
            found = places_of(cluster_map, self._links.in_file, self._numbers(ours))
        except ConfigError as error:  # addresses lead elsewhere just now; the known ones stay in use until they lead right again
            if self._links.lead_elsewhere.is_news(str(error)):
                log.warning("the cluster map of version %d is not followed yet: %s", cluster_map.version, error)
            return before.map, before.places
        self._links.lead_elsewhere.over()
        return cluster_map, found

    def require(self, address: str, deadline: Deadline) -> tuple[str, bytes | None]:
        """Return a node's run id, and the value in the place of its marker."""
        self._look([address], deadline, inspect=True)
        if address in self._errors:
            raise self._errors[address]
        return self._run_ids[address], self._values[address][0]

    def _look(self, addresses: Iterable[str], deadline: Deadline, *, inspect: bool) -> None:
        left = [address for address in dict.fromkeys(addresses) if address not in self._values and address not in self._errors]
        for address, share in deadline.shared(left):
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


def new_marker(identity: Identity, number: int, cluster_map: ClusterMap, run_id: str = "") -> Marker:
    """Return the marker of a node, after the last repair that is known."""
    repair = identity.repairs.get(number, "")
    return Marker(identity.cluster_id, number, identity.generation, cluster_map.digest, cluster_map.serial, run_id, repair)


def number_in(address: str, value: bytes | None, cluster_id: bytes) -> int | None:
    """Return the number in a cluster that a node's marker says; None where it is none of that cluster's."""
    try:
        marker = None if value is None else Marker.decode(value, address)
    except WrongNodeError:
        return None
    return marker.node if marker is not None and marker.cluster_id == cluster_id else None
