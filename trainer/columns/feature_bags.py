"""What a feature holds, whichever way it came: bags of values, one after another.

Dense arrays and lists have missing values (-1 for integers, "" for text, as in TensorFlow), which are left out here. In jagged input
nothing is missing. No loop over values; lists of Python objects are walked once, at the edge. What must not live here: what a value means
(`column_kinds`), and any framework's tensors (its bridge hands over arrays).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError

MISSING_INTEGER = -1
MISSING_TEXT = ("", b"")


@dataclass(frozen=True, eq=False)
class Bags:
    """The values of one feature in one batch.

    Args:
        values: [m]: integers, floats, or objects that are str or bytes; bag after bag.
        lengths: int64 [b]: how many values each bag has.
        weights: float32 [m], or None where values have none.
    """

    values: NDArray[Any]
    lengths: NDArray[np.int64]
    weights: NDArray[np.float32] | None = None

    def keep(self, mask: NDArray[np.bool_]) -> "Bags":
        """Return the bags with only those values for which `mask` bool [m] is true; bags may become empty.

        Example:
            >>> left = Bags(np.array([3, -1, 5]), np.array([2, 0, 1])).keep(np.array([True, False, True]))
            >>> left.values.tolist(), left.lengths.tolist()
            ([3, 5], [1, 0, 1])
        """
        if mask.all():
            return self
        kept = np.concatenate([[0], np.cumsum(mask)])
        ends = np.cumsum(self.lengths)
        weights = None if self.weights is None else self.weights[mask]
        return Bags(self.values[mask], kept[ends] - kept[ends - self.lengths], weights)

    def present(self) -> "Bags":
        """Return the bags without the values that stand for a missing one."""
        if self.values.dtype.kind in "iu":
            return self.keep(self.values != MISSING_INTEGER)
        if self.values.dtype.kind == "O":
            return self.keep(np.fromiter((value not in MISSING_TEXT for value in self.values.tolist()), np.bool_, len(self.values)))
        return self


def dense_bags(array: NDArray[Any]) -> Bags:
    """Read an array, missing values included.

    Args:
        array: [b], a value each, or [b, l]: numbers, text (NumPy's str, bytes or StringDType), or objects that are text.

    Raises:
        InvalidInputError: another number of axes, or another kind of values.

    Example:
        >>> bags = dense_bags(np.array([[3, -1], [4, 5]]))
        >>> bags.values.tolist(), bags.lengths.tolist()
        ([3, -1, 4, 5], [2, 2])
    """
    if array.ndim not in (1, 2):
        raise InvalidInputError(f"a dense feature must have the shape [b] or [b, l], got {array.shape}")
    if array.dtype.kind not in "iufUSTO":
        raise InvalidInputError(f"a feature must hold integers, floats or text, got dtype {array.dtype}")
    length = 1 if array.ndim == 1 else array.shape[1]
    flat = array.reshape(-1)
    return Bags(flat.astype(object) if flat.dtype.kind in "UST" else flat, np.full(len(array), length, np.int64))


def jagged_bags(values: NDArray[Any], lengths: NDArray[Any], weights: NDArray[Any] | None = None) -> Bags:
    """Read values [m] and the lengths [b] of the bags that they make up.

    Raises:
        InvalidInputError: the lengths are no lengths, or do not add up to m.
    """
    if lengths.dtype.kind not in "iu" or lengths.ndim != 1 or values.ndim != 1:
        raise InvalidInputError(
            f"jagged: values {values.dtype} {values.shape}, lengths {lengths.dtype} {lengths.shape}; give [m] and integers [b]"
        )
    if (lengths < 0).any() or int(lengths.sum()) != len(values):
        raise InvalidInputError(f"jagged: lengths add up to {int(lengths.sum())} and must be at least 0; there are {len(values)} values")
    if weights is not None and weights.shape != values.shape:
        raise InvalidInputError(f"jagged: weights have the shape {weights.shape}, values {values.shape}")
    return Bags(values, lengths.astype(np.int64, copy=False), None if weights is None else weights.astype(np.float32, copy=False))


def list_bags(rows: Sequence[Any]) -> Bags:
    """Read a list of b values (numbers, str or bytes), or of b lists of them that may differ in length; missing values included.

    Raises:
        InvalidInputError: text and numbers are mixed, or lists are nested deeper.

    Example:
        >>> bags = list_bags([["a", "b"], [], ["c"]])
        >>> bags.values.tolist(), bags.lengths.tolist()
        (['a', 'b', 'c'], [2, 0, 1])
    """
    nested = [isinstance(row, list | tuple) for row in rows]
    if any(nested) and not all(nested):
        raise InvalidInputError("a list feature must hold values, or lists of values, not both")
    lengths = np.fromiter(map(len, rows), np.int64, len(rows)) if any(nested) else np.ones(len(rows), np.int64)
    flat = list(chain.from_iterable(rows)) if any(nested) else list(rows)
    if any(isinstance(value, str | bytes) for value in flat):
        values = np.empty(len(flat), object)
        values[:] = flat
        return Bags(values, lengths)
    try:
        values = np.asarray(flat if flat else np.empty(0, np.int64))
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError(f"a list feature cannot be read: {error}") from error
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        raise InvalidInputError(
            f"a list feature must hold integers, floats, str or bytes, got dtype {values.dtype} of shape {values.shape}"
        )
    return Bags(values, lengths)
