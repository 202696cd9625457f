"""Batches of rows over nodes under a map of ours: which node gets which rows, and the marker last on each connection.

Rows of slots under way are written at their other node, too: where a plan brings them, or where they were before (docs/adr/0058).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.markers import MARKER_KEY, Marker, diagnose
from kvemb.errors import DeadlineExceededError, NodeUnavailableError, StorageError
from kvemb.net.deadline import Deadline, WhyWaiting
from kvemb.net.exchange import Conversation, run
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.keys import RowKeys
from kvemb.schema.move_plan import CLEANING
from kvemb.stores.marked_nodes import RepairLane
from kvemb.stores.node_batch import CoalescedWrite, Grouped, NodeSteps, closed_under, group_by_node, raise_row_errors, unexpected_value
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.standalone.node_links import NodeLinks, value_of
from kvemb.stores.standalone.nodes_view import NodesView, moved_meanwhile
from kvemb.wire.codec import Codec, RecordsToWrite
from kvemb.wire.replies import Step, UnexpectedValueError

T = TypeVar("T", bound=np.generic)
SlotOwners = NDArray[np.uint16]
"""uint16 [16384]: the node of each slot."""
Plan = list[tuple[int, NodeSteps]]
_CONFLICT = 2  # of an erase; see `Codec.erase_steps`


class NodeRows:
    """Runs batches of rows over nodes under a map of ours, one exchange with all of them per batch."""

    def __init__(self, links: NodeLinks, codec: Codec, *, cas: bool) -> None:
        self._links, self._codec, self._cas = links, codec, cas

    def read(
        self, parts: Sequence[ReadPart], deadline: Deadline, lane: RepairLane | None = None, owners: SlotOwners | None = None
    ) -> list[ReadResult]:
        """Read parts."""
        plan: Plan = []
        meanwhile: list[Callable[[], None]] = []
        results, view = [], self._links.view  # one for all of the batch
        for part in parts:
            kinds, n = self._codec.read_kinds(part.keys, part.prefix_bytes), len(part.keys.ids)
            nodes = None if owners is None and view.map.n_nodes == 1 else _nodes_of(part.keys, view, lane, owners)
            grouped = group_by_node(part.keys, nodes, kinds)
            records = np.empty((n, part.prefix_bytes), np.uint8) if part.into is None else part.into
            every_token = np.zeros(n, dtype=np.uint64) if part.tokens and self._cas else None
            every_foreign = np.zeros(n, dtype=bool) if part.foreign else None
            result = ReadResult(records, np.zeros(n, dtype=bool), grouped.order, every_token, every_foreign)
            results.append(result)
            if part.meanwhile is not None:
                meanwhile.append(partial(part.meanwhile, grouped.order))
            for node, rows in grouped.shares:
                tokens = None if every_token is None else every_token[rows]
                foreign = None if every_foreign is None else every_foreign[rows]
                keys = grouped.keys if len(grouped.shares) == 1 else grouped.keys[rows]
                steps = self._codec.read_steps(keys, part.record_bytes, result.records[rows], result.found[rows], tokens, foreign)
                meanwhile += [step.reply.prepare for step in steps]
                plan.append((node, NodeSteps(view.places[node], keys, steps)))
        self._run(view, plan, deadline, lane, meanwhile)
        return results

    def write(
        self, parts: Sequence[WritePart], deadline: Deadline, lane: RepairLane | None = None, owners: SlotOwners | None = None
    ) -> list[WriteResult]:
        """Write parts."""
        coalesced = CoalescedWrite(parts, one_node=self._links.view.map.n_nodes == 1)
        plan: Plan = []
        outs: list[tuple[Grouped, NDArray[np.uint8], NDArray[np.uint64] | None]] = []
        view = self._links.view
        for part in coalesced.parts:
            kinds = self._codec.write_kinds(part.keys, part.tokens)
            grouped = group_by_node(part.keys, _nodes_of(part.keys, view, lane, owners), kinds)
            out = np.zeros(len(part.records), dtype=np.uint8)
            order = slice(None) if grouped.order is None else grouped.order
            keys, records = grouped.keys, RecordsToWrite(part.records, grouped.order)
            tokens = part.tokens[order].copy() if part.tokens is not None and self._cas else None
            outs.append((grouped, out, tokens))
            for node, rows in grouped.shares:
                steps = self._codec.write_steps(keys[rows], records[rows], None if tokens is None else tokens[rows], out[rows])
                plan.append((node, NodeSteps(view.places[node], grouped.keys[rows], steps)))
        self._run(view, plan, deadline, lane, owner_last=self._cas and lane is None)
        return coalesced.results(
            [WriteResult(_ungroup(g, out == 0), None if tokens is None else _ungroup(g, tokens)) for g, out, tokens in outs]
        )

    def erase(
        self, parts: Sequence[WritePart], deadline: Deadline, lane: RepairLane | None = None, owners: SlotOwners | None = None
    ) -> list[NDArray[np.bool_]]:
        """Delete the rows of parts."""
        plan: Plan = []
        outs: list[tuple[Grouped, NDArray[np.uint8]]] = []
        view = self._links.view
        for part in parts:
            grouped = group_by_node(part.keys, _nodes_of(part.keys, view, lane, owners), self._codec.write_kinds(part.keys, None))
            out = np.zeros(len(part.keys), dtype=np.uint8)
            outs.append((grouped, out))
            order = slice(None) if grouped.order is None else grouped.order
            tokens = part.tokens[order] if part.tokens is not None and self._cas else None
            for node, rows in grouped.shares:
                steps = self._codec.erase_steps(grouped.keys[rows], out[rows], None if tokens is None else tokens[rows])
                plan.append((node, NodeSteps(view.places[node], grouped.keys[rows], steps)))
        self._run(view, plan, deadline, lane)
        return [_ungroup(grouped, out < _CONFLICT) for grouped, out in outs]

    def _run(
        self,
        view: NodesView,
        plan: Plan,
        deadline: Deadline,
        lane: RepairLane | None,
        meanwhile: Sequence[Callable[[], None]] = (),
        *,
        owner_last: bool = False,
    ) -> None:
        """Run a batch's steps at its nodes, the marker last on each connection.

        `owner_last`: the owner record after the rows, too. A token that was read after its row was written is of that write only if no
        newer owner of the shard can have written the row in between. (A repair keeps no tokens.)
        """
        by_node: dict[str, list[Step]] = {}
        for _, share in plan:
            by_node.setdefault(share.address, []).extend(share.steps)
        with (self._links.pool if lane is None else self._links.plain_pool).lease(by_node, deadline) as links:
            # Connecting may have renewed the expected markers; from here on a node that is repaired meanwhile fails the batch.
            expected: dict[str, Marker] = {}
            for node, share in plan:
                marker = view.markers.get(share.address) if lane is None else lane.begun(view.expected(share.address))
                if marker is None or marker.node != node:
                    raise moved_meanwhile(share.address)
                expected[share.address] = marker
            markers, owners = {}, {}
            for address, steps in by_node.items():
                link, marker = links[address], expected[address]
                if (
                    link.run_id != marker.run_id
                ):  # a link from before the server was started again is dead; this one is newer than the marker
                    raise diagnose(address, replace(marker, run_id=link.run_id), marker.encoded)
                if owner_last and self._links.owner_key:
                    step, owners[address] = self._codec.get_step(self._links.owner_key)
                    steps.append(step)
                step, markers[address] = self._codec.get_step(MARKER_KEY)
                steps.append(step)
            try:
                run([Conversation(links[address], steps) for address, steps in by_node.items()], deadline, meanwhile)
            except UnexpectedValueError as error:
                raise unexpected_value([share for _, share in plan], error) from error
            except NodeUnavailableError as error:
                raise closed_under([step for _, share in plan for step in share.steps], self._codec.limit, error) from error
            except DeadlineExceededError:
                raise_row_errors([share for _, share in plan])  # a node that refuses row by row takes long: the reason tells more
                raise
            if self._codec.limit.narrow:
                self._codec.limit.went_well()
            for address, reply in markers.items():
                if reply.error is not None or reply.value != expected[address].encoded:
                    view.require(address, expected[address], value_of(address, reply))
            for address, reply in owners.items():
                self._links.require_owner(address, value_of(address, reply), deadline)
        raise_row_errors([share for _, share in plan])


def _nodes_of(keys: RowKeys, view: NodesView, lane: RepairLane | None, owners: SlotOwners | None) -> NDArray[np.uint16] | None:
    """The node of each key: uint16 [n]; None where all belong to node 0."""
    if lane is not None and view.map.n_nodes > 1:
        return np.full(len(keys), view.number_of(lane.address), np.uint16)
    return view.map.nodes_of(keys) if owners is None else owners[keys.slots()]


def _ungroup(grouped: Grouped, values: NDArray[T]) -> NDArray[T]:
    if grouped.order is None:
        return values
    out = np.empty_like(values)
    out[grouped.order] = values
    return out


class MovingRows:
    """Reads and writes rows of moving slots at their other node. Good for as long as the map is that one; see `OtherNodes`."""

    def __init__(self, rows: NodeRows, cluster_map: ClusterMap) -> None:
        plan = cluster_map.plan
        assert plan is not None
        self._rows, self._owners = rows, plan.slot_owners
        self.written, self.flipped = plan.writes_both, plan.flipped
        self.slots = cluster_map.slot_nodes != self._owners
        if not self.written:  # a node on its way out keeps its rows, and need not be there any more
            self.slots &= ~np.isin(self._owners, plan.leaving if plan.phase == CLEANING else plan.joining)
        self._away = WhyWaiting()

    def has(self, keys: RowKeys) -> NDArray[np.bool_]:
        moving: NDArray[np.bool_] = self.slots[keys.slots()]
        return moving

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        with self._noting():
            return self._rows.read(parts, deadline, owners=self._owners)

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        with self._noting():
            return self._rows.write(parts, deadline, owners=self._owners)

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        with self._noting():
            return self._rows.erase(parts, deadline, owners=self._owners)

    def trouble(self, longer_than_s: float) -> str:
        return self._away.lasting(longer_than_s)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            self._away.is_news(f"{type(error).__name__}: {error}")
            raise
        self._away.over()
