"""The markers of a Redis Cluster's slots: one per slot, read in large steps, pinned when the store is opened and renewed after repairs."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.markers import Identity, Marker, accept, alike, why_lost
from kvemb.errors import DeadlineExceededError, NodeUnavailableError, StorageError, WrongNodeError
from kvemb.net.deadline import Deadline
from kvemb.net.pool import LinkPool
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.slots import N_SLOTS
from kvemb.stores.redis_cluster.cluster_values import ClusterValues
from kvemb.stores.redis_cluster.primary_links import exchange
from kvemb.stores.redis_cluster.slot_map import ClusterTopology, SlotMap, marker_keys
from kvemb.stores.redis_server.redis_commands import redirect_target
from kvemb.stores.server_errors import server_error
from kvemb.wire.buffer_scan import Bytes
from kvemb.wire.replies import BlobReply, CodeReply, LineReply, RepliesInOrder, ReplyReader, Step
from kvemb.wire.request_arrays import chunks
from kvemb.wire.resp.resp_codec import RespCodec, command
from kvemb.wire.resp.resp_value import ErrorLine

_SLOTS_PER_STEP = 512
_TARGET_S = 1.0  # for a node that takes open slots, while the one that gives them answers
_NO_MAP = ClusterMap.first(0, 1)


@dataclass(frozen=True, eq=False)
class Check:
    """A marker that a batch reads at a node, after its rows."""

    address: str
    slot: int
    marker: Marker
    step: Step
    reply: BlobReply
    leaving: bool = False  # the slot may be on its way elsewhere: the node may answer ASK, as it does for every row that it has no more
    importing: bool = False  # the slot is asked for out of turn, and its marker may not have arrived yet

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


def slot_marker(cluster_id: bytes, slot: int, generation: bytes, repair: str = "") -> Marker:
    """Return the marker of a slot; `repair` is the nonce of its last one.

    It names no map of ours: the cluster places the rows itself, and they do not depend on which shard writes them (docs/adr/0078).
    """
    return Marker(cluster_id, slot, generation, _NO_MAP.digest, _NO_MAP.serial, "", repair)


class SlotMarkers:
    """The marker expected in every slot, and the one that stands there."""

    def __init__(self, topology: ClusterTopology, values: ClusterValues, pool: LinkPool) -> None:
        self._topology, self._values, self._pool = topology, values, pool
        self._codec = RespCodec()
        self.origin: Identity | None = None  # the cluster that is expected, None before the store is opened
        self.repairs: dict[int, str] = {}  # by slot, the nonce in the marker of one that was repaired
        self.changed: set[str] = set()  # primaries whose markers were found to be renewed

    def expected(self, slot: int) -> Marker:
        """Return the marker that a slot should have."""
        assert self.origin is not None, "open() comes first"
        return slot_marker(self.origin.cluster_id, slot, self.origin.generation, self.repairs.get(slot, ""))

    def pin(self, values: Sequence[bytes | None], origin: Identity, owners: NDArray[np.int64], *, may_be_lost: bool) -> None:
        """Expect the markers that stand there from now on; see `Store.open`."""
        self.origin, self.repairs, lost = origin, {}, list[int]()
        for slots in alike(range(N_SLOTS), values):
            value, expected, name = values[slots[0]], self.expected(slots[0]), self._topology.slot_name(slots[0])
            if may_be_lost and why_lost(name, expected, value, ""):
                lost += slots
            else:
                self.repairs |= dict.fromkeys(slots, accept(name, expected, value, "").repair)
        self._topology.vouch_all(owners, but=[*lost, *self._topology.on_the_way])  # the latter were seen where they go to

    # --- of a batch -------------------------------------------------------------------------------------------------------------

    def read_renewed(self, deadline: Deadline) -> None:
        """Accept the markers of primaries that were repaired. A batch under way keeps to those that it began with."""
        while True:
            try:
                address = self.changed.pop()
            except KeyError:  # none remains; another thread may have taken the last
                return
            slots = np.flatnonzero(self._topology.slots_of(address))
            values = self.at(address, slots, deadline)
            for group in alike(slots.tolist(), values):
                some, found = slots[group].tolist(), [value for value in (values[at] for at in group) if isinstance(value, bytes)]
                with suppress(StorageError):  # the batch says what is wrong
                    if found:
                        self.renew(some, found)
                        self._topology.vouch([slot for slot in some if slot not in self._topology.on_the_way], address)

    def renew(self, slots: Sequence[int], values: Sequence[bytes]) -> None:
        """Expect the markers that stand in these slots, which differ in the slot alone; raises as `accept`."""
        at = self.last_repaired(slots)
        self.repairs |= dict.fromkeys(slots, accept(self._topology.slot_name(slots[at]), self.expected(slots[at]), values[at], "").repair)

    def last_repaired(self, slots: Sequence[int]) -> int:
        """Which of these slots was repaired last: a marker that is not older than its own is older than none of theirs."""
        return max(range(len(slots)), key=lambda at: self.repairs.get(slots[at], ""))

    def check(self, address: str, slot: int, marker: Marker, *, leaving: bool = False, importing: bool = False) -> Check:
        """Return the check that reads a marker after a batch's rows."""
        step, reply = self._codec.get_step(marker_keys()[slot])
        if importing:
            step = Step(memoryview(command(b"ASKING") + bytes(step.request)), RepliesInOrder([LineReply(), reply]))
        return Check(address, slot, marker, step, reply, leaving, importing)

    def unvouched(self, address: str, slot_map: SlotMap) -> list[int]:
        """The slots of a node whose markers were never seen there: it may have been given them without their keys."""
        mine = slot_map.slots_of(address)
        slots: list[int] = np.flatnonzero(mine & (self._topology.vouched != self._topology.number(address))).tolist()
        return slots

    def stays(self, slot: int, reply: BlobReply) -> bool:
        """False when the slot has just moved: then the node's rows are asked for again, where a marker can vouch for them."""
        if reply.error is not None and reply.error.startswith(b"-ASK "):
            self._topology.on_the_way.add(slot)
        return reply.error is None

    def vouching(self, address: str, slot: int, slot_map: SlotMap, places: NDArray[np.int64] | None) -> list[int]:
        """The slots whose markers vouch for a node: one that the batch uses, or another while its marker moves (which may take long).

        Beside one that came later than others, the first of these: the node may have lost its rows between, all but those.
        """
        settled = slot not in self._topology.on_the_way
        if settled and (places is not None or not self._topology.since[slot]):
            return [slot]
        oldest = self.any_settled_slot(address, slot_map, places)
        return [*([slot] if settled or oldest is None else []), *([] if oldest is None else [oldest])]

    def any_settled_slot(self, address: str, slot_map: SlotMap, places: NDArray[np.int64] | None = None) -> int | None:
        """Return the slot of a primary (of these places) that has been there the longest, and its marker is not on its way; or None."""
        mine = np.flatnonzero(slot_map.slots_of(address))[::-1]  # moves go from the first slot to the last
        settled = mine[~np.isin(mine, list(self._topology.on_the_way)) & (True if places is None else np.isin(mine, places))]
        return int(settled[np.argmin(self._topology.since[settled])]) if len(settled) else None

    # --- of many slots ----------------------------------------------------------------------------------------------------------

    def at(self, address: str, slots: NDArray[np.int64], deadline: Deadline) -> list[bytes | bool | None]:
        """Return the values in the places of a primary's markers: None for nothing, False where the slot is elsewhere.

        Of a slot that stands open it is the marker at the node that takes it, once it has left this one. Such a node may be down: False.
        """
        found, asked = self._seen({address: slots}, deadline)[address], dict[str, list[Check]]()
        for slot, line in zip(slots.tolist(), found, strict=True):
            if isinstance(line, ErrorLine) and line.line.startswith(b"-ASK "):
                target = redirect_target(line.line, address)
                asked.setdefault(target, []).append(self.check(target, slot, self.expected(slot), importing=True))
                self._topology.on_the_way.add(slot)
        there: dict[int, bytes | bool | None] = {}
        for target, checks in asked.items():
            with suppress(NodeUnavailableError, DeadlineExceededError):
                exchange(self._pool, {target: merged_steps([check.step for check in checks])}, [], deadline.within(_TARGET_S))
                there |= {check.slot: check.reply.value if check.reply.error is None else False for check in checks}
        return [
            there.get(slot, False) if isinstance(value, ErrorLine) else value for slot, value in zip(slots.tolist(), found, strict=True)
        ]

    def coming_to(self, address: str, deadline: Deadline) -> list[int]:
        """Return the slots that stand open and are on their way to a primary, as those say that answer."""
        slot_map, coming = self._topology.slot_map(deadline), list[int]()
        for source, share in deadline.shared([other for other in slot_map.addresses if other != address]):
            slots = np.flatnonzero(slot_map.slots_of(source))
            with suppress(NodeUnavailableError, DeadlineExceededError):
                for slot, value in zip(slots.tolist(), self._seen({source: slots}, share)[source], strict=True):
                    if isinstance(value, ErrorLine) and value.line.startswith(b"-ASK ") and redirect_target(value.line, source) == address:
                        coming.append(slot)
        return coming

    def _seen(self, asked: Mapping[str, NDArray[np.int64]], deadline: Deadline) -> dict[str, list[bytes | ErrorLine | None]]:
        """What primaries answer when they are asked for the markers of slots: a value, None for nothing, or a redirection."""
        requests = _marker_requests()
        groups = {address: [slots[rows].tolist() for rows in chunks(len(slots), _SLOTS_PER_STEP)] for address, slots in asked.items()}
        steps = {
            address: [Step(memoryview(b"".join([requests[slot] for slot in group])), _Markers(group)) for group in of_node]
            for address, of_node in groups.items()
            if of_node
        }
        exchange(self._pool, steps, [], deadline)
        found: dict[str, list[bytes | ErrorLine | None]] = {address: [] for address in asked}
        for address, of_node in steps.items():
            for step in of_node:
                assert isinstance(step.reply, _Markers)
                for reply in step.reply.others:
                    if reply.error is not None and not reply.error.startswith((b"-MOVED ", b"-ASK ")):
                        raise server_error(address, reply.error)
                found[address] += step.reply.found
        return found

    def all(self, deadline: Deadline) -> list[bytes | None]:
        """Return the value in the place of every slot's marker, on any node."""
        slot_map = self._topology.slot_map(deadline)
        asked = {address: np.flatnonzero(slot_map.slots_of(address)) for address in slot_map.addresses}
        values: list[bytes | None] = [None] * N_SLOTS
        lines: dict[int, bytes] = {}
        for address, seen in self._seen(asked, deadline).items():
            for slot, value in zip(asked[address].tolist(), seen, strict=True):
                if isinstance(value, ErrorLine):
                    lines[slot] = value.line
                else:
                    values[slot] = value
        self._topology.on_the_way.update(slot for slot, line in lines.items() if line.startswith(b"-ASK "))
        if moved := {s: redirect_target(line, self._topology.address_of(s)) for s, line in lines.items() if line.startswith(b"-MOVED ")}:
            self._topology.follow(moved, deadline)  # together: one by one, each would wait a moment
        for slot in lines:  # wherever they are by now
            values[slot] = self._values.one(marker_keys()[slot].decode(), deadline)
        return values

    def put_all(self, values: list[bytes], deadline: Deadline) -> None:
        """Write the marker of every slot."""
        replies = [CodeReply((b"+OK\r\n",), np.zeros(1, dtype=np.uint8)) for _ in values]
        keys = marker_keys()
        steps = [Step(memoryview(command(b"SET", keys[slot], values[slot])), replies[slot]) for slot in range(N_SLOTS)]
        slot_map = self._topology.slot_map(deadline)
        by_node: dict[str, list[Step]] = {address: [] for address in slot_map.addresses}
        for slot, step in enumerate(steps):
            by_node[slot_map.address_of(slot)].append(step)
        exchange(self._pool, {address: merged_steps(batch) for address, batch in by_node.items() if batch}, [], deadline)
        for _, line in itertools.chain.from_iterable(reply.errors for reply in replies):
            raise StorageError(f"the cluster is changing its slots ({line.decode('ascii', 'replace')}); try again when it has settled")


