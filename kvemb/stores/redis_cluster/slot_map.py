"""Which node holds which slots of a Redis Cluster: its slot map, as a node tells it and as far as it is known; read again when it changed.

Also the keys of the per-slot markers.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.markers import MARKER_KEY
from kvemb.errors import ConfigError, KvembError, NodeRefusesError, NodeUnavailableError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.schema.slots import N_SLOTS, slot_tags, text_slot
from kvemb.stores.redis_server.redis_commands import NO_HOST, ask, shown, text_of
from kvemb.stores.redis_server.redis_login import RedisAccess, logged_in
from kvemb.wire.resp.resp_value import Value

_ANSWER_TIMEOUT_S = 1.0  # with a node that does not tell the map while there are others to ask
_MANY = 64  # slots that one batch found elsewhere
_NEVER = np.int64(2**63 - 1)


@dataclass(frozen=True, eq=False)
class SlotMap:
    """Which primary holds each slot."""

    addresses: tuple[str, ...]  # primaries, "host:port"
    nodes: NDArray[np.int64]  # int64 [16384], index into addresses
    source: str  # the node that told it
    # of primaries by address, the 40 hex digits that the cluster knows them by; not of one that an answer alone has named
    names: Mapping[str, str] = field(default_factory=dict)

    def address_of(self, slot: int) -> str:
        """The primary of a slot."""
        return self.addresses[int(self.nodes[slot])]

    def slots_of(self, address: str) -> NDArray[np.bool_]:
        """Return which slots a node holds: bool [16384]; none of a node that is no primary here, as one that another has replaced."""
        mine: NDArray[np.bool_] = self.nodes == (self.addresses.index(address) if address in self.addresses else -1)
        return mine

    def with_moved(self, moved: Mapping[int, str]) -> "SlotMap":
        """Return the map after slots have moved; primaries without any are in none."""
        addresses = tuple(sorted({*self.addresses, *moved.values()}))
        nodes = np.array([addresses.index(address) for address in self.addresses])[self.nodes]
        nodes[list(moved)] = [addresses.index(address) for address in moved.values()]
        used, ranks = np.unique(nodes, return_inverse=True)
        return SlotMap(tuple(addresses[node] for node in used.tolist()), ranks.astype(np.int64), self.source, self.names)


@cache
def marker_keys() -> list[bytes]:
    """The marker's key of every slot, pinned there by a hash tag."""
    return [MARKER_KEY + b":{" + tag + b"}" for tag in slot_tags()]


def fetch_slot_map(candidates: Iterable[str], access: RedisAccess, deadline: Deadline) -> SlotMap:
    """Ask one node after the other until one answers; each may take its share of the time, so that a hung one does not take it all."""
    failures, addresses = list[KvembError](), list(candidates)
    for address, share in deadline.shared(addresses):
        try:
            return _ask_one(address, access, share if address == addresses[-1] else share.within(_ANSWER_TIMEOUT_S))
        except (NodeUnavailableError, ProtocolError) as error:
            failures.append(error)
    kind = NodeRefusesError if any(isinstance(error, NodeRefusesError) for error in failures) else NodeUnavailableError
    raise kind("no node of the cluster answers: " + "; ".join(map(str, failures)))


def bus_port_of(address: str, access: RedisAccess, deadline: Deadline) -> int:
    """The port at which other nodes reach one."""
    with logged_in(address, access, deadline) as link:
        told = text_of(link, ask(link, deadline, "CLUSTER", "NODES"), "CLUSTER NODES")
    found = re.search(r"@(\d{1,5})\S* myself\b", told)
    if found is None:
        raise ProtocolError(f"node {address}: CLUSTER NODES answered {told[:200]!r}, expected a line of its own")
    return int(found[1])


def _ask_one(address: str, access: RedisAccess, deadline: Deadline) -> SlotMap:
    with logged_in(address, access, deadline) as link:
        if "cluster_enabled:1" not in text_of(link, ask(link, deadline, "INFO", "cluster"), "INFO").split():
            raise ConfigError(f"storage.kind: node {address} is a standalone server; use kind redis or valkey")
        answer = ask(link, deadline, "CLUSTER", "SLOTS")
    nodes = np.full(N_SLOTS, -1, dtype=np.int64)
    addresses: list[str] = []
    names: dict[str, str] = {}
    for entry in answer if isinstance(answer, list) else [answer]:
        first, last, owner, name = _range(entry, address)
        if owner not in addresses:
            addresses.append(owner)
            names[owner] = name
        nodes[first : last + 1] = addresses.index(owner)
    if (nodes < 0).any():
        raise NodeUnavailableError(
            f"node {address}: slot {int(np.argmin(nodes))} of the cluster has no primary (`CLUSTER INFO` tells more). Assign it."
        )
    order = sorted(range(len(addresses)), key=lambda i: addresses[i])
    rank = np.argsort(order)
    return SlotMap(tuple(addresses[i] for i in order), rank[nodes], address, names)


