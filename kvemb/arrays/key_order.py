"""The order in which a table's rows are listed, in memory and on disk: by keys of 64 bits, each of which is one id's. Pure, NumPy only.

A key's upper 14 bits are the id's slot (`kvemb.schema.slots`; a table of fewer groups has them in ranges of slots). So the rows of a slot,
and of a bucket, lie side by side. What must not live here: which rows exist.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import mix64, unmix64

Words = NDArray[np.uint64]
SLOT_SHIFT = 50
"""Bits of a key below the slot."""
MOST_GROUPED_IDS = 1 << SLOT_SHIFT
_BELOW = np.uint64(MOST_GROUPED_IDS - 1)


@dataclass(frozen=True)
class KeyOrder:
    """The keys of a table's ids: the mixed id; where neighbouring ids share a page, the slot, and then the id itself.

    Args:
        ids_per_group: so many neighbouring ids are mixed as one; above 1, every id is below 2**50.

    Example:
        >>> order, ids = KeyOrder(2), np.array([0, 1, 2, 3], np.uint64)
        >>> keys = order.keys(ids)
        >>> (keys >> np.uint64(SLOT_SHIFT)).tolist(), order.ids(keys).tolist()
        ([0, 0, 5540, 5540], [0, 1, 2, 3])
    """

    ids_per_group: int = 1

    def keys(self, ids: Words) -> Words:
        """Return the key of each id: uint64 [n]."""
        if self.ids_per_group == 1:
            return mix64(ids)
        return self._slots_of(ids) | ids

    def ids(self, keys: Words) -> Words:
        """Return the id of each key: uint64 [n]."""
        return unmix64(keys) if self.ids_per_group == 1 else keys & _BELOW

    @property
    def grain(self) -> int:
        """Rows whose keys are in one range of so many, aligned, have hashes in that range, and no others do."""
        return 1 if self.ids_per_group == 1 else 1 << SLOT_SHIFT

    def hashes(self, ids: Words) -> Words:
        """Return a hash of each id for a table in memory, evenly spread within its slot: uint64 [n], a new array.

        Slots have the same order by hash as by key, so that rows in a range of keys are found in a range of the table. Within a slot the
        order by key may be another: ids that share a page would be crowded there.
        """
        if self.ids_per_group == 1:
            return mix64(ids)
        hashes = mix64(ids)
        hashes >>= np.uint64(64 - SLOT_SHIFT)
        return self._slots_of(ids) | hashes

    def _slots_of(self, ids: Words) -> Words:
        return mix64(ids // np.uint64(self.ids_per_group)) & ~_BELOW
