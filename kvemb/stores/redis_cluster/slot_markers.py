"""The markers of a Redis Cluster's slots: one per slot, read in large steps, pinned when the store is opened and renewed after repairs."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.markers import Identity, Marker, accept, first_identity
from kvemb.errors import NotProvisionedError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import N_SLOTS
from kvemb.stores.node_batch import server_error
from kvemb.stores.redirects import REDIRECTS
from kvemb.stores.redis_cluster.cluster_links import ClusterLinks
from kvemb.stores.redis_cluster.slot_map import SlotMap, marker_keys
from kvemb.wire.replies import BlobReply, CodeReply, LineReply, RepliesInOrder, Step
from kvemb.wire.request_arrays import chunks
from kvemb.wire.resp.resp_codec import command

_SLOTS_PER_STEP = 512


@dataclass(frozen=True, eq=False)
class Check:
    """A marker that a batch reads at a node, after its rows.

    Args:
        leaving: the slot is known to be on its way elsewhere: the node may answer ASK, as it does for every row that it has no more.
        importing: the slot is asked for out of turn, and its marker may not have arrived yet.
    """

    address: str
    slot: int
    marker: Marker
    step: Step
    reply: BlobReply
    leaving: bool = False
    importing: bool = False

    @property
    def good(self) -> bool:
        """Whether the marker stands there."""
        return self.reply.error is None and self.reply.value == self.marker.encode()

    @property
    def not_yet(self) -> bool:
        """Whether it may still come: until then a row that is missing here may be lost."""
        return self.importing and self.reply.error is None and self.reply.value is None

    @property
    def wrong(self) -> bool:
        """Whether the node's rows cannot be relied on."""
        return self.reply.error is None and not self.good and not self.not_yet


