"""What memcached and standalone Redis share: nodes under a node map of ours, one marker per node.

A subclass brings the protocol's codec, opens checked links, and answers for administration; routing, batches, markers and errors are here.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.errors import NodeLostError, NotProvisionedError, WrongNodeError
from kvemb.net.deadline import Deadline
from kvemb.net.exchange import Conversation, run
from kvemb.net.link import Link
from kvemb.net.pool import LinkPool
from kvemb.stores.base import ReadPart, ReadResult, Store, WritePart, WriteResult
from kvemb.stores.batch import Grouped, NodeSteps, group, raise_row_errors, server_error, unexpected_value
from kvemb.stores.markers import MARKER_KEY, Marker, diagnose
from kvemb.stores.topology import NodeMap
from kvemb.wire.codec import Codec, Records
from kvemb.wire.replies import BlobReply, Step, UnexpectedValueError

R = TypeVar("R")
T = TypeVar("T", bound=np.generic)
Plan = list[tuple[int, NodeSteps]]


class NodeStore(Store):
    """Rows spread over nodes by the slots of their keys.

    Args:
        config: the storage section.
        role: "trainer", or "shard:<n>" for the one process that writes shard n's rows.
        codec: of the nodes' protocol.
    """

    def __init__(self, config: StorageConfig, role: str, codec: Codec) -> None:
        self.config = config
        self.role = role
        self._codec = codec
        self._map = NodeMap(config.nodes)
        self._markers: dict[str, Marker] = {}
        self._pool = LinkPool(self._checked_link, self._dropped)

    # --- what a subclass brings -------------------------------------------------------------------------------------------------

    @abstractmethod
    def _open_link(self, address: str, deadline: Deadline) -> Link:
        """Connect and authenticate."""

    @abstractmethod
    def _inspect(self, address: str, deadline: Deadline) -> tuple[str, int]:
        """Refuse settings that can lose rows; return the server process's run id ("" if it has none) and its number of keys."""

    def _dropped(self, link: Link) -> None:
        """Told of a link that was given up with requests in flight."""

    # --- opening ----------------------------------------------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._map.addresses

    def open(self, deadline: Deadline) -> list[Marker]:
        run_ids = {address: self._inspect(address, deadline)[0] for address in self.addresses}
        raw = self._blobs(MARKER_KEY, deadline)
        first = next((value for value in raw if value is not None), None)
        if first is None:
            raise NotProvisionedError(
                f"none of the nodes {', '.join(self.addresses)} holds a marker: the cluster is new, or all of its data is gone. "
                "Parameter-server shard 0 provisions empty nodes when it starts for the first time."
            )
        origin = Marker.decode(first, self.addresses[raw.index(first)])
        markers = {}
        for index, (address, value) in enumerate(zip(self.addresses, raw, strict=True)):
            expected = self._marker(origin.cluster_id, index, origin.generation, run_ids[address])
            if value is None:  # lost, whatever else differs: other nodes do hold a marker
                raise NodeLostError(
                    f"node {address}: holds no marker while other nodes do: it was restarted empty, flushed or replaced. Its rows are lost "
                    "there; nothing was re-initialised."
                )
            if value != expected.encode():
                raise diagnose(address, expected, value)
            markers[address] = expected
        self._markers = markers
        return list(markers.values())

    def provision(self, cluster_id: bytes, generation: bytes, deadline: Deadline) -> None:
        inspected = [self._inspect(address, deadline) for address in self.addresses]
        raw = self._blobs(MARKER_KEY, deadline)
        wanted = [self._marker(cluster_id, i, generation, run_id) for i, (run_id, _) in enumerate(inspected)]
        for address, (_, n_keys), value, marker in zip(self.addresses, inspected, raw, wanted, strict=True):
            if value is None and n_keys:
                raise WrongNodeError(
                    f"node {address}: holds {n_keys} keys and no marker. Provisioning writes on empty nodes only; empty the node "
                    "yourself if its data is not needed, or give another one."
                )
            if value is not None and value != marker.encode():
                raise diagnose(address, marker, value)
        self._put_blobs(MARKER_KEY, [marker.encode() for marker in wanted], deadline)

    def close(self) -> None:
        self._pool.close()

    # --- rows -------------------------------------------------------------------------------------------------------------------

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        plan: Plan = []
        results = []
        for part in parts:
            grouped = group(part.keys, self._map.nodes_of(part.keys))
            result = self._empty_result(part, grouped)
            results.append(result)
            keys = grouped.keys
            for node, rows in grouped.shares:
                tokens = None if result.tokens is None else result.tokens[rows]
                steps = self._codec.read_steps(keys[rows], part.record_bytes, result.records[rows], result.found[rows], tokens)
                plan.append((node, NodeSteps(self.addresses[node], grouped.keys.ids[rows], steps)))
        self._run(plan, deadline)
        return results

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        plan: Plan = []
        outs: list[tuple[Grouped, NDArray[np.uint8], NDArray[np.uint64] | None]] = []
        for part in parts:
            # Conditional writes want new rows first, so that each kind of request has one stride.
            known = part.tokens != 0 if part.tokens is not None and self.capabilities.cas else None
            grouped = group(part.keys, self._map.nodes_of(part.keys), known)
            out = np.zeros(len(part.keys), dtype=np.uint8)
            order = slice(None) if grouped.order is None else grouped.order
            keys, records = grouped.keys, Records(part.records, grouped.order)
            tokens = part.tokens[order].copy() if part.tokens is not None and self.capabilities.cas else None
            outs.append((grouped, out, tokens))
            for node, rows in grouped.shares:
                steps = self._codec.write_steps(keys[rows], records[rows], None if tokens is None else tokens[rows], out[rows])
                plan.append((node, NodeSteps(self.addresses[node], grouped.keys.ids[rows], steps)))
        self._run(plan, deadline)
        return [WriteResult(_ungroup(g, out == 0), None if tokens is None else _ungroup(g, tokens)) for g, out, tokens in outs]

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> None:
        plan: Plan = []
        for part in parts:
            grouped = group(part.keys, self._map.nodes_of(part.keys))
            out = np.zeros(len(part.keys), dtype=np.uint8)
            keys = grouped.keys
            for node, rows in grouped.shares:
                steps = self._codec.erase_steps(keys[rows], out[rows])
                plan.append((node, NodeSteps(self.addresses[node], grouped.keys.ids[rows], steps)))
        self._run(plan, deadline)

    def get_meta(self, name: str, deadline: Deadline) -> list[bytes | None]:
        return self._blobs(name.encode(), deadline)

    def put_meta(self, name: str, value: bytes, deadline: Deadline) -> None:
        self._put_blobs(name.encode(), [value] * len(self.addresses), deadline)

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _empty_result(self, part: ReadPart, grouped: Grouped) -> ReadResult:
        n = len(part.keys)
        tokens = np.zeros(n, dtype=np.uint64) if part.tokens and self.capabilities.cas else None
        return ReadResult(np.empty((n, part.prefix_bytes), np.uint8), np.zeros(n, dtype=bool), grouped.order, tokens)

    def _run(self, plan: Plan, deadline: Deadline) -> None:
        """Run a batch's steps at its nodes, the marker last on each connection."""
        by_node: dict[str, list[Step]] = {}
        for _, share in plan:
            by_node.setdefault(share.address, []).extend(share.steps)
        markers = {}
        with self._pool.lease(by_node, deadline) as links:
            for address, steps in by_node.items():
                step, markers[address] = self._codec.get_step(MARKER_KEY)
                steps.append(step)
            try:
                run([Conversation(links[address], steps) for address, steps in by_node.items()], deadline)
            except UnexpectedValueError as error:
                raise unexpected_value([share for _, share in plan], error) from error
        for address, reply in markers.items():
            self._require_marker(address, reply)
        raise_row_errors([share for _, share in plan])

    def _require_marker(self, address: str, reply: BlobReply) -> None:
        if reply.error is not None:
            raise server_error(address, reply.error)
        if reply.value != self._markers[address].encode():
            raise diagnose(address, self._markers[address], reply.value)

    def _checked_link(self, address: str, deadline: Deadline) -> Link:
        """A new connection may lead to a restarted server: look at its settings and its marker before it carries rows."""
        link = self._open_link(address, deadline)
        if address not in self._markers:
            return link
        try:
            expected = self._markers[address]
            run_id, _ = self._inspect(address, deadline)
            step, reply = self._codec.get_step(MARKER_KEY)
            run([Conversation(link, [step])], deadline)
            self._require_marker(address, reply)
            if run_id != expected.run_id:
                raise diagnose(address, self._marker(expected.cluster_id, expected.node, expected.generation, run_id), reply.value)
        except BaseException:
            link.close()
            raise
        return link

    def _marker(self, cluster_id: bytes, node: int, generation: bytes, run_id: str) -> Marker:
        return Marker(cluster_id, node, generation, self._map.digest, self._map.epoch, run_id)

    def _blobs(self, key: bytes, deadline: Deadline) -> list[bytes | None]:
        replies = self._on_every_node(deadline, lambda index: self._codec.get_step(key))
        for address, reply in zip(self.addresses, replies, strict=True):
            if reply.error is not None:
                raise server_error(address, reply.error)
        return [reply.value for reply in replies]

    def _put_blobs(self, key: bytes, values: Sequence[bytes], deadline: Deadline) -> None:
        replies = self._on_every_node(deadline, lambda index: self._codec.put_step(key, values[index]))
        for address, reply in zip(self.addresses, replies, strict=True):
            for _, line in reply.errors:
                raise server_error(address, line)

    def _on_every_node(self, deadline: Deadline, make: Callable[[int], tuple[Step, R]]) -> list[R]:
        with self._pool.lease(self.addresses, deadline) as links:
            made = [make(index) for index in range(len(self.addresses))]
            steps = [step for step, _ in made]
            run([Conversation(links[a], [step]) for a, step in zip(self.addresses, steps, strict=True)], deadline)
        return [reply for _, reply in made]


def _ungroup(grouped: Grouped, values: NDArray[T]) -> NDArray[T]:
    if grouped.order is None:
        return values
    out = np.empty_like(values)
    out[grouped.order] = values
    return out