def _range(entry: Value, asked: str) -> tuple[int, int, str, str]:
    """Slots from, to, their holder's address and name, out of a line of CLUSTER SLOTS; an empty host means "where you asked"."""
    match entry:
        case [int(first), int(last), [(bytes() | None) as host, int(port), *more], *_] if (
            0 <= first <= last < N_SLOTS and 0 < port < 1 << 16
        ):
            name = (host or b"").decode("ascii", "replace")
            if name == "?":
                raise NodeUnavailableError(f"node {asked}: says '?:{port}' in CLUSTER SLOTS, which is no address{NO_HOST}")
            known_as = more[0].decode("ascii", "replace") if more and isinstance(more[0], bytes) else ""
            return first, last, f"{name or asked.rpartition(':')[0]}:{port}", known_as
    raise ProtocolError(f"node {asked}: CLUSTER SLOTS answered {shown(entry)}, expected slots and their nodes")


class ClusterTopology:
    """The slot map that batches go by, and more knowledge of slots. Two threads may ask at once."""

    def __init__(self, access: RedisAccess) -> None:
        self._access = access
        # the newest map that was told; None before the first. It is replaced by a newer one, and forgotten for no error.
        self.known: SlotMap | None = None
        self.known_before: tuple[str, ...] = ()  # addresses of nodes that an earlier process knew
        self._in_doubt = False
        self.on_the_way: set[int] = set()  # slots whose marker was found to be moving
        # int64 [16384], the number of the primary where each slot's marker was seen, -1 for none: slots may move without keys
        self.vouched = np.full(N_SLOTS, -1, dtype=np.int64)
        # int64 [16384], rises with the moment at which that was noted: what came first has seen every loss of what came later
        self.since = np.full(N_SLOTS, _NEVER)
        self._moments = itertools.count(1)
        self._answered: tuple[str, ...] = ()  # the node that told the map last: one that hangs is not asked first again and again
        self._numbers: dict[str, int] = {}  # of addresses, for `vouched`
        self._next_number = itertools.count()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The primaries; until they are known, the starting points."""
        return self._access.config.nodes if self.known is None else self.known.addresses

    def slot_map(self, deadline: Deadline) -> SlotMap:
        """Return the map, asked for if none is known, or the one that is known is in doubt."""
        return self.refreshed(deadline) if self.known is None or self._in_doubt else self.known

    def refreshed(self, deadline: Deadline, *first: str) -> SlotMap:
        """Ask for the map and return it."""
        before = self.known
        asked = dict.fromkeys([*first, *self._answered, *self.addresses, *self._access.config.nodes, *self.known_before])
        after = fetch_slot_map(asked, self._access, deadline)
        self._forget(np.flatnonzero(self.vouched != self.owners(after)))
        self.known, self._in_doubt = after, False
        self._answered = (after.source,)
        self.on_the_way = {slot for slot in [*self.on_the_way] if before and before.address_of(slot) == after.address_of(slot)}
        return after

    def follow(self, moved: Mapping[int, str], deadline: Deadline) -> None:
        """Take over the moves that answers told: while slots move, every batch hears of a few, and asking for the whole map takes long."""
        known = self.known
        if known is None or len(moved) > _MANY or not set(moved.values()) <= set(known.addresses):
            self.refreshed(deadline, *dict.fromkeys(moved.values()))
        else:
            slots = list(moved)
            self.known = known.with_moved(moved)
            self._forget(slots)
            self.on_the_way.difference_update(slots)

    def vouch_all(self, owners: NDArray[np.int64], but: Sequence[int]) -> None:
        """Note that the markers of all slots but these were seen at their primaries."""
        self.vouched, self.since = owners, np.zeros(N_SLOTS, dtype=np.int64)
        self._forget(but)

    def vouch(self, slots: Sequence[int], address: str) -> None:
        """Note that the markers of slots, which are its own, were seen at a primary."""
        new = [slot for slot in slots if self.vouched[slot] != self.number(address)]
        self.vouched[new], self.since[new] = self.number(address), next(self._moments)

    def _forget(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        self.vouched[slots], self.since[slots] = -1, _NEVER

    def doubt(self) -> None:
        """Let the next batch ask for the map: all nodes that are known, for those of kvemb.yaml may be gone by now."""
        self._in_doubt = True

    def number(self, address: str) -> int:
        """Return a primary's number, for `vouched`."""
        return self._numbers.setdefault(address, next(self._next_number))  # unique even when two threads come at once

    def owners(self, slot_map: SlotMap) -> NDArray[np.int64]:
        """Return the number of each slot's primary: int64 [16384]."""
        owners: NDArray[np.int64] = np.array([self.number(address) for address in slot_map.addresses], dtype=np.int64)[slot_map.nodes]
        return owners

    def slots_of(self, address: str) -> NDArray[np.bool_]:
        """Return which slots a primary holds: bool [16384]."""
        return np.zeros(N_SLOTS, dtype=bool) if self.known is None else self.known.slots_of(address)

    def address_of(self, slot: int) -> str:
        """Return a slot's primary, for messages; "?" when it is not known."""
        return "?" if self.known is None else self.known.address_of(slot)

    def slot_name(self, slot: int) -> str:
        """Return a slot's name in messages."""
        return f"{self.address_of(slot)} (slot {slot})"

    def holder_of(self, name: str) -> str:
        """Return the holder of a small value, for messages."""
        return "the cluster" if self.known is None else f"node {self.known.address_of(text_slot(name.encode()))}"
