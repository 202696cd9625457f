"""Redis Cluster's slot map, and the keys of the per-slot markers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.markers import MARKER_KEY
from kvemb.errors import ConfigError, KvembError, NodeRefusesError, NodeUnavailableError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.schema.slots import N_SLOTS, slot_tags
from kvemb.stores.redis_server.redis_commands import RedisAccess, admin, ask, shown, text_of
from kvemb.wire.resp.resp_value import Value

_ANSWER_TIMEOUT_S = 1.0  # with a node that does not tell the map while there are others to ask


@dataclass(frozen=True, eq=False)
class SlotMap:
    """Which primary holds each slot.

    Args:
        addresses: primaries, "host:port".
        nodes: int64 [16384], index into addresses.
        source: the node that told it.
        names: of primaries by address, the 40 hex digits that the cluster knows them by; not of one that an answer alone has named.
    """

    addresses: tuple[str, ...]
    nodes: NDArray[np.int64]
    source: str
    names: Mapping[str, str] = field(default_factory=dict)

    def address_of(self, slot: int) -> str:
        """The primary of a slot."""
        return self.addresses[int(self.nodes[slot])]

    def slots_of(self, address: str) -> NDArray[np.bool_]:
        """Return which slots a node holds: bool [16384]; none of a node that is no primary here, as one that another has replaced."""
        mine: NDArray[np.bool_] = self.nodes == (self.addresses.index(address) if address in self.addresses else -1)
        return mine

    def with_moved(self, moved: Mapping[int, str]) -> "SlotMap":
        """Return the map after slots have moved; primaries without any are in none.

        Example:
            >>> SlotMap(("a:1", "b:1"), np.where(np.arange(N_SLOTS) > 0, 1, 0), "a:1").with_moved({0: "c:1"}).addresses
            ('b:1', 'c:1')
        """
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
    """Ask one node after the other until one answers. Each may take its share of the time, so that one that hangs does not take all of it.

    Raises:
        NodeUnavailableError: no node answered, or a slot has no primary.
        NodeRefusesError: no node answered, and one because it does not take our user.
        ConfigError: the node is not part of a cluster.
    """
    failures, addresses = list[KvembError](), list(candidates)
    for index, address in enumerate(addresses):
        try:
            n_left = len(addresses) - index - 1
            share_s = min(_ANSWER_TIMEOUT_S, deadline.remaining_s() / (n_left + 1)) if n_left else deadline.remaining_s()
            return _ask_one(address, access, Deadline.after(share_s))
        except (NodeUnavailableError, ProtocolError) as error:
            failures.append(error)
    kind = NodeRefusesError if any(isinstance(error, NodeRefusesError) for error in failures) else NodeUnavailableError
    raise kind("no node of the cluster answers: " + "; ".join(map(str, failures)))


def _ask_one(address: str, access: RedisAccess, deadline: Deadline) -> SlotMap:
    with admin(address, access, deadline) as link:
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
            known_as = more[0].decode("ascii", "replace") if more and isinstance(more[0], bytes) else ""
            return first, last, f"{name or asked.rpartition(':')[0]}:{port}", known_as
    raise ProtocolError(f"node {asked}: CLUSTER SLOTS answered {shown(entry)}, expected slots and their nodes")
