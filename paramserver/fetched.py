"""The records of a batch before it is applied, wherever they came from. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paramserver.cache import RecordCache


@dataclass(frozen=True, eq=False)
class Fetched:
    """Records of n rows, in the rows' order.

    Args:
        records: uint8 [n, record bytes]; without meaning where a row was not found.
        found: bool [n].
        tokens: uint64 [n] for conditional writes, or None.
    """

    records: NDArray[np.uint8]
    found: NDArray[np.bool_]
    tokens: NDArray[np.uint64] | None


def from_cache(cache: RecordCache, at: NDArray[np.int64], read: Fetched | None) -> Fetched:
    """Join cached rows with those that were read.

    Args:
        cache: of the table.
        at: int64 [n], place in the cache of each row, -1 for those that were read.
        read: the rows that were read, in order; None when all were cached.
    """
    if read is None:
        return Fetched(cache.records[at], np.ones(len(at), bool), cache.tokens[at])
    lacking = at < 0
    records = np.empty((len(at), cache.records.shape[1]), np.uint8)
    found, tokens = np.ones(len(at), bool), np.zeros(len(at), np.uint64)
    kept = ~lacking
    records[kept], records[lacking] = cache.records[at[kept]], read.records
    found[lacking] = read.found
    if read.tokens is not None:
        tokens[kept], tokens[lacking] = cache.tokens[at[kept]], read.tokens
    return Fetched(records, found, tokens)
