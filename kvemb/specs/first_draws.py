"""The draws that first values of rows are made of: numbers of one distribution, as a pure function of (table name, seed, id, column).

Every trainer and parameter server computes the same bits, whatever its CPU. Only integer operations and IEEE + - * / sqrt are used,
never NumPy's log, exp, cos or pow, whose last bits differ between CPUs. What must not live here: what users may ask for and how it is
checked (kvemb.specs.initializer), records, I/O, global random state.

Strategy: a counter generator (kvemb.arrays.hashing) gives 64-bit words of a row. Algorithm 2 cuts each into four lanes of 16 bits, one
for each column, and looks them up in a table: lane i stands for the distribution's quantile at (i + 1/2) / 2**16. The table has the mean,
the scale and the storage dtype in it, so a value costs a quarter of a hash and one gather. Algorithm 1 takes a word per column, and the
inverse distribution function (kvemb.arrays.inverse_normal) of its upper 52 bits; tables that were made with it keep it. In both, column
c depends neither on the number of columns nor on what begins the columns beside it. Blocks of rows keep memory bounded. Thread- and
fork-safe.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import column_words, digest64, mix64, row_blocks
from kvemb.arrays.inverse_normal import inverse_normal_cdf
from kvemb.arrays.rounding import round_nearest, to_float32

ALGORITHM_VERSION: Final = 2
"""Of new tables. It rises whenever the bits of any initial row change. It is part of a table's definition, and a table keeps its own."""
ALGORITHMS: Final = (1, 2)
"""All that rows can be drawn by. Golden vectors are kept for each."""

_LANES: Final = 4  # of 16 bits in a word
_N_QUANTILES: Final = 1 << 16
_MOST_TABLES: Final = 256  # of quantiles kept, 256 KiB each; making one takes about as long as drawing 2,000 rows of 64 columns
_BELOW_MINUS_2: Final = 0.022750131948179207  # Phi(-2), the mass cut off on each side of a truncated normal.


@dataclass(frozen=True)
class Distribution:
    """A distribution that first values are drawn from, shifted and scaled, in a storage dtype.

    Args:
        family: "uniform" (between 0 and 1), "normal" (of mean 0 and std 1) or "truncated_normal" (that, cut at 2).
        offset: added to what is drawn, after
        scale: was multiplied with it.
        dtype: storage dtype that values are rounded to.
    """

    family: str
    offset: float
    scale: float
    dtype: str = "float32"

    def at(self, u: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the values below which the fractions `u` of all draws lie; any shape, 0 < u < 1, which is overwritten."""
        drawn = self._standard(u)
        np.multiply(drawn, self.scale, out=drawn)
        np.add(drawn, self.offset, out=drawn)
        return to_float32(round_nearest(drawn.astype(np.float32), self.dtype), self.dtype)

    def _standard(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.family == "uniform":
            return u
        if self.family == "normal":
            return inverse_normal_cdf(u)
        np.multiply(u, 1.0 - 2.0 * _BELOW_MINUS_2, out=u)
        np.add(u, _BELOW_MINUS_2, out=u)
        return np.clip(inverse_normal_cdf(u), -2.0, 2.0)


def row_states(ids: NDArray[np.uint64], table: str, seed: int, algorithm: int) -> NDArray[np.uint64]:
    """Return one generator state per id: [n]."""
    key = np.array([digest64("kvemb.init", algorithm, part, table, seed) for part in ("id", "stream")], np.uint64)
    states = mix64(ids ^ key[0])
    np.add(states, key[1], out=states)
    return states


def draw(out: NDArray[np.float32], first: int, states: NDArray[np.uint64], distribution: Distribution, algorithm: int) -> None:
    """Fill columns of rows with draws.

    Args:
        out: [n, width], of any strides.
        first: which column of the row is out's first.
        states: [n], as `row_states` of the same algorithm returns them.
        distribution: to draw from.
        algorithm: one of `ALGORITHMS`.
    """
    width = out.shape[1]
    quantiles = quantiles_of(distribution) if algorithm > 1 else None
    for block in row_blocks(len(out), width):
        if quantiles is None:
            out[block] = distribution.at(_uniforms(states[block], first, width))
        else:  # no lane is outside of the table: the cheapest mode will do
            out[block] = quantiles.take(_lanes(states[block], first, width), mode="wrap")


@lru_cache(maxsize=_MOST_TABLES)
def quantiles_of(distribution: Distribution) -> NDArray[np.float32]:
    """Return the values that algorithm 2 draws, in ascending order, each as likely as the others: float32 [2**16], read-only."""
    u = np.arange(_N_QUANTILES, dtype=np.float64)
    np.add(u, 0.5, out=u)
    np.multiply(u, 1.0 / _N_QUANTILES, out=u)
    values = distribution.at(u)
    values.flags.writeable = False
    return values


def _words(states: NDArray[np.uint64], first: int, width: int) -> NDArray[np.uint64]:
    """[m, width] words, from counter `first` on."""
    words = np.empty((len(states), width), np.uint64)
    column_words(states, first, words, np.empty_like(words))
    return words


def _lanes(states: NDArray[np.uint64], first: int, width: int) -> NDArray[np.uint16]:
    """[m, width] 16 random bits for each column from `first` on: word c // 4 serves column c, from its lowest bits on."""
    begin, end = first // _LANES, -(-(first + width) // _LANES)
    lanes = _words(states, begin, end - begin).astype("<u8", copy=False).view("<u2")
    return lanes[:, first - begin * _LANES :][:, :width]


def _uniforms(states: NDArray[np.uint64], first: int, width: int) -> NDArray[np.float64]:
    """[m, width], from column `first` on: odd multiples of 2**-53 in (0, 1), never 0 or 1, symmetric about 1/2, every step exact."""
    words = _words(states, first, width)
    np.right_shift(words, np.uint64(12), out=words)
    # 52 bits and a half, not 53: the largest 53-bit word plus a half would round up to 1.
    u = words.astype(np.float64)
    np.add(u, 0.5, out=u)
    return np.multiply(u, 2.0**-52, out=u)
