"""Initializers: how the rows of a table begin, as functions that users call.

`kvemb.init.first_draws` draws their numbers, which are the same on every machine. A random number is one of 65,536 values: the middles of
as many equal parts of the distribution.
"""

from typing import TYPE_CHECKING

from kvemb.errors import no_attribute
from kvemb.init.first_draws import ALGORITHM_VERSION
from kvemb.init.initializer import FANS, Initializer

__all__ = [
    "ALGORITHM_VERSION",
    "Initializer",
    "columns",
    "constant",
    "normal",
    "truncated_normal",
    "uniform",
    "xavier_normal",
    "xavier_uniform",
    "zeros",
]

if not TYPE_CHECKING:  # it would have any name for a type checker

    def __getattr__(name: str) -> object:
        raise no_attribute(__name__, name, __all__)


def zeros() -> Initializer:
    """Start every row at zero.

    Example:
        >>> zeros().to_dict()
        {'kind': 'zeros'}
    """
    return Initializer("zeros")


def constant(value: float) -> Initializer:
    """Start every element at `value`, rounded to float32.

    Example:
        >>> import numpy as np
        >>> constant(0.5).rows(np.array([1], np.uint64), 2, table="t", seed=0).tolist()
        [[0.5, 0.5]]
    """
    return Initializer("constant", (("value", value),))


def uniform(low: float = -0.05, high: float = 0.05) -> Initializer:
    """Draw uniformly between `low` and `high`: one of 65,536 evenly spaced values, half a step away from either bound.

    Rounding to the table's dtype can give a bound.

    Example:
        >>> uniform(high=1).to_dict()
        {'kind': 'uniform', 'low': -0.05, 'high': 1.0}
    """
    return Initializer("uniform", (("low", low), ("high", high)))


def normal(mean: float = 0.0, std: float = 0.01) -> Initializer:
    """Draw from the normal distribution N(mean, std**2), in 65,536 equally likely values.

    None is farther than 4.325 std from the mean; the variance is 0.99998 of std**2, and the kurtosis 2.9992.

    Example:
        >>> normal(std=0.1).to_dict()
        {'kind': 'normal', 'mean': 0.0, 'std': 0.1}
    """
    return Initializer("normal", (("mean", mean), ("std", std)))


def truncated_normal(mean: float = 0.0, std: float = 0.01) -> Initializer:
    """Draw from N(mean, std**2) cut at mean +- 2 std, as torch's and TensorFlow's truncated normals are by default.

    `std` belongs to the distribution before the cut; what remains has 0.8796 std. There are 65,536 equally likely values.

    Example:
        >>> truncated_normal().to_dict()
        {'kind': 'truncated_normal', 'mean': 0.0, 'std': 0.01}
    """
    return Initializer("truncated_normal", (("mean", mean), ("std", std)))


def xavier_uniform(gain: float = 1.0, fan_in: int | None = None, fan_out: int | None = None) -> Initializer:
    """Draw uniformly within +- gain * sqrt(6 / (fan_in + fan_out)).

    Args:
        gain: scale.
        fan_in: inputs of the layer; the table's dim by default. A framework takes the number of rows, which is not known
            here. And a first value that depended on it would not be a pure function of the id.
        fan_out: outputs; the table's dim by default.

    Source: Glorot, Bengio, "Understanding the difficulty of training deep feedforward neural networks", AISTATS 2010.

    Example:
        >>> xavier_uniform(fan_in=64).to_dict()
        {'kind': 'xavier_uniform', 'gain': 1.0, 'fan_in': 64}
    """
    return _xavier("xavier_uniform", gain, fan_in, fan_out)


def xavier_normal(gain: float = 1.0, fan_in: int | None = None, fan_out: int | None = None) -> Initializer:
    """Draw from a normal distribution of std gain * sqrt(2 / (fan_in + fan_out)).

    Arguments and source are those of `xavier_uniform`.

    Example:
        >>> xavier_normal().to_dict()
        {'kind': 'xavier_normal', 'gain': 1.0}
    """
    return _xavier("xavier_normal", gain, fan_in, fan_out)


def columns(*parts: tuple[int, Initializer]) -> Initializer:
    """Start ranges of columns differently: a bias at zero beside random factors, in one row.

    Args:
        parts: (width, initializer) pairs, from the first column to the last; the widths' sum is the table's dim.

    A column has the bits that its part's initializer gives to that column of a whole row, whichever parts are beside it.
    So parts of one kind never repeat each other, and changing one part leaves the others alone while widths stay.
    Only the fans of Xavier's initializers default to the part's width, which is its layer's.

    Example:
        >>> import numpy as np
        >>> biased = columns((1, zeros()), (2, normal(std=0.01)))
        >>> row = biased.rows(np.array([7], np.uint64), 3, table="user", seed=0)
        >>> whole = normal(std=0.01).rows(np.array([7], np.uint64), 3, table="user", seed=0)
        >>> float(row[0, 0]), bool((row[0, 1:] == whole[0, 1:]).all())
        (0.0, True)
        >>> biased.to_dict()
        {'kind': 'columns', 'parts': [{'width': 1, 'kind': 'zeros'}, {'width': 2, 'kind': 'normal', 'mean': 0.0, 'std': 0.01}]}
    """
    return Initializer("columns", parts=parts)


def _xavier(kind: str, gain: float, fan_in: int | None, fan_out: int | None) -> Initializer:
    fans = ((name, fan) for name, fan in zip(FANS, (fan_in, fan_out), strict=True) if fan is not None)
    return Initializer(kind, (("gain", gain), *fans))
