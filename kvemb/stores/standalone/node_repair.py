"""Repair where the cluster map is ours: one marker per node, whose small values stand on the node itself."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.map_copies import MAP_NAME, put_newer
from kvemb.coordination.markers import MARKER_KEY, Marker, why_lost
from kvemb.coordination.replicated_values import ValueCell
from kvemb.coordination.shard_owners import OwnerFence
from kvemb.errors import DeadlineExceededError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import Containers, RowKeys
from kvemb.stores.marked_nodes import MarkedNodes, MarkedState, RepairLane
from kvemb.stores.standalone.node_links import NodeLinks, NodeServer

log = logging.getLogger("kvemb")


class NodesByNumber(MarkedNodes):
    """Nodes under a map of ours, with one marker each; methods without a docstring are those of `MarkedNodes`."""

    def __init__(self, links: NodeLinks, server: NodeServer, fence: OwnerFence) -> None:
        self._links, self._server, self._fence = links, server, fence

    def keys_on(self, address: str, slots: NDArray[np.bool_], deadline: Deadline) -> Iterator[RowKeys] | None:
        return self._server.keys_on(address, slots, deadline)

    def make_way(self, containers: Containers, deadline: Deadline, lane: RepairLane | None) -> int:
        n_changed = 0
        for address in self._links.view.addresses if lane is None else [lane.address]:
            names = [bytes(key) for key in containers.keys.encode()[self.slots_of(address)[containers.keys.slots()]]]
            if names:
                run_id = self._links.look(address, deadline)[1] if lane is None else lane.process
                n_changed += self._server.make_way(address, names, containers, run_id, deadline, clear=lane is not None)
        return n_changed

    def addresses(self, deadline: Deadline) -> Sequence[str]:
        return self._links.view.addresses

    def state(self, address: str, deadline: Deadline, lane: RepairLane | None = None) -> MarkedState:
        (got, run_id), view = self._links.look(address, deadline), self._links.view
        judged = why_lost(address, view.expected(address), got, run_id, view.placements)
        if judged is None and got is not None:  # perhaps renewed by another shard
            view.renew(address, Marker.decode(got, address))
        return MarkedState(address, run_id, np.array([view.number_of(address)]), [got], [judged])

    def expected(self, state: MarkedState, at: int) -> Marker:
        # Naming the map in force: a shard that has seen a flip writes no marker from before it.
        return replace(self._links.view.expected(state.address), run_id=state.process).naming(self._links.view.map)

    def swap(self, state: MarkedState, changes: Mapping[int, Marker], deadline: Deadline) -> bool:
        return all(
            self._server.swap(state.address, MARKER_KEY, state.values[at], marker.encode(), state.process, deadline)
            for at, marker in changes.items()
        )

    def slots_of(self, address: str, lane: RepairLane | None = None) -> NDArray[np.bool_]:
        cluster_map, number = self._links.view.map, self._links.view.number_of(address)
        mine: NDArray[np.bool_] = cluster_map.slot_nodes == number
        if cluster_map.second_nodes is not None:  # rows that a move brings there belong there, too
            mine |= cluster_map.second_nodes == number
        return mine

    def cell(self, address: str, name: str, process: str, deadline: Deadline) -> ValueCell:
        return self._links.cell(address, name, process, deadline)

    def report(self, lane: RepairLane, shard: int) -> tuple[str, bytes]:
        return f"kvemb:repaired:{shard}", lane.nonce.encode()

    def covers(self, report: bytes | None, lane: RepairLane, places: NDArray[np.int64]) -> bool:
        return report == lane.nonce.encode()

    def over(self, lane: RepairLane, shards: Collection[int], deadline: Deadline) -> None:
        view = self._links.view
        view.renew(lane.address, lane.ended(replace(view.expected(lane.address), run_id=lane.process)).naming(view.map))

    def keep(self, whole: Sequence[MarkedState], deadline: Deadline) -> None:
        for state, share in deadline.shared(whole if self._fence.record else ()):
            try:
                elsewhere = partial(self._links.owners_elsewhere, state.address, share)
                self._fence.keep(self.cell(state.address, self._fence.name, state.process, share), elsewhere)
                put_newer(self.cell(state.address, MAP_NAME, state.process, share), self._links.view.map)
            except (NodeUnavailableError, DeadlineExceededError) as error:
                log.warning("%s", error)
