"""Redis Cluster (and Valkey's): rows by RESP on links of our own to every primary; the cluster's own slot map, MOVED and ASK followed.

Keys belong to slots and slots move between nodes, so there is one marker per slot, and a batch reads one per node, in a slot that it
uses. A row that was redirected is asked for again, within the same deadline, together with all other redirected rows of its batch.
"""

import time
from collections.abc import Sequence

import numpy as np

from kvemb.config import StorageConfig
from kvemb.errors import NodeUnavailableError, NotProvisionedError, StorageError, WrongNodeError
from kvemb.keys import N_SLOTS, text_slot
from kvemb.net.deadline import Deadline
from kvemb.net.exchange import Conversation, run
from kvemb.net.link import Link
from kvemb.net.pool import LinkPool
from kvemb.stores import redis_admin
from kvemb.stores.base import Capabilities, NodeStats, ReadPart, ReadResult, Store, WritePart, WriteResult
from kvemb.stores.batch import NodeSteps, server_error, unexpected_value
from kvemb.stores.cluster_batch import REDIRECTS, ClusterBatch, EraseBatch, ReadBatch, Redirects, WriteBatch, redirect_target
from kvemb.stores.cluster_map import SlotMap, fetch_slot_map, marker_keys
from kvemb.stores.markers import Marker, diagnose
from kvemb.stores.redis import MAX_VALUE_BYTES
from kvemb.wire.replies import BlobReply, CodeReply, LineReply, RepliesInOrder, Step, UnexpectedValueError
from kvemb.wire.requests import chunks
from kvemb.wire.resp import RespCodec, command

_SLOTS_PER_STEP = 512
_PAUSE_S = 0.02  # between rounds while the cluster says "not now"


