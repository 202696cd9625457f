"""Which ids a batch asks for. Pure: the same seed draws the same batches.

Ids are scrambled to 64 random-looking bits, as hashed ids are, so that a client which sorts its ids does not read
records in the order in which the server allocated them.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import mix64

DISTRIBUTIONS = ("uniform", "zipf")
ZIPF_EXPONENT = 1.05


def row_ids(positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the ids of rows by position, distinct for distinct positions: uint64, same shape.

    Example:
        >>> len(set(row_ids(np.arange(1000)).tolist()))
        1000
    """
    return mix64(positions.astype(np.uint64))


def sampler(kind: str, n_rows: int, seed: int) -> Callable[[int], NDArray[np.int64]]:
    """Return a function that draws positions of rows in [0, n_rows).

    Args:
        kind: "uniform", or "zipf": p(rank) ~ rank ** -1.05, ranks spread at random over the rows.
        n_rows: how many rows there are.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    if kind == "uniform":
        return lambda size: rng.integers(0, n_rows, size)
    assert kind == "zipf", kind
    cumulated = np.cumsum(np.arange(1, n_rows + 1, dtype=np.float64) ** -ZIPF_EXPONENT)
    row_of_rank = rng.permutation(n_rows)
    # A draw at the very end of the last step may round up to the sum itself.
    return lambda size: row_of_rank[np.minimum(np.searchsorted(cumulated, rng.random(size) * cumulated[-1], "right"), n_rows - 1)]


def with_missing(positions: NDArray[np.int64], fraction: float, n_rows: int, seed: int) -> NDArray[np.int64]:
    """Move a fraction of the positions, rounded to whole ids, to [n_rows, 2 n_rows): rows that do not exist.

    Example:
        >>> moved = with_missing(np.zeros(1000, np.int64), 0.25, 10, seed=0)
        >>> int((moved >= 10).sum()), int(moved.max()) < 20
        (250, True)
    """
    rng = np.random.default_rng(seed)
    n_missing = round(fraction * len(positions))
    at = rng.permutation(len(positions))[:n_missing]
    moved = positions.copy()
    moved[at] = n_rows + rng.integers(0, n_rows, n_missing)
    return moved
