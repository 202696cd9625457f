"""Memory that each thread keeps from one call to its next.

The system clears new memory page by page. That costs more than all that a pull does with its bytes: 0.06 against 0.015 µs of CPU per row to
copy and gather 16 weights. Each thread has its own; a forked child goes on with copies.
"""

import threading

import numpy as np
from numpy.typing import NDArray

_KEPT_BYTES = 64 << 20  # per thread; what a larger call needs on top is given back
_ALIGN_BYTES = 64


class ThreadArena(threading.local):
    """Memory of the calling thread, taken piece by piece and good until its next `reset`."""

    def __init__(self) -> None:
        self._kept, self._used = np.empty(0, np.uint8), 0

    def reset(self, n_bytes: int) -> None:
        """Take everything back, and have room for so many bytes (in few pieces)."""
        self._used = 0
        if len(self._kept) < min(n_bytes, _KEPT_BYTES):
            self._kept = np.empty(min(n_bytes + n_bytes // 8, _KEPT_BYTES), np.uint8)

    def take(self, n: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return uint8 [n, size_bytes] of no defined content."""
        start = -(-self._used // _ALIGN_BYTES) * _ALIGN_BYTES
        stop = start + n * size_bytes
        if stop > len(self._kept):
            return np.empty((n, size_bytes), np.uint8)
        self._used = stop
        return self._kept[start:stop].reshape(n, size_bytes)
