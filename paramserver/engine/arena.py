"""Memory that one batch after the other uses for its new records: the system clears fresh memory first, at half the price of using it."""

import numpy as np
from numpy.typing import NDArray

_KEPT_BYTES = 128 << 20


class RecordArena:
    """Hands out arrays that are good until the next `reset`. One thread.

    Example:
        >>> scratch = RecordArena()
        >>> scratch.take(2, 3).shape
        (2, 3)
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._n_used = 0

    def reset(self) -> None:
        """Take back everything that was handed out."""
        self._n_used = 0

    def take(self, n: int, size_bytes: int) -> NDArray[np.uint8]:
        """Return uint8 [n, size_bytes], contiguous, holding anything."""
        start, stop = self._n_used, self._n_used + n * size_bytes
        if stop > _KEPT_BYTES:
            return np.empty((n, size_bytes), np.uint8)
        if stop > len(self._memory):
            self._memory = np.empty(stop, np.uint8)  # arrays handed out before go on using the old one
        self._n_used = stop
        return self._memory[start:stop].reshape(n, size_bytes)