class ClusterMarkers(ClusterLinks):
    """What is expected of every slot, and what stands there."""

    def _expected(self, slot: int) -> Marker:
        assert self._origin is not None, "open() comes first"
        return Marker(self._origin.cluster_id, slot, self._origin.generation, 0, 0, "", self._repairs.get(slot, ""))

    def _identity(self, values: Sequence[bytes | None]) -> Identity:
        """What the first good marker says."""
        found = first_identity([self._slot_name(slot) for slot in range(len(values))], values)
        if found is not None:
            return found
        raise NotProvisionedError(
            f"no slot of the cluster at {', '.join(self.config.nodes)} holds a marker: it is new, or all of its data is gone. "
            "Parameter-server shard 0 provisions empty nodes when it starts for the first time."
        )

    def _slot_name(self, slot: int) -> str:
        address = "?" if self._map is None else self._map.address_of(slot)
        return f"{address} (slot {slot})"

    # --- of a batch -------------------------------------------------------------------------------------------------------------

    def _forget_markers(self, address: str) -> None:
        self._changed.add(address)

    def _read_renewed(self, deadline: Deadline) -> None:
        """Accept the markers of primaries that were repaired. A batch under way keeps to those that it began with."""
        while True:
            try:
                address = self._changed.pop()
            except KeyError:  # none is left; another thread may have taken the last
                return
            slots = np.flatnonzero(self._slots_of(address))
            for slot, value in zip(slots.tolist(), self._markers_at(address, slots, deadline), strict=True):
                with suppress(StorageError):  # the batch says what is wrong
                    if isinstance(value, bytes) and value != self._expected(slot).encode():
                        self._repairs[slot] = accept(self._slot_name(slot), self._expected(slot), value, "").repair
                if value == self._expected(slot).encode():
                    self._vouched[slot] = self._number(address)

    def _check(self, address: str, slot: int, marker: Marker, *, leaving: bool = False, importing: bool = False) -> Check:
        step, reply = self._codec.get_step(marker_keys()[slot])
        if importing:
            step = Step(memoryview(command(b"ASKING") + bytes(step.request)), RepliesInOrder([LineReply(), reply]))
        return Check(address, slot, marker, step, reply, leaving, importing)

    def _unvouched(self, address: str, slot_map: SlotMap) -> list[int]:
        """The slots of a node whose markers nobody has seen there: it may have been given them without their keys."""
        mine = slot_map.nodes == slot_map.addresses.index(address)
        slots: list[int] = np.flatnonzero(mine & (self._vouched != self._number(address))).tolist()
        return slots

    def _marker_stays(self, slot: int, reply: BlobReply) -> bool:
        """False when the slot has just moved: then the node's rows are asked for again, where a marker can vouch for them."""
        if reply.error is not None and reply.error.startswith(b"-ASK "):
            self._on_the_way.add(slot)
        return reply.error is None

    def _settled_slot(self, address: str, slot: int, slot_map: SlotMap) -> int:
        """The slot whose marker vouches for a node: one that the batch uses, but while its marker is on its way to another node (which may
        take long), another slot of this node."""
        if slot not in self._on_the_way:
            return slot
        settled = self._any_settled_slot(address, slot_map)
        return slot if settled is None else settled

    def _any_settled_slot(self, address: str, slot_map: SlotMap) -> int | None:
        mine = np.flatnonzero(slot_map.nodes == slot_map.addresses.index(address)) if address in slot_map.addresses else np.empty(0, int)
        settled = mine[~np.isin(mine, list(self._on_the_way))]
        return int(settled[0]) if len(settled) else None

    # --- of many slots ----------------------------------------------------------------------------------------------------------

    def _markers_at(self, address: str, slots: NDArray[np.int64], deadline: Deadline) -> list[bytes | bool | None]:
        requests, replies = _marker_requests(), [BlobReply(miss=b"$-1") for _ in range(len(slots))]
        steps = [Step(requests[slot], reply) for slot, reply in zip(slots.tolist(), replies, strict=True)]
        if steps:
            self._exchange({address: joined(steps)}, [], deadline, self._plain_pool)
        found: list[bytes | bool | None] = []
        for reply in replies:
            if reply.error is not None and not reply.error.startswith((b"-MOVED ", b"-ASK ")):
                raise server_error(address, reply.error)
            found.append(reply.value if reply.error is None else False)
        return found

    def _all_markers(self, deadline: Deadline) -> list[bytes | None]:
        replies = [BlobReply(miss=b"$-1") for _ in range(N_SLOTS)]
        steps = [Step(request, reply) for request, reply in zip(_marker_requests(), replies, strict=True)]
        self._on_slots(steps, deadline)
        moving = [slot for slot, reply in enumerate(replies) if reply.error is not None and reply.error.startswith(REDIRECTS)]
        self._on_the_way.update(slot for slot in moving if (replies[slot].error or b"").startswith(b"-ASK "))
        elsewhere = set(moving)
        self._require_no_error([reply.error for slot, reply in enumerate(replies) if slot not in elsewhere])
        values = [reply.value for reply in replies]
        for slot in moving:  # wherever they are by now
            (values[slot],) = self.get_meta(marker_keys()[slot].decode(), deadline)
        return values

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
        self._exchange({address: joined(batch) for address, batch in by_node.items() if batch}, [], deadline, self._plain_pool)

    def _require_no_error(self, lines: Sequence[bytes | None]) -> None:
        for line in lines:
            if line is not None:
                raise StorageError(f"the cluster is changing its slots ({line.decode('ascii', 'replace')}); try again when it has settled")


@cache
def _marker_requests() -> list[memoryview]:
    """The command that reads each slot's marker: there are thousands, and they are read again and again."""
    return [memoryview(command(b"GET", key)) for key in marker_keys()]


def joined(steps: Sequence[Step]) -> list[Step]:
    """The same commands and replies in fewer, larger steps."""
    return [
        Step(memoryview(b"".join(step.request for step in steps[rows])), RepliesInOrder([step.reply for step in steps[rows]]))
        for rows in chunks(len(steps), _SLOTS_PER_STEP)
    ]
