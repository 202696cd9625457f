"""A count of how often ids that have no row have come, in bounded memory: a counting Bloom filter of two generations. Pure.

Each id has 4 cells, and each cell a byte for either generation. An id's count in a generation is the least of its cells there, so it may
be too high, and never too low. Only cells that would say less are raised ("conservative update"). When a generation has as many ids as
fill a quarter of its cells, the older one is forgotten and another begins. So an id is forgotten when a window's worth of other new ids
have come since, at the latest when two have; and the filter stays as large as it is. It begins small, with a window of 19,000 ids. As long
as it may grow, it is doubled with each new generation: the older one's cells are copied, and its ids keep their counts.

An id that was never here seems to have been, at worst, with a probability of 2 · (1/4)^4 = 0.8 %: a little before a generation ends. To
seem to have come several times is rarer.

Source: Fan, Cao, Almeida, Broder, "Summary cache", SIGCOMM 1998 (counting); Estan, Varghese, "New directions in traffic measurement and
accounting", SIGCOMM 2002 (conservative update).
"""

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import mix64

LEAST_CELLS, MOST_CELLS = 1 << 24, 1 << 28
"""Bounds of the cells that a filter may grow to: 32 MiB and 512 MiB."""
_FIRST_CELLS = 1 << 18
_N_HASHES = 4
_HASHES = np.arange(_N_HASHES, dtype=np.uint64)
_IDS_PER_CELL = 0.0719  # -ln(3/4) / 4: so many ids, each in 4 cells, fill a quarter
_LOW, _HALF = np.uint64(0xFFFF_FFFF), np.uint64(32)


class OccurrenceFilter:
    """Counts occurrences of ids. Not thread-safe."""

    def __init__(self) -> None:
        self._cells = np.zeros(_FIRST_CELLS, np.uint16)  # the younger generation's count in the low byte, the older one's in the high byte
        self._n_ids = 0  # in the younger generation

    @property
    def size_bytes(self) -> int:
        """Memory of the cells."""
        return self._cells.nbytes

    def reach(self, ids: NDArray[np.uint64], counts: NDArray[np.int64], n: int, *, most_cells: int) -> NDArray[np.bool_]:
        """Count occurrences; return which ids have come n times now, as far as is known: bool [m]. Those are not counted any further.

        Args:
            ids: uint64 [m], unique.
            counts: int64 [m], how often each has come.
        """
        words = mix64(ids)
        steps = (words >> _HALF) | np.uint64(1)
        places = ((words & _LOW)[:, None] + steps[:, None] * _HASHES) & np.uint64(len(self._cells) - 1)  # [m, 4]
        cells = self._cells[places]
        older, younger = cells >> np.uint16(8), cells & np.uint16(0xFF)  # uint16 [m, 4]
        least = younger.min(axis=1)
        reached: NDArray[np.bool_] = least + older.min(axis=1) + counts >= n
        below = np.flatnonzero(~reached)
        if len(below):
            self._raise(places[below], older[below], younger[below], (least[below] + counts[below]).astype(np.uint16))
            self._n_ids += int(np.count_nonzero(least[below] == 0))
            if self._n_ids >= _IDS_PER_CELL * len(self._cells):
                self._begin_generation(most_cells)
        return reached

    def _raise(self, places: NDArray[np.uint64], older: NDArray[np.uint16], younger: NDArray[np.uint16], to: NDArray[np.uint16]) -> None:
        """Let the cells of each id, [m, 4], say at least as much as its count, [m], in the younger generation."""
        order = np.argsort(to, kind="stable")  # of a cell that several ids share the last is what is written: the highest
        raised = np.maximum(younger, to[:, None]) | (older << np.uint16(8))
        self._cells[places[order]] = raised[order]

    def _begin_generation(self, most_cells: int) -> None:
        np.left_shift(self._cells, np.uint16(8), out=self._cells)
        if 2 * len(self._cells) <= most_cells:
            self._cells = np.tile(self._cells, 2)  # an id's place there is its place here, or that and the length: either has its count
        self._n_ids = 0


def cells_for(n_rows: int) -> int:
    """Return how many cells a filter may grow to, beside a table of so many rows: its window then has about as many ids, or more."""
    wanted = 1 << (max(1, int(n_rows / _IDS_PER_CELL)) - 1).bit_length()
    return min(MOST_CELLS, max(LEAST_CELLS, wanted))