@dataclass(eq=False)
class _Markers(ReplyReader):
    """The markers of some slots: compared as one piece where they differ in the slot alone, else read one by one."""

    slots: Sequence[int]  # in the order of the answers
    others: list[BlobReply] = field(default_factory=list)  # the answers, where they are not that
    _alike: list[bytes] = field(default_factory=list)
    _whole: bytes = b""
    _rest: RepliesInOrder | None = None
    done: bool = False

    @property
    def found(self) -> list[bytes | ErrorLine | None]:
        """What stands there."""
        if not self.others:
            return list(self._alike)
        return [reply.value if reply.error is None else ErrorLine(reply.error) for reply in self.others]

    def take(self, data: Bytes) -> int:
        if self._rest is None:
            if not self._whole:
                first = BlobReply(miss=b"$-1")
                if not first.take(data):
                    return 0
                self._expect_like(first.value)
            here = data[: len(self._whole)].tobytes()
            if self._whole and here == self._whole:
                self.done = True
                return len(here)
            if self._whole and self._whole.startswith(here):
                return 0
            self.others = [BlobReply(miss=b"$-1") for _ in self.slots]
            self._rest = RepliesInOrder(self.others)
        taken = self._rest.take(data)
        self.done = self._rest.done
        return taken

    def _expect_like(self, first: bytes | None) -> None:
        with suppress(WrongNodeError):  # it is told to whoever asks for the values
            if first is not None:
                self._alike = Marker.decode(first, "").of_nodes(self.slots)
                self._whole = b"".join([b"$%d\r\n%b\r\n" % (len(marker), marker) for marker in self._alike])


@cache
def _marker_requests() -> list[memoryview]:
    """The command that reads each slot's marker: there are thousands, and they are read again and again."""
    return [memoryview(command(b"GET", key)) for key in marker_keys()]


def merged_steps(steps: Sequence[Step]) -> list[Step]:
    """The same commands and replies in fewer, larger steps."""
    return [
        Step(memoryview(b"".join(step.request for step in steps[rows])), RepliesInOrder([step.reply for step in steps[rows]]))
        for rows in chunks(len(steps), _SLOTS_PER_STEP)
    ]
