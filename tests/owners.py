"""Which shard owns which id in a new cluster, for tests that must know it beforehand."""

import numpy as np
from numpy.typing import NDArray

from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.slots import Placement
from kvemb.schema.table_def import TableDef

_USUAL = Placement(256)


def shard_of(ids: NDArray[np.uint64], n_shards: int, table: TableDef | None = None) -> NDArray[np.uint16]:
    """Return the shard that owns each id of a table; None: of one with the default number of buckets."""
    placement = _USUAL if table is None else table.placement
    return ClusterMap.first(0, n_shards).shards_of(placement.slots(ids))
