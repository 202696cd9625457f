"""Rows as jit wants them: a few shapes, whatever a batch's number of unique ids is.

What must not live here: lookups, and JAX. Strategy: rows are put into an array of a capacity that only grows, by about a half at a time.
So a step is compiled a few times and then never again. The last row is always zeros: it stands for padding.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST = 8
_ALIGNED_BYTES = 64  # what JAX takes over from NumPy without a copy, on a CPU


def capacity_of(n_rows: int) -> int:
    """Return the least capacity for so many rows and one of padding: 2**k, or 1.5 times that.

    Example:
        >>> [capacity_of(n) for n in (0, 7, 8, 11, 12, 100)]
        [8, 8, 12, 12, 16, 128]
    """
    capacity = _LEAST
    while capacity <= n_rows:
        capacity += capacity // 2 if capacity & (capacity - 1) == 0 else capacity // 3
    return capacity


def padded(rows: NDArray[np.float32], capacity: int) -> NDArray[np.float32]:
    """Return rows [n, dim] in an array [capacity, dim] of its own, zeros behind them: the one copy of a pull."""
    made = _aligned(capacity, rows.shape[1])
    made[: len(rows)] = rows
    made[len(rows) :] = 0
    return made


def positions(inverse: NDArray[np.intp], kept: NDArray[np.bool_] | None, shape: tuple[int, ...], capacity: int) -> NDArray[np.int32]:
    """Return where each id's row is.

    Args:
        inverse: intp [k], of the ids that were asked for.
        kept: bool [m], which of the m ids those were; None: all. The others get the last row.
        shape: of the ids.
        capacity: of the rows.
    """
    if kept is None:
        return inverse.astype(np.int32).reshape(shape)
    at = np.full(kept.shape, capacity - 1, np.int32)
    at[kept] = inverse
    return at.reshape(shape)


def _aligned(n_rows: int, dim: int) -> NDArray[np.float32]:
    n_bytes = 4 * n_rows * dim
    raw: NDArray[Any] = np.empty(n_bytes + _ALIGNED_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNED_BYTES
    return raw[start : start + n_bytes].view(np.float32).reshape(n_rows, dim)
