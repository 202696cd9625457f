"""How stale the rows were that a push was computed from. Pure but for the index, which is the apply thread's."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvemb.schema.record import MAX_K

from ..model.batch import ReceivedPart
from ..model.tables import Tables


def part_staleness(part: ReceivedPart, tables: Tables) -> tuple[float, int]:
    """Return the `staleness` of a part that is to be applied next. Apply thread only."""
    seen = [rows for rows in part.tables if len(rows.versions)]
    return staleness((rows.versions, tables.state(rows.definition).versions(rows.ids, keep=True)) for rows in seen)


def staleness(pairs: Iterable[tuple[NDArray[np.uint64], NDArray[np.uint64]]]) -> tuple[float, int]:
    """Compare the versions that a pull saw with those in force when its push is applied.

    Args:
        pairs: (seen, current) per table: uint64 [n] each, 0 = the row does not exist; seen is [0] where the push carried none.

    Returns:
        (fraction of rows that changed since, batches of the shard that went by). The fraction is -1.0 when no table carried versions.
        Batches are counted from the newest version that the pull saw to the newest one now, at least 1 where a row changed and 0 where
        none did: when the pull was made is not known, but it was behind the newest batch that it saw. (A row's own two versions would count
        all the time in which nobody touched it before the pull.) Where the rows are from several pulls, the newest counts. Where no row
        existed, it is 1.

    Example:
        >>> staleness([(np.array([1, 0, 5], np.uint64), np.array([7, 0, 5], np.uint64))])
        (0.3333333333333333, 2)
    """
    n_rows = n_changed = newest_seen = newest_now = 0
    for seen, current in pairs:
        if len(seen) != len(current) or not len(seen):
            continue
        n_rows += len(seen)
        n_changed += int(np.count_nonzero(seen != current))
        newest_seen, newest_now = max(newest_seen, int(seen.max())), max(newest_now, int(current.max()))
    if not n_changed:
        return (0.0 if n_rows else -1.0), 0
    elapsed = (newest_now & MAX_K) - (newest_seen & MAX_K) if newest_seen else 1
    return n_changed / n_rows, max(1, elapsed)
