"""The draws that first values of rows are made of: numbers of one distribution, as a pure function of (table name, seed, id, column).

Every trainer and parameter server computes the same bits, on any CPU. Only integer operations and IEEE + - * / sqrt are used, never
NumPy's log, exp, cos or pow: they dispatch on vector extensions, so their last bits differ between CPUs, and libm's between systems. What
must not live here: the users' options and their checks (kvemb.init.initializer), records, I/O, global random state.

Strategy: a counter generator (kvemb.arrays.hashing) gives 64-bit words of a row. Algorithm 2 cuts each into four lanes of 16 bits, one for
each column, and looks them up in a table: lane i stands for the distribution's quantile at (i + 1/2) / 2**16. The table has the mean, the
scale and the storage dtype in it, so a value costs a quarter of a hash and one gather. Algorithm 1 takes a word per column, and the inverse
distribution function of its upper 52 bits; tables that were made with it keep it. In both, column c depends neither on the number of
columns nor on the initializers of other columns. Blocks of rows keep memory bounded. Thread- and fork-safe.

The inverse normal distribution function has a logarithm of its own, taken from the bits of the argument. One rational function of the
centre (85 % of the mass) is computed for all elements, then the tails are overwritten. Each operation is its own ufunc call, so no compiler
can fuse a multiply and an add.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import column_words, digest64, mix64, row_blocks
from kvemb.arrays.rounding import round_nearest, to_float32

# Coefficients of AS241 (PPND16), highest power first.
_A: Final = (
    2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
    1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0,
)  # fmt: skip
_B: Final = (
    5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
    5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0,
)  # fmt: skip
_C: Final = (
    7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
    3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0,
)  # fmt: skip
_D: Final = (
    1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
    6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0,
)  # fmt: skip
_E: Final = (
    2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
    2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0,
)  # fmt: skip
_F: Final = (
    2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
    1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0,
)  # fmt: skip

# Coefficients of fdlibm's e_log.c: log(1 + f) by atanh's series in s = f / (2 + f), economised. ln 2 comes in two parts, the first short
# enough for exponent * part to be exact.
_LN2_HIGH: Final = 6.93147180369123816490e-01
_LN2_LOW: Final = 1.90821492927058770002e-10
_LG: Final = (
    1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
    2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01, 0.0,
)  # fmt: skip
_ROOT_HALF_BITS: Final = np.uint64(0x3FE6A09E00000000)  # sqrt(1/2), cut short.
_TO_ROOT_HALF: Final = np.uint64(0x3FF0000000000000 - 0x3FE6A09E00000000)
_FRACTION_MASK: Final = np.uint64(0x000FFFFFFFFFFFFF)
_EXPONENT_SHIFT: Final = np.uint64(52)


def portable_log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the natural logarithm with the same bits everywhere; relative error below 1e-15.

    Args:
        x: positive normal numbers (not zero, subnormal, infinite or NaN), any shape, float64. Trusted, not changed.

    Returns:
        float64 of the same shape.

    Source: Sun Microsystems, fdlibm, e_log.c.

    Example:
        >>> import numpy as np
        >>> portable_log(np.array([1.0, 0.5, 2.0, 10.0])).tolist()
        [0.0, -0.6931471805599453, 0.6931471805599453, 2.302585092994046]
    """
    # Split x = 2**k * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)): the sum moves the exponent's carry to sqrt(1/2).
    bits = np.ascontiguousarray(x).view(np.uint64) + _TO_ROOT_HALF
    k = (bits >> _EXPONENT_SHIFT).astype(np.float64) - 1023.0
    f = ((bits & _FRACTION_MASK) + _ROOT_HALF_BITS).view(np.float64) - 1.0
    s = f / (f + 2.0)
    series = _polynomial(_LG, s * s)
    half = f * f * 0.5
    # Ordered so that the largest terms are added last (fdlibm).
    return (k * _LN2_HIGH - ((half - (s * (half + series) + k * _LN2_LOW)) - f)).reshape(x.shape)


def inverse_normal_cdf(u: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute z with Phi(z) = u for the standard normal distribution, to about 1e-15 relative, the same bits
    everywhere.

    Args:
        u: probabilities strictly between 0 and 1, any shape, float64. Trusted, not changed.

    Returns:
        float64 of the same shape, in about [-38, 8.3].

    Source: Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied Statistics 37 (1988),
        PPND16.

    Example:
        >>> import numpy as np
        >>> inverse_normal_cdf(np.array([0.025, 0.5, 0.975])).round(6).tolist()
        [-1.959964, 0.0, 1.959964]
    """
    q = np.subtract(u, 0.5, out=np.empty(u.shape))
    r = np.multiply(q, q, out=np.empty_like(q))
    np.subtract(0.180625, r, out=r)
    tail = np.flatnonzero(r < 0.0)
    np.maximum(r, 0.0, out=r)  # The centre's denominator has roots beyond it; the tails are overwritten below.
    z = _polynomial(_A, r)
    np.divide(z, _polynomial(_B, r), out=z)
    np.multiply(z, q, out=z)
    if tail.size:
        sides = q.ravel()[tail]
        z.ravel()[tail] = _tail(u.ravel()[tail], sides)
    return z


def _tail(u: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inverse where |u - 1/2| > 0.425, all 1-D: rational functions of sqrt(-log(smaller side's probability))."""
    r = np.sqrt(-portable_log(np.where(q < 0.0, u, 1.0 - u)))
    near = r - 1.6
    z = _polynomial(_C, near)
    z /= _polynomial(_D, near)
    far = np.flatnonzero(r > 5.0)  # Probability below 1.4e-11: almost never, but it must be right.
    if far.size:
        beyond = r[far] - 5.0
        z[far] = _polynomial(_E, beyond) / _polynomial(_F, beyond)
    return np.where(q < 0.0, -z, z)


def _polynomial(coefficients: tuple[float, ...], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Horner's rule; a new array. Highest power first."""
    total = np.multiply(x, coefficients[0], out=np.empty_like(x))
    for coefficient in coefficients[1:-1]:
        np.add(total, coefficient, out=total)
        np.multiply(total, x, out=total)
    return np.add(total, coefficients[-1], out=total)


ALGORITHM_VERSION: Final = 2
"""Of new tables. It rises whenever the bits of any initial row change. It is part of a table's definition, and a table keeps its own."""
ALGORITHMS: Final = (1, 2)
"""All algorithms that draw rows. Golden vectors are kept for each."""

_LANES: Final = 4  # of 16 bits in a word
_N_QUANTILES: Final = 1 << 16
_MOST_TABLES: Final = 256  # of quantiles kept, 256 KiB each; making one takes about as long as drawing 2,000 rows of 64 columns
_BELOW_MINUS_2: Final = 0.022750131948179207  # Phi(-2), the mass cut off on each side of a truncated normal.


@dataclass(frozen=True)
class Distribution:
    """A distribution that first values are drawn from, shifted and scaled, in a storage dtype.

    Args:
        family: "uniform" (between 0 and 1), "normal" (of mean 0 and std 1) or "truncated_normal" (that, cut at 2).
        offset: added after scaling.
        scale: the factor of a number drawn.
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
