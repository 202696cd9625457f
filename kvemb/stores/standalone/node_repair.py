"""Repair where the cluster map is ours: one marker per node, with a nonce while it is repaired. The states of a marker, and their order.

How a value is read, or replaced on a condition, is known to the nodes (`MarkedNodes`).
"""

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.map_copies import MAP_NAME, decode_map, is_behind
from kvemb.coordination.markers import MARKER_KEY, Marker, Placements, Why, as_under, diagnose, why_lost
from kvemb.coordination.replicated_values import are_damaged
from kvemb.coordination.shard_owners import OwnerFence
from kvemb.errors import DeadlineExceededError, InvalidInputError, NodeUnavailableError, ProtocolError, WrongNodeError
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import RowKeys
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.standalone.node_links import NodeLinks, NodeServer
from kvemb.stores.standalone.node_rows import NodeRows, RepairLane
from kvemb.stores.standalone.nodes_view import moved_meanwhile
from kvemb.stores.store_repair import LostNode, StoreRepair

_MAX_TRIES = 100
log = logging.getLogger("kvemb")


class MarkedNodes(Protocol):
    """The part of the nodes that a repair uses."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the nodes are, in order."""

    @property
    def map(self) -> ClusterMap:
        """Which node holds which slot."""

    def number_of(self, address: str) -> int:
        """The number of a node."""

    def expected(self, address: str) -> Marker:
        """The marker that the node should have."""

    @property
    def placements(self) -> Placements:
        """The placements that markers may name."""

    def look(self, address: str, deadline: Deadline) -> tuple[bytes | None, str]:
        """Return the value in the place of the marker, and the run id of the server process that sent it."""

    def peek(self, address: str, keys: list[bytes], deadline: Deadline) -> list[bytes | None]:
        """Read small values of one node, whatever its marker says."""

    def require_ours(self, address: str, copy: bytes | None, deadline: Deadline) -> None:
        """Raise once another process owns the shard, by the node's copy of the owner record; see `OwnerFence.require_ours`."""

    def swap(self, address: str, key: bytes, old: bytes | None, new: bytes, run_id: str, deadline: Deadline) -> bool:
        """Replace a small value if it is `old` (None: if there is none) and the server process has this run id, in one step."""


