"""What an applied part brings back to a trainer that keeps rows (kvemb.datapath.row_cache): updated weights, and how far others have got.

The weights are those that the engine has just written, so nothing is read for them. What is not at hand is left out, and the trainer drops
its rows. What must not live here: when a trainer may use them. Apply thread only.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..model.batch import Batch, Push, ReceivedPart
from ..model.prepared_rows import PreparedRows

MAX_TRAINERS = 65536


class OthersCount:
    """Counts batches, and for every trainer those in which it was alone: the rest may have changed its rows for somebody else.

    Example:
        >>> count, push = OthersCount(), Push("a", 7, 1, ())
        >>> count.add([push])
        >>> count.add([])  # an assign, say
        >>> count.of(push)
        1
    """

    def __init__(self) -> None:
        self._n_batches = 0
        self._alone: OrderedDict[tuple[str, int], int] = OrderedDict()

    def add(self, pushes: Sequence[Push]) -> None:
        """Count a batch; no pushes for one that is not made of pushes."""
        self._n_batches += 1
        trainers = {(push.trainer, push.incarnation) for push in pushes}
        if len(trainers) == 1:
            (trainer,) = trainers
            self._alone[trainer] = self._alone.pop(trainer, 0) + 1
            if len(self._alone) > MAX_TRAINERS:  # its count rises then, as if others had been at work
                self._alone.popitem(last=False)

    def of(self, push: Push) -> int:
        """Return how many batches so far were not this trainer's alone."""
        return self._n_batches - self._alone.get((push.trainer, push.incarnation), 0)


def weights_at_hand(batch: Batch, written: Sequence[PreparedRows]) -> dict[str, NDArray[np.uint8]]:
    """Return the updated weights of the tables that the batch's last round wrote whole: copies, uint8 [n, row bytes], in its ids' order."""
    n_rows = {rows.definition.name: len(rows.ids) for rows in batch.tables}
    return {one.rows.definition.name: one.weights for one in written if len(one.rows.ids) == n_rows[one.rows.definition.name] > 0}


def returned_rows(part: ReceivedPart, batch: Batch, weights: Mapping[str, NDArray[np.uint8]]) -> list[bytes]:
    """Pick a part's updated weights out of its batch's.

    Args:
        part: whose ids are all in the batch.
        batch: as applied, ids of each table in ascending order.
        weights: of the tables where all are at hand: uint8 [n, row bytes], contiguous, in the order of the batch's ids.

    Returns:
        For each table of the part its weights, in the order of its ids and in the storage dtype. [] if any of them is not at hand.
    """
    ids_of = {rows.definition.name: rows.ids for rows in batch.tables}
    found: list[bytes] = []
    for rows in part.tables:
        name = rows.definition.name
        if not len(rows.ids):
            found.append(b"")
            continue
        if name not in weights:
            return []
        every = weights[name]
        if not np.array_equal(rows.ids, ids_of[name]):
            at = np.searchsorted(ids_of[name], rows.ids)
            every = every.view(f"V{every.shape[1]}")[at]  # a row as one item: these are copied whole
        found.append(every.tobytes())
    return found
