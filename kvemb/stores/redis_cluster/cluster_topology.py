"""Which node holds which slots of a Redis Cluster, as far as is known: its slot map, read again when the cluster says that it changed."""

import itertools
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvemb.net.deadline import Deadline
from kvemb.schema.slots import N_SLOTS, text_slot
from kvemb.stores.redis_cluster.slot_map import SlotMap, fetch_slot_map
from kvemb.stores.redis_server.redis_commands import RedisAccess

_MANY = 64  # slots that one batch found elsewhere


class ClusterTopology:
    """The slot map that batches go by, and more knowledge of slots. Two threads may ask at once.

    Args:
        access: how servers are reached; its configuration's nodes are starting points.

    Attributes:
        known: the map, or None when the next batch is to ask for it.
        on_the_way: slots whose marker was found to be moving.
        vouched: int64 [16384], the number of the primary where each slot's marker was seen, -1 for none: slots may move without keys.
    """

    def __init__(self, access: RedisAccess) -> None:
        self._access = access
        self.known: SlotMap | None = None
        self.on_the_way: set[int] = set()
        self.vouched = np.full(N_SLOTS, -1, dtype=np.int64)
        self._answered: tuple[str, ...] = ()  # the node that told the map last: one that hangs is not asked first again and again
        self._numbers: dict[str, int] = {}  # of addresses, for `vouched`
        self._next_number = itertools.count()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The primaries; until they are known, the starting points."""
        return self._access.config.nodes if self.known is None else self.known.addresses

    def slot_map(self, deadline: Deadline) -> SlotMap:
        """Return the map, asked for if none is known."""
        return self.refreshed(deadline) if self.known is None else self.known

    def refreshed(self, deadline: Deadline, *first: str) -> SlotMap:
        """Ask for the map and return it.

        Args:
            deadline: of the answer.
            first: nodes to ask first: of a slot that has just moved, a third node may know for seconds less than its new holder.
        """
        before = self.known
        asked = dict.fromkeys([*first, *self._answered, *self.addresses, *self._access.config.nodes])
        after = fetch_slot_map(asked, self._access, deadline)
        self.vouched[self.vouched != self.owners(after)] = -1
        self.known = after
        self._answered = (after.source,)
        self.on_the_way = {slot for slot in self.on_the_way if before and before.address_of(slot) == after.address_of(slot)}
        return after

    def follow(self, moved: Mapping[int, str], deadline: Deadline) -> None:
        """Take over the moves that answers told: while slots move, every batch hears of a few, and asking for the whole map takes long.

        Args:
            moved: by slot, its holder. Where they are many, or a primary is new, there may be many more, and the map is asked for: a
                replica that takes over has all slots of its primary at once.
            deadline: of its answer.
        """
        known = self.known
        if known is None or len(moved) > _MANY or not set(moved.values()) <= set(known.addresses):
            self.refreshed(deadline, *dict.fromkeys(moved.values()))
        else:
            slots = list(moved)
            self.known = known.with_moved(moved)
            self.vouched[slots] = -1
            self.on_the_way.difference_update(slots)

    def forget(self) -> None:
        """Let the next batch ask for the map."""
        self.known = None

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
