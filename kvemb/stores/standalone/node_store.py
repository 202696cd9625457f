"""What memcached and standalone Redis share: nodes under a node map of ours, one marker per node.

A subclass brings the protocol's codec, opens checked links, and answers for administration; routing, batches, markers and errors are here.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.coordination.markers import MARKER_KEY, Identity, Marker, accept, diagnose, first_identity, why_lost
from kvemb.coordination.node_map import NodeMap
from kvemb.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidInputError,
    NodeLostError,
    NodeSuspectError,
    NodeUnavailableError,
    NotProvisionedError,
    StorageError,
    WrongNodeError,
)
from kvemb.net.deadline import Deadline
from kvemb.net.exchange import Conversation, run
from kvemb.net.link import Link
from kvemb.net.pool import Doubts, LinkPool
from kvemb.schema.keys import RowKeys
from kvemb.stores.coalesce import read_coalesced, write_coalesced
from kvemb.stores.node_batch import Grouped, NodeSteps, group_by_node, raise_row_errors, server_error, unexpected_value
from kvemb.stores.owner_fence import OwnerFence
from kvemb.stores.read_retry import ABSENT, PASSING, ReadRetry
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from kvemb.stores.standalone.node_repair import NodeRepair
from kvemb.stores.store import Store
from kvemb.wire.codec import Codec, RecordsToWrite
from kvemb.wire.replies import BlobReply, Step, UnexpectedValueError

log = logging.getLogger("kvemb")
R = TypeVar("R")
T = TypeVar("T", bound=np.generic)
Plan = list[tuple[int, NodeSteps]]
_CONFLICT = 2  # of an erase; see `Codec.erase_steps`


class NodeStore(NodeRepair, Store):
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
        doubts = Doubts()
        self._pool = LinkPool(self._checked_link, self._dropped, doubts)
        self._plain_pool = LinkPool(self._plain_link, self._dropped, doubts)  # to nodes in any state, for repair
        self._meta_pool = self._pool
        self._retry = ReadRetry(role, config.on_lost_node)
        self._fence = OwnerFence()
        self._nodes_now: Callable[[], tuple[str, ...]] | None = None

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

    def open(self, deadline: Deadline, known: Identity | None = None) -> list[Marker]:
        return self._retry(lambda: self._open(deadline, known), deadline, PASSING)

    def _open(self, deadline: Deadline, known: Identity | None) -> list[Marker]:
        self._pool.require_open()
        self._meta_pool = self._pool if known is None else self._plain_pool
        run_ids = {address: self._inspect(address, deadline)[0] for address in self.addresses}
        raw = self._blobs(MARKER_KEY, deadline)
        identity = known or self._identity(raw)
        markers = {}
        for index, (address, value) in enumerate(zip(self.addresses, raw, strict=True)):
            expected = self._marker(identity, index, run_ids[address])
            if known is not None and why_lost(address, expected, value, expected.run_id):
                markers[address] = expected
                continue
            if value is None:  # lost, whatever else differs: other nodes do hold a marker
                raise NodeLostError(
                    f"node {address}: holds no marker while other nodes do: it was restarted empty, flushed or replaced. Its rows are lost "
                    "there; nothing was re-initialised."
                )
            markers[address] = accept(address, expected, value, expected.run_id)
        self._markers = markers
        return list(markers.values())

    def follow(self, nodes_now: Callable[[], tuple[str, ...]]) -> None:
        self._nodes_now = nodes_now

    def provision(self, cluster_id: bytes, generation: bytes, deadline: Deadline) -> None:
        inspected = [self._inspect(address, deadline) for address in self.addresses]
        raw = self._blobs(MARKER_KEY, deadline)
        wanted = [self._marker(Identity(cluster_id, generation), i, run_id) for i, (run_id, _) in enumerate(inspected)]
        for address, (_, n_keys), value, marker in zip(self.addresses, inspected, raw, wanted, strict=True):
            if value is None and n_keys:
                raise WrongNodeError(
                    f"node {address}: holds {n_keys} keys and no marker. Provisioning writes on empty nodes only; empty the node "
                    "yourself if its data is not needed, or give another one."
                )
            if value is not None and value != marker.encode():
                raise diagnose(address, marker, value)
        self._put_blobs(MARKER_KEY, [marker.encode() for marker in wanted], deadline)

    def fence(self, shard: int, epoch: int, deadline: Deadline, *, still_ours: Callable[[], None] | None = None) -> None:
        self._fence.begin(shard, epoch, lambda name: self.get_meta(name, deadline), still_ours)

    def close(self) -> None:
        self._pool.close()
        self._plain_pool.close()

    # --- rows -------------------------------------------------------------------------------------------------------------------

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return self._retry(self._following(lambda: self._read(parts, deadline)), deadline)

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self._write(parts, deadline)

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        return self._erase(parts, deadline)

    def read_in_repair(self, address: str, nonce: str, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        return self._read(parts, deadline, self._lane(address, nonce, parts, deadline))

    def write_in_repair(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self._write(parts, deadline, self._lane(address, nonce, parts, deadline))

    def erase_in_repair(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        return self._erase(parts, deadline, self._lane(address, nonce, parts, deadline))

    def _read(self, parts: Sequence[ReadPart], deadline: Deadline, repair: Marker | None = None) -> list[ReadResult]:
        return read_coalesced(parts, lambda joined: self._read_parts(joined, deadline, repair))

    def _write(self, parts: Sequence[WritePart], deadline: Deadline, repair: Marker | None = None) -> list[WriteResult]:
        one_node = len(self.addresses) == 1
        return write_coalesced(parts, lambda joined: self._write_parts(joined, deadline, repair), one_node=one_node)

    def _read_parts(self, parts: Sequence[ReadPart], deadline: Deadline, repair: Marker | None) -> list[ReadResult]:
        plan: Plan = []
        results = []
        for part in parts:
            kinds = self._codec.read_kinds(part.keys, part.prefix_bytes)
            grouped = group_by_node(part.keys, self._map.nodes_of(part.keys), kinds)
            result = self._empty_result(part, grouped)
            results.append(result)
            keys = grouped.keys
            for node, rows in grouped.shares:
                tokens = None if result.tokens is None else result.tokens[rows]
                foreign = None if result.foreign is None else result.foreign[rows]
                steps = self._codec.read_steps(keys[rows], part.record_bytes, result.records[rows], result.found[rows], tokens, foreign)
                plan.append((node, NodeSteps(self.addresses[node], grouped.keys[rows], steps)))
        self._run(plan, deadline, repair)
        return results

    def _write_parts(self, parts: Sequence[WritePart], deadline: Deadline, repair: Marker | None) -> list[WriteResult]:
        plan: Plan = []
        outs: list[tuple[Grouped, NDArray[np.uint8], NDArray[np.uint64] | None]] = []
        for part in parts:
            kinds = self._codec.write_kinds(part.keys, part.tokens)
            grouped = group_by_node(part.keys, self._map.nodes_of(part.keys), kinds)
            out = np.zeros(len(part.keys), dtype=np.uint8)
            order = slice(None) if grouped.order is None else grouped.order
            keys, records = grouped.keys, RecordsToWrite(part.records, grouped.order)
            tokens = part.tokens[order].copy() if part.tokens is not None and self.capabilities.cas else None
            outs.append((grouped, out, tokens))
            for node, rows in grouped.shares:
                steps = self._codec.write_steps(keys[rows], records[rows], None if tokens is None else tokens[rows], out[rows])
                plan.append((node, NodeSteps(self.addresses[node], grouped.keys[rows], steps)))
        self._run(plan, deadline, repair)
        return [WriteResult(_ungroup(g, out == 0), None if tokens is None else _ungroup(g, tokens)) for g, out, tokens in outs]

    def _erase(self, parts: Sequence[WritePart], deadline: Deadline, repair: Marker | None = None) -> list[NDArray[np.bool_]]:
        plan: Plan = []
        outs: list[tuple[Grouped, NDArray[np.uint8]]] = []
        for part in parts:
            grouped = group_by_node(part.keys, self._map.nodes_of(part.keys), self._codec.write_kinds(part.keys, None))
            out = np.zeros(len(part.keys), dtype=np.uint8)
            outs.append((grouped, out))
            order = slice(None) if grouped.order is None else grouped.order
            tokens = part.tokens[order] if part.tokens is not None and self.capabilities.cas else None
            for node, rows in grouped.shares:
                steps = self._codec.erase_steps(grouped.keys[rows], out[rows], None if tokens is None else tokens[rows])
                plan.append((node, NodeSteps(self.addresses[node], grouped.keys[rows], steps)))
        self._run(plan, deadline, repair)
        return [_ungroup(grouped, out < _CONFLICT) for grouped, out in outs]

    def node_of(self, keys: RowKeys) -> str:
        nodes = self._map.nodes_of(keys)
        return self.addresses[0 if nodes is None else int(nodes[0])]

    def get_meta(self, name: str, deadline: Deadline) -> list[bytes | None]:
        key = name.encode()
        return self._retry(self._following(lambda: self._blobs(key, deadline)), deadline)

    def put_meta(self, name: str, value: bytes, deadline: Deadline) -> None:
        self._put_blobs(name.encode(), [value] * len(self.addresses), deadline)

    # --- nodes that went to other addresses; the cluster map will take the place of this ------------------------------------------

    def _following(self, call: Callable[[], R]) -> Callable[[], R]:
        """What calls, and once more if nodes turn out to be at other addresses."""

        def twice() -> R:
            try:
                return call()
            except (*ABSENT, DeadlineExceededError) as error:
                if not self._moved(error):
                    raise
            return call()

        return call if self._nodes_now is None else twice

    def _moved(self, error: StorageError) -> bool:
        """Whether nodes are at other addresses now; from here on they are asked there, and have to show the markers that are expected."""
        assert self._nodes_now is not None
        try:
            now, before = self._nodes_now(), self.addresses
        except ConfigError as why:
            raise type(error)(f"{error} {why}") from error
        if now == before:
            return False
        # No lock: whoever is between the two lines finds no marker to expect at an address, and tries again.
        self._markers = {now[marker.node]: marker for marker in list(self._markers.values())}
        self._map = NodeMap(now)
        log.warning("storage nodes are at other addresses: %s; until now %s", ", ".join(now), ", ".join(before))
        return True

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _empty_result(self, part: ReadPart, grouped: Grouped) -> ReadResult:
        n = len(part.keys)
        tokens = np.zeros(n, dtype=np.uint64) if part.tokens and self.capabilities.cas else None
        records = np.empty((n, part.prefix_bytes), np.uint8) if part.into is None else part.into
        return ReadResult(records, np.zeros(n, dtype=bool), grouped.order, tokens, np.zeros(n, dtype=bool) if part.foreign else None)

    def _run(self, plan: Plan, deadline: Deadline, repair: Marker | None) -> None:
        """Run a batch's steps at its nodes, the marker last on each connection."""
        by_node: dict[str, list[Step]] = {}
        for _, share in plan:
            by_node.setdefault(share.address, []).extend(share.steps)
        markers = {}
        with (self._pool if repair is None else self._plain_pool).lease(by_node, deadline) as links:
            # Connecting may have renewed what is expected; from here on a node that is repaired meanwhile fails the batch.
            expected = {address: repair or self._expected(address) for address in by_node}
            for node, share in plan:
                if expected[share.address].node != node:
                    raise _moved_meanwhile(share.address)
            for address, steps in by_node.items():
                _require_process(links[address], expected[address])
                step, markers[address] = self._codec.get_step(MARKER_KEY)
                steps.append(step)
            try:
                run([Conversation(links[address], steps) for address, steps in by_node.items()], deadline)
            except UnexpectedValueError as error:
                raise unexpected_value([share for _, share in plan], error) from error
            except DeadlineExceededError:
                raise_row_errors([share for _, share in plan])  # a node that refuses row by row takes its time: why says more than how long
                raise
            for address, reply in markers.items():
                if _value(address, reply) != expected[address].encode():
                    raise diagnose(address, expected[address], reply.value)
        raise_row_errors([share for _, share in plan])

    def _checked_link(self, address: str, deadline: Deadline) -> Link:
        """A new connection may lead to a restarted server: look at its settings and its marker before it carries rows."""
        link = self._plain_link(address, deadline)
        try:
            if markers := self._markers:  # one and the same, should nodes move meanwhile
                expected = self._expected(address)
                self._inspect(address, deadline)
                accepted = accept(address, expected, self._ask(link, [MARKER_KEY], deadline)[0], link.run_id)
                if address in markers:
                    markers[address] = accepted
        except BaseException:
            link.close()
            raise
        return link

    def _plain_link(self, address: str, deadline: Deadline) -> Link:
        """A connection to our node, whatever state its rows are in, as long as no newer owner of our shard stands there."""
        link = self._open_link(address, deadline)
        try:
            if self._fence.name:
                (copy,) = self._ask(link, [self._fence.name.encode()], deadline)
                self._require_ours(address, copy, deadline)
            if self._markers:
                why_lost(address, self._expected(address), self._ask(link, [MARKER_KEY], deadline)[0], link.run_id)
        except BaseException:
            link.close()
            raise
        return link

    def _ask(self, link: Link, keys: Sequence[bytes], deadline: Deadline) -> list[bytes | None]:
        made = [self._codec.get_step(key) for key in keys]
        run([Conversation(link, [step for step, _ in made])], deadline)
        return [_value(link.address, reply) for _, reply in made]

    # --- repair; the rest is in NodeRepair --------------------------------------------------------------------------------------

    def _expected(self, address: str) -> Marker:
        expected = self._markers.get(address)
        if expected is None:
            raise _moved_meanwhile(address)
        return expected

    def _look(self, address: str, deadline: Deadline) -> tuple[bytes | None, str]:
        with self._plain_pool.lease([address], deadline) as links:
            return self._ask(links[address], [MARKER_KEY], deadline)[0], links[address].run_id

    def _peek(self, address: str, keys: list[bytes], deadline: Deadline) -> list[bytes | None]:
        with self._plain_pool.lease([address], deadline) as links:
            return self._ask(links[address], keys, deadline)

    def _copies_elsewhere(self, address: str, key: bytes, deadline: Deadline) -> list[bytes | None]:
        found = []
        for other in self.addresses:
            if other != address:
                with suppress(NodeUnavailableError, DeadlineExceededError):
                    found += self._ask_once(other, key, deadline)
        return found

    def _ask_once(self, address: str, key: bytes, deadline: Deadline) -> list[bytes | None]:
        """On a connection that asks nothing before, as those do that are lent."""
        link = self._open_link(address, deadline)
        try:
            return self._ask(link, [key], deadline)
        finally:
            link.close()

    def _lane(self, address: str, nonce: str, parts: Sequence[ReadPart] | Sequence[WritePart], deadline: Deadline) -> Marker:
        """The marker that a batch in repair expects."""
        if not all(self.keys_of(address, part.keys).all() for part in parts):
            raise InvalidInputError(f"a batch that repairs node {address} holds rows of other nodes")
        return self._require_repair(address, nonce, deadline)

    # --- small values -----------------------------------------------------------------------------------------------------------

    def _marker(self, identity: Identity, node: int, run_id: str) -> Marker:
        return Marker(identity.cluster_id, node, identity.generation, self._map.digest, self._map.epoch, run_id)

    def _identity(self, raw: Sequence[bytes | None]) -> Identity:
        """What the first good marker says."""
        found = first_identity(self.addresses, raw)
        if found is not None:
            return found
        raise NotProvisionedError(
            f"none of the nodes {', '.join(self.addresses)} holds a marker: the cluster is new, or all of its data is gone. "
            "Parameter-server shard 0 provisions empty nodes when it starts for the first time."
        )

    def _blobs(self, key: bytes, deadline: Deadline) -> list[bytes | None]:
        replies = self._on_every_node(deadline, lambda index: self._codec.get_step(key))
        return [_value(address, reply) for address, reply in zip(self.addresses, replies, strict=True)]

    def _put_blobs(self, key: bytes, values: Sequence[bytes], deadline: Deadline) -> None:
        replies = self._on_every_node(deadline, lambda index: self._codec.put_step(key, values[index]))
        for address, reply in zip(self.addresses, replies, strict=True):
            for _, line in reply.errors:
                raise server_error(address, line)

    def _on_every_node(self, deadline: Deadline, make: Callable[[int], tuple[Step, R]]) -> list[R]:
        addresses = self.addresses  # the same ones all along, should nodes move meanwhile
        with self._meta_pool.lease(addresses, deadline) as links:
            made = [make(index) for index in range(len(addresses))]
            steps = [step for step, _ in made]
            run([Conversation(links[a], [step]) for a, step in zip(addresses, steps, strict=True)], deadline)
        return [reply for _, reply in made]


def _value(address: str, reply: BlobReply) -> bytes | None:
    if reply.error is not None:
        raise server_error(address, reply.error)
    return reply.value


def _moved_meanwhile(address: str) -> NodeSuspectError:
    return NodeSuspectError(f"node {address}: while it was asked, nodes moved to other addresses; try again.")


def _require_process(link: Link, marker: Marker) -> None:
    """A connection made before the server was started again would be dead; one made after must not serve a marker from before."""
    if link.run_id != marker.run_id:
        raise diagnose(link.address, replace(marker, run_id=link.run_id), marker.encode())


def _ungroup(grouped: Grouped, values: NDArray[T]) -> NDArray[T]:
    if grouped.order is None:
        return values
    out = np.empty_like(values)
    out[grouped.order] = values
    return out
