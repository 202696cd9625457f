"""Ragged and sparse bags of ids made dense, with weights that leave out what was padded. NumPy, and methods of tf.RaggedTensor.

What must not live here: layers. A tf.RaggedTensor within a tf.data.Dataset has no values yet: it is asked by its own methods.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError

from .feature_configs import FeatureConfig


def is_ragged(value: Any) -> bool:
    """Whether ids are ragged or sparse: a tf.RaggedTensor, a tf.SparseTensor, an array of arrays."""
    return hasattr(value, "row_lengths") or hasattr(value, "dense_shape") or (isinstance(value, np.ndarray) and value.dtype == object)


def dense_ids(of: FeatureConfig, ids: Any, weights: Any) -> tuple[Any, Any]:
    """Return ids [b, n] and their weights, None if all count as 1: padded, and cut at the n of `input_shape` where that is known.

    Args:
        of: whose ids they are.
        ids: of any kind; dense ones stay.
        weights: of the same kind, or None.

    Raises:
        InvalidInputError: weights of another shape.
    """
    if not is_ragged(ids):
        return ids, weights
    n = of.input_shape[1] if len(of.input_shape) > 1 else 1
    if hasattr(ids, "to_tensor"):
        factors = ids.with_flat_values(ids.flat_values * 0 + 1) if weights is None else weights
        return ids.to_tensor(shape=[None, n]), factors.to_tensor(shape=[None, n])
    flat, lengths = _flat(of, ids)
    factors = np.ones(len(flat), np.float32) if weights is None else _flat(of, weights)[0]
    if len(factors) != len(flat):
        raise InvalidInputError(f"feature {of.name!r}: {len(flat)} ids with {len(factors)} weights")
    return _padded(flat, lengths, n), _padded(factors.astype(np.float32), lengths, n)


def _flat(of: FeatureConfig, given: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The values of all rows, one after another, and how many each row has [b]."""
    if not hasattr(given, "dense_shape"):
        lengths = np.fromiter(map(len, given), np.int64, len(given))
        return (np.concatenate(given) if len(given) else np.empty(0, np.int64)), lengths
    try:
        rows, n_rows = given.indices.numpy()[:, 0], int(given.dense_shape.numpy()[0])
    except AttributeError as error:
        raise InvalidInputError(
            f"feature {of.name!r} is a tf.SparseTensor without values yet; make it ragged (tf.RaggedTensor.from_sparse) before preprocess()"
        ) from error
    return given.values.numpy(), np.bincount(rows, minlength=n_rows)


def _padded(flat: NDArray[Any], lengths: NDArray[np.int64], n: int | None) -> NDArray[Any]:
    wide = int(lengths.max(initial=0)) if n is None else n
    row = np.repeat(np.arange(len(lengths)), lengths)  # [m], of each value
    column = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # [m], its place in its row
    kept = column < wide
    padded = np.zeros((len(lengths), wide), flat.dtype)
    padded[row[kept], column[kept]] = flat[kept]
    return padded
