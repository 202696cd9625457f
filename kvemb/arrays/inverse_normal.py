"""The inverse normal distribution function, from IEEE + - * / and sqrt alone: the same bits on every CPU.

NumPy's log and exp differ in their last bits between CPUs, because they dispatch on vector extensions. libm differs between systems. The
first value of a row must not differ. So the logarithm is our own, taken from the bits of the argument. What must not live here: generators
and initializers, and any call of a transcendental function (a test looks for them).

Strategy: one rational function of the centre (85 % of the mass) over all elements, then the tails overwritten. Each
operation is its own ufunc call, so no compiler can fuse a multiply and an add.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

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