class NodeRepair(StoreRepair):
    """Repair under a map of ours, but for its rows; methods without a docstring are those of `StoreRepair`.

    Args:
        nodes: those that are repaired.
        fence: the owner that the store writes as.
    """

    def __init__(self, nodes: MarkedNodes, fence: OwnerFence) -> None:
        self._nodes, self._fence = nodes, fence

    # --- the state of a node ----------------------------------------------------------------------------------------------------

    def lost_nodes(self, deadline: Deadline) -> list[LostNode]:
        lost = []
        for address, share in deadline.shared(self._nodes.addresses):
            try:
                found = self._judge(address, *self._nodes.look(address, share))
            except (NodeUnavailableError, DeadlineExceededError):
                continue
            if found is not None:
                lost.append(LostNode(address, *found))
            else:
                self._keep_copies(address, share)
        return lost

    def begin(self, address: str, deadline: Deadline, *, even_if_whole: bool = False) -> str | None:
        for _ in range(_MAX_TRIES):
            got, run_id = self._nodes.look(address, deadline)
            found = self._judge(address, got, run_id)
            if found is None and not even_if_whole:
                return None
            if found is not None and found[1] is not None:
                return found[1]
            nonce = os.urandom(8).hex()
            begun = self._in_force(replace(self._nodes.expected(address), run_id=run_id, repair=nonce, repairing=True))
            if self._nodes.swap(address, MARKER_KEY, got, begun.encode(), run_id, deadline):
                return nonce
        raise ProtocolError(f"node {address}: its marker changed {_MAX_TRIES} times while a repair was to begin there")

    def keys_of(self, address: str, keys: RowKeys) -> NDArray[np.bool_]:
        cluster_map = self._nodes.map
        if cluster_map.n_nodes == 1:
            return np.ones(len(keys), dtype=bool)
        number, slots = self._nodes.number_of(address), keys.slots()
        mine: NDArray[np.bool_] = cluster_map.slot_nodes[slots] == number
        if cluster_map.second_nodes is not None:  # rows that a move brings there belong there, too
            mine |= cluster_map.second_nodes[slots] == number
        return mine

    def report(self, address: str, nonce: str, shard: int, deadline: Deadline) -> None:
        run_id = self.require_repair(address, nonce, deadline).run_id
        if self._fence.record:
            self._put_back_owner(address, run_id, deadline)
        self._put_map(address, run_id, deadline)
        self._replace(address, _report_key(shard), nonce.encode(), run_id, deadline)
        self.require_repair(address, nonce, deadline)

    def put_value(self, address: str, nonce: str, name: str, value: bytes, deadline: Deadline) -> None:
        run_id = self.require_repair(address, nonce, deadline).run_id
        self._replace(address, name.encode(), value, run_id, deadline)
        self.require_repair(address, nonce, deadline)

    def finish(self, address: str, nonce: str, shards: Collection[int], deadline: Deadline) -> bool:
        got, run_id = self._nodes.look(address, deadline)
        if got is not None and self._judge(address, got, run_id) is None and Marker.decode(got, address).repair == nonce:
            return True  # another shard was faster
        repairing = self.require_repair(address, nonce, deadline)
        reports = self._nodes.peek(address, [_report_key(shard) for shard in shards], deadline)
        if any(report != nonce.encode() for report in reports):
            return False
        whole = self._in_force(replace(repairing, repairing=False))
        if self._nodes.swap(address, MARKER_KEY, repairing.encode(), whole.encode(), repairing.run_id, deadline):
            return True
        got, run_id = self._nodes.look(address, deadline)
        if got is None or self._judge(address, got, run_id) is not None or Marker.decode(got, address).repair != nonce:
            raise diagnose(address, repairing, got)
        return True

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _judge(self, address: str, got: bytes | None, run_id: str) -> tuple[Why, str | None] | None:
        return why_lost(address, self._nodes.expected(address), got, run_id, self._nodes.placements)

    def _in_force(self, marker: Marker) -> Marker:
        """The same marker, naming the map in force: a shard that has seen a flip writes no marker from before it."""
        return marker.naming(self._nodes.map)

    def require_repair(self, address: str, nonce: str, deadline: Deadline) -> Marker:
        """The marker of a repair that goes on.

        Raises:
            NodeLostError, NodeSuspectError: it does not: the node has lost its data or its process again, or was finished.
        """
        got, run_id = self._nodes.look(address, deadline)
        wanted = replace(self._nodes.expected(address), run_id=run_id, repair=nonce, repairing=True)
        if got == wanted.encode():
            return wanted
        with suppress(WrongNodeError):
            marker = None if got is None else Marker.decode(got, address)
            if marker is not None and as_under(marker, wanted, self._nodes.placements) == wanted:
                return marker
        raise diagnose(address, wanted, got)

    def _keep_copies(self, address: str, deadline: Deadline) -> None:
        """Put our owner record and the cluster map back on a whole node where another program has damaged them."""
        name, record = self._fence.name, self._fence.record
        if not record:
            return
        try:
            found, map_copy = self._nodes.peek(address, [name.encode(), MAP_NAME.encode()], deadline)
            if found != record:
                self._nodes.require_ours(address, found, deadline)
                mend_copy(self._nodes, address, name, found, record, deadline)
            if map_copy is None or are_damaged([map_copy], decode_map)[0]:
                log.error("node %s: its copy of the cluster map is missing or damaged", address)
                self._put_map(address, self._nodes.look(address, deadline)[1], deadline)
        except (NodeUnavailableError, DeadlineExceededError) as error:
            log.warning("%s", error)

    def _put_map(self, address: str, run_id: str, deadline: Deadline) -> None:
        put_map(self._nodes, address, self._nodes.map, run_id, deadline)

    def _put_back_owner(self, address: str, run_id: str, deadline: Deadline) -> None:
        key, record = self._fence.name.encode(), self._fence.record
        for _ in range(_MAX_TRIES):
            (found,) = self._nodes.peek(address, [key], deadline)
            self._fence.require_not_behind([found])
            if found == record or self._nodes.swap(address, key, found, record, run_id, deadline):
                return
        raise ProtocolError(f"node {address}: {key.decode()} changed {_MAX_TRIES} times while it was to be put back")

    def _replace(self, address: str, key: bytes, value: bytes, run_id: str, deadline: Deadline) -> None:
        """Write a small value, whatever stands there, on that server process only."""
        for _ in range(_MAX_TRIES):
            (found,) = self._nodes.peek(address, [key], deadline)
            if found == value or self._nodes.swap(address, key, found, value, run_id, deadline):
                return
        raise ProtocolError(f"node {address}: {key.decode()} changed {_MAX_TRIES} times while it was to be written")


