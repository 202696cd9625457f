"""Compare-and-swap tokens of rows at their other node, while a plan moves slots between nodes. Apply thread only.

A token is good for one node, and the cache of records keeps the one for the node that the map names. Without the other one, every second
write would look at its row first. And after the flip, when the two nodes have changed places, every cached row would meet a conflict, and
be fetched. So the cache keeps both (`RecordCache.second_tokens`), and with the flip they change places.

What is kept is a guess that the node judges: a token that is stale, or another node's, makes a conflict, and then the row is looked at. So
all of them are forgotten when anything else happens to the map.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.index.record_cache import RecordCache
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.move_plan import FLIPPED, MOVING, NODES


@dataclass(frozen=True, eq=False)
class SecondTokens:
    """What is known of n rows at their other node.

    Args:
        cluster_map: by which they have one.
        tokens: uint64 [n], 0 for nothing; a write to the other node puts in what it learns.
    """

    cluster_map: ClusterMap
    tokens: NDArray[np.uint64]

    @property
    def may_be_new(self) -> bool:
        """Whether a row of which nothing is known is most likely not there yet."""
        return _phase(self.cluster_map) == MOVING


def write_both(cluster_map: ClusterMap) -> bool:
    """Whether rows of some slots are written to two nodes."""
    return _phase(cluster_map) in (MOVING, FLIPPED)


def follow(before: ClusterMap | None, now: ClusterMap, caches: Iterable[RecordCache]) -> None:
    """Have caches that were in step with one map be in step with the next one."""
    flips = before is not None and (_phase(before), _phase(now)) == (MOVING, FLIPPED)
    for cache in caches:
        if flips:
            cache.swap_tokens()
        else:
            cache.forget_second_tokens()


def _phase(cluster_map: ClusterMap) -> str:
    plan = cluster_map.plan
    return plan.phase if plan is not None and plan.kind == NODES else ""
