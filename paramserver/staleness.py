"""How stale the rows were that a push was computed from. Pure."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvemb.record import MAX_K


def staleness(pairs: Iterable[tuple[NDArray[np.uint64], NDArray[np.uint64]]]) -> tuple[float, int]:
    """Compare the versions that a pull saw with those in force when its push is applied.

    Args:
        pairs: (seen, current) per table: uint64 [n] each, 0 = the row does not exist; seen is [0] where the push carried none.

    Returns:
        (fraction of rows that changed since, batches of the shard between the two versions of the most-changed row). The fraction is -1.0
        when no table carried versions. A row that was missing and exists now counts as one batch: when it began is not known.

    Example:
        >>> staleness([(np.array([1, 0, 5], np.uint64), np.array([4, 0, 5], np.uint64))])
        (0.3333333333333333, 3)
    """
    n_rows = n_changed = elapsed = 0
    for seen, current in pairs:
        if len(seen) != len(current) or not len(seen):
            continue
        n_rows += len(seen)
        n_changed += int((seen != current).sum())
        k_seen, k_now = (seen & np.uint64(MAX_K)).astype(np.int64), (current & np.uint64(MAX_K)).astype(np.int64)
        batches = np.where(seen == 0, (current != 0).astype(np.int64), k_now - k_seen)
        elapsed = max(elapsed, int(batches.max()))
    return (n_changed / n_rows if n_rows else -1.0), elapsed