class PlacedRepair(NodeRepair):
    """The facet `repair` of a store under a map of ours.

    Args:
        links: to the nodes.
        server: of their kind.
        batches: of rows.
        fence: the owner that the store writes as.
    """

    def __init__(self, links: NodeLinks, server: NodeServer, batches: NodeRows, fence: OwnerFence) -> None:
        super().__init__(links, fence)
        self._server, self._batches = server, batches

    def keys_on(self, address: str, deadline: Deadline) -> Iterator[RowKeys] | None:
        return self._server.keys_on(address, deadline)

    def read(self, address: str, nonce: str, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return self._batches.read(parts, deadline, self._lane(address, nonce, parts, deadline))

    def write(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self._batches.write(parts, deadline, self._lane(address, nonce, parts, deadline))

    def erase(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        return self._batches.erase(parts, deadline, self._lane(address, nonce, parts, deadline))

    def make_way(self, keys: RowKeys, deadline: Deadline, *, repair: tuple[str, str] | None = None) -> int:
        found, n_changed = keys.containers(), 0
        if found is None:
            return 0
        for address in self._nodes.addresses if repair is None else [repair[0]]:
            names = [bytes(key) for key in found.keys.encode()[self.keys_of(address, found.keys)]]
            if names:
                run_id = self._nodes.look(address, deadline)[1] if repair is None else self.require_repair(*repair, deadline).run_id
                n_changed += self._server.make_way(address, names, found, run_id, deadline, clear=repair is not None)
        return n_changed

    def _lane(self, address: str, nonce: str, parts: Sequence[ReadPart] | Sequence[WritePart], deadline: Deadline) -> RepairLane:
        """The lane of a batch in repair; raises where a row is of another node."""
        if not all(self.keys_of(address, part.keys).all() for part in parts):
            if self._nodes.map.plan is not None:  # its phase has changed since the caller chose the rows
                raise moved_meanwhile(address)
            raise InvalidInputError(f"a batch that repairs node {address} holds rows of other nodes")
        return RepairLane(self._nodes.number_of(address), self.require_repair(address, nonce, deadline))


def mend_copy(nodes: MarkedNodes, address: str, name: str, copy: bytes | None, value: bytes, deadline: Deadline) -> None:
    """Put a value in the place of a node's damaged copy, if that still stands there."""
    if nodes.swap(address, name.encode(), copy, value, nodes.look(address, deadline)[1], deadline):
        log.error("node %s: the value under the key %s was damaged and has been put right", address, name)


def put_map(nodes: MarkedNodes, address: str, cluster_map: ClusterMap, run_id: str, deadline: Deadline) -> None:
    """Give a node this map, unless it has a newer one."""
    key = MAP_NAME.encode()
    for _ in range(_MAX_TRIES):
        (found,) = nodes.peek(address, [key], deadline)
        if not is_behind(found, cluster_map):
            return
        if nodes.swap(address, key, found, cluster_map.encode(), run_id, deadline):
            return
    raise ProtocolError(f"node {address}: {MAP_NAME} changed {_MAX_TRIES} times while it was to be written")


def _report_key(shard: int) -> bytes:
    return f"kvemb:repaired:{shard}".encode()