class RedisClusterStore(Store):
    """A cluster that moves its own slots. `config.nodes` are starting points; the primaries are learnt from them."""

    def __init__(self, config: StorageConfig, role: str) -> None:
        self.config = config
        self.role = role
        self._codec = RespCodec(multi_get=False)
        self._asking_codec = RespCodec(multi_get=False, asking=True)
        self._pool = LinkPool(self._open_link, self._dropped)
        self._in_doubt: dict[str, set[str]] = {}
        self._map: SlotMap | None = None
        self._on_the_way: set[int] = set()  # slots whose marker was found to be moving
        self._origin: Marker | None = None

    # --- opening ----------------------------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(cas=False, max_record_bytes=MAX_VALUE_BYTES)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.config.nodes if self._map is None else self._map.addresses

    def open(self, deadline: Deadline) -> list[Marker]:
        self._inspect(deadline)
        values = self._all_markers(deadline)
        first = next((value for value in values if value is not None), None)
        if first is None:
            raise NotProvisionedError(
                f"no slot of the cluster at {', '.join(self.config.nodes)} holds a marker: it is new, or all of its data is gone. "
                "Parameter-server shard 0 provisions empty nodes when it starts for the first time."
            )
        origin = Marker.decode(first, self._slot_name(0))
        markers = [self._marker(origin, slot) for slot in range(N_SLOTS)]
        wrong = next((slot for slot in range(N_SLOTS) if values[slot] != markers[slot].encode()), None)
        if wrong is not None:
            raise diagnose(self._slot_name(wrong), markers[wrong], values[wrong])
        self._origin = origin
        return markers

    def provision(self, cluster_id: bytes, generation: bytes, deadline: Deadline) -> None:
        n_keys = self._inspect(deadline)
        values = self._all_markers(deadline)
        wanted = [Marker(cluster_id, slot, generation, 0, 0, "") for slot in range(N_SLOTS)]
        for slot, value in enumerate(values):
            if value is not None and value != wanted[slot].encode():
                raise diagnose(self._slot_name(slot), wanted[slot], value)
        n_markers = sum(value is not None for value in values)
        if n_keys != n_markers:
            raise WrongNodeError(
                f"the cluster at {', '.join(self.config.nodes)} holds {n_keys - n_markers} keys that are no markers. Provisioning writes "
                "on empty nodes only; empty them yourself if their data is not needed."
            )
        self._put_markers([marker.encode() for marker in wanted], deadline)

    def close(self) -> None:
        self._pool.close()

    # --- rows -------------------------------------------------------------------------------------------------------------------

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        batch = ReadBatch(parts)
        self._run(batch, deadline)
        return batch.results

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        self._run(WriteBatch(parts), deadline)
        return [WriteResult(np.ones(len(part.keys), dtype=bool)) for part in parts]

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> None:
        self._run(EraseBatch(parts), deadline)

    def get_meta(self, name: str, deadline: Deadline) -> list[bytes | None]:
        key = name.encode()
        asking: str | None = None
        while True:
            step, reply = self._codec.get_step(key)
            asking, done = self._single(key, step, reply, asking, deadline)
            if done:
                return [reply.value]

    def put_meta(self, name: str, value: bytes, deadline: Deadline) -> None:
        key = name.encode()
        asking: str | None = None
        while True:
            step, reply = self._codec.put_step(key, value)
            asking, done = self._single(key, step, reply, asking, deadline)
            if done:
                return

    def stats(self, deadline: Deadline) -> list[NodeStats]:
        self._pool.require_open()
        self._refresh(deadline)
        return [self.stats_or_error(address, deadline) for address in self.addresses]

    def _node_stats(self, address: str, deadline: Deadline) -> NodeStats:
        return redis_admin.node_stats(address, redis_admin.info(address, self.config, deadline))

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _run(self, batch: ClusterBatch, deadline: Deadline) -> None:
        """Run a batch in rounds: all rows, then those that were redirected, until none is left or the deadline passes."""
        while batch.pending:
            slot_map = self._slot_map(deadline)
            try:
                redirected = self._round(batch, slot_map, deadline)
            except NodeUnavailableError:
                self._map = None  # a failover may have moved the node's slots: the next batch asks
                raise
            if redirected.changed_map:
                self._refresh(deadline)
            if redirected.wait:
                time.sleep(min(_PAUSE_S, deadline.remaining_s()))
            if batch.pending and deadline.expired:
                raise redirected.error(deadline)

    def _round(self, batch: ClusterBatch, slot_map: SlotMap, deadline: Deadline) -> Redirects:
        shares = batch.plan(slot_map, self._codec, self._asking_codec)
        by_node: dict[str, list[Step]] = {}
        last_slot: dict[str, int] = {}
        for share in shares:
            by_node.setdefault(share.address, []).extend(share.steps.steps)
            if not share.asking:
                last_slot[share.address] = share.slot
        markers: dict[str, tuple[int, BlobReply]] = {}
        for address, used_slot in last_slot.items():
            slot = self._settled_slot(address, used_slot, slot_map)
            step, reply = self._codec.get_step(marker_keys()[slot])
            by_node[address].append(step)
            markers[address] = (slot, reply)
        self._exchange(by_node, [share.steps for share in shares], deadline)
        moved = {address for address, (slot, reply) in markers.items() if not self._marker_holds(address, slot, reply)}
        return batch.settle(shares, moved)

    def _marker_holds(self, address: str, slot: int, reply: BlobReply) -> bool:
        """False when the slot has just moved: then the node's rows are asked for again, where a marker can vouch for them."""
        if reply.error is not None:
            if reply.error.startswith(b"-ASK "):
                self._on_the_way.add(slot)
            return False
        assert self._origin is not None, "open() comes first"
        expected = self._marker(self._origin, slot)
        if reply.value != expected.encode():
            raise diagnose(f"{address} (slot {slot})", expected, reply.value)
        return True

    def _settled_slot(self, address: str, slot: int, slot_map: SlotMap) -> int:
        """The slot whose marker vouches for a node: one that the batch uses, but while its marker is on its way to another node (which may
        take long), another slot of this node."""
        if slot not in self._on_the_way:
            return slot
        mine = np.flatnonzero(slot_map.nodes == slot_map.addresses.index(address)) if address in slot_map.addresses else np.empty(0, int)
        settled = mine[~np.isin(mine, list(self._on_the_way))]
        return int(settled[0]) if len(settled) else slot

    def _exchange(self, by_node: dict[str, list[Step]], plans: list[NodeSteps], deadline: Deadline) -> None:
        with self._pool.lease(by_node, deadline) as links:
            try:
                run([Conversation(links[address], steps) for address, steps in by_node.items()], deadline)
            except UnexpectedValueError as error:
                raise unexpected_value(plans, error) from error

    def _open_link(self, address: str, deadline: Deadline) -> Link:
        return redis_admin.open_link(address, self.config, self.role, self._in_doubt.setdefault(address, set()), deadline)

    def _dropped(self, link: Link) -> None:
        self._in_doubt.setdefault(link.address, set()).add(link.connection_id)

    def _inspect(self, deadline: Deadline) -> int:
        """Refuse unsafe primaries; return the number of keys in all."""
        self._refresh(deadline)
        n_keys = 0
        for address in self.addresses:
            fields = redis_admin.info(address, self.config, deadline)
            redis_admin.require_safe(address, fields, self.config)
            n_keys += int(fields["n_keys"])
        return n_keys

    def _slot_map(self, deadline: Deadline) -> SlotMap:
        if self._map is None:
            self._refresh(deadline)
        assert self._map is not None
        return self._map

    def _refresh(self, deadline: Deadline) -> None:
        before = self._map
        self._map = after = fetch_slot_map(dict.fromkeys([*self.addresses, *self.config.nodes]), self.config, deadline)
        self._on_the_way = {slot for slot in self._on_the_way if before and before.address_of(slot) == after.address_of(slot)}

    def _marker(self, origin: Marker, slot: int) -> Marker:
        return Marker(origin.cluster_id, slot, origin.generation, 0, 0, "")

    def _slot_name(self, slot: int) -> str:
        address = "?" if self._map is None else self._map.address_of(slot)
        return f"{address} (slot {slot})"

    def _all_markers(self, deadline: Deadline) -> list[bytes | None]:
        replies = [BlobReply(miss=b"$-1") for _ in range(N_SLOTS)]
        steps = [Step(memoryview(command(b"GET", key)), reply) for key, reply in zip(marker_keys(), replies, strict=True)]
        self._on_slots(steps, deadline)
        self._require_no_error([reply.error for reply in replies])
        return [reply.value for reply in replies]

    def _put_markers(self, values: list[bytes], deadline: Deadline) -> None:
        replies = [CodeReply((b"+OK\r\n",), np.zeros(1, dtype=np.uint8)) for _ in values]
        keys = marker_keys()
        steps = [Step(memoryview(command(b"SET", keys[slot], values[slot])), replies[slot]) for slot in range(N_SLOTS)]
        self._on_slots(steps, deadline)
        self._require_no_error([line for reply in replies for _, line in reply.errors])

    def _on_slots(self, steps: list[Step], deadline: Deadline) -> None:
        """Run one step per slot at the slot's node."""
        slot_map = self._slot_map(deadline)
        by_node: dict[str, list[Step]] = {address: [] for address in slot_map.addresses}
        for slot, step in enumerate(steps):
            by_node[slot_map.address_of(slot)].append(step)
        self._exchange({address: _joined(batch) for address, batch in by_node.items() if batch}, [], deadline)

    def _single(
        self, key: bytes, step: Step, reply: BlobReply | CodeReply, asking: str | None, deadline: Deadline
    ) -> tuple[str | None, bool]:
        """Run one command at its slot's node, or at the importing node; return the importing node to ask next, and whether it is done."""
        address = asking or self._slot_map(deadline).address_of(text_slot(key))
        steps = [Step(memoryview(command(b"ASKING")), LineReply()), step] if asking else [step]
        self._exchange({address: steps}, [], deadline)
        line = reply.error if isinstance(reply, BlobReply) else reply.errors[0][1] if reply.errors else None
        if line is not None and line.startswith(b"-ASK ") and not deadline.expired:
            return redirect_target(line, address), False
        return None, not self._try_again(line, deadline)

    def _try_again(self, line: bytes | None, deadline: Deadline) -> bool:
        """Whether a single command was redirected or refused for now; the map has been asked for anew then."""
        if line is None:
            return False
        if not line.startswith(REDIRECTS) or deadline.expired:
            raise server_error("of the cluster", line)
        time.sleep(min(_PAUSE_S, deadline.remaining_s()))
        self._refresh(deadline)
        return True

    def _require_no_error(self, lines: Sequence[bytes | None]) -> None:
        for line in lines:
            if line is not None:
                raise StorageError(f"the cluster is changing its slots ({line.decode('ascii', 'replace')}); try again when it has settled")


def _joined(steps: Sequence[Step]) -> list[Step]:
    """The same commands and replies in fewer, larger steps."""
    return [
        Step(memoryview(b"".join(step.request for step in steps[rows])), RepliesInOrder([step.reply for step in steps[rows]]))
        for rows in chunks(len(steps), _SLOTS_PER_STEP)
    ]
