"""The node map of memcached and standalone Redis: which of the 16,384 virtual slots lives on which node. Pure.

Redis Cluster has a map of its own; here the map is ours. Slots are dealt to nodes in contiguous ranges of equal size, so the map follows
from the ordered list of nodes alone. Its digest, carried by every marker, tells two maps apart.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import digest64
from kvemb.schema.keys import N_SLOTS, RowKeys


@dataclass(frozen=True)
class NodeMap:
    """An ordered list of nodes that share the slots.

    Args:
        addresses: "host:port", in order; the order is part of the map.
        epoch: version of the map.
    """

    addresses: tuple[str, ...]
    epoch: int = 1

    @cached_property
    def slot_nodes(self) -> NDArray[np.int64]:
        """Which node holds each slot: int64 [16384]."""
        return np.arange(N_SLOTS) * len(self.addresses) // N_SLOTS

    @cached_property
    def digest(self) -> int:
        """64-bit digest of the number and order of nodes.

        Positions, not addresses, are digested: a node may move to another address (a new container IP) and keep its rows. The marker's node
        index tells when two addresses were swapped.
        """
        return digest64("node map", len(self.addresses), self.epoch)

    def nodes_of(self, keys: RowKeys) -> NDArray[np.int64] | None:
        """Return each key's node: int64 [n]; None when there is one node only."""
        return None if len(self.addresses) == 1 else self.slot_nodes[keys.slots()]
