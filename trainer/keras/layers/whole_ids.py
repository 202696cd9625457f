"""Ids as arrays of the host with all their bits, or an error: backends and dtypes cut them off without a word."""

from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError

from ...bridge.step_tables import has_long_ids
from ...lookahead.cluster_ports import TablePort
from .keras_internals import backend_module


def is_ragged(value: Any) -> bool:
    """Whether ids are ragged or sparse: a tf.RaggedTensor, a tf.SparseTensor, an array of arrays."""
    return hasattr(value, "row_lengths") or hasattr(value, "dense_shape") or (isinstance(value, np.ndarray) and value.dtype == object)


def host(value: Any) -> NDArray[Any]:
    """Return a value as NumPy has it, without a copy where the backend allows."""
    if is_ragged(value):
        raise InvalidInputError("ids of a batch are ragged or sparse: put preprocess() of their layer into the input pipeline, or pad them")
    return value if isinstance(value, np.ndarray) else np.asarray(keras.ops.convert_to_numpy(value))


def whole_ids(value: Any, table: TablePort, declared: str | None = None) -> NDArray[Any]:
    """Return integer ids of any shape with all bits; refuse ragged ids, fractions, and ids that may have lost bits."""
    array, dtype = host(value), keras.backend.standardize_dtype(value.dtype)
    if array.dtype.kind == "f":
        limit = 1 << (8 if dtype == "bfloat16" else int(np.finfo(array.dtype).nmant) + 1)
        if not (np.abs(array) < limit).all():  # at the limit an id may be the next one, rounded
            raise _cut(table, f"came as {dtype}, which has not all bits of ids from {limit} on")
        whole = array.astype(np.int64)
        if not (whole == array).all():
            raise InvalidInputError(f"table {table.name!r}: ids must be integers, got fractions")
        return whole
    if has_long_ids(table) and (may_be_cut(value) or (array is not value and dtype == declared and array.dtype.itemsize < 8)):
        raise _cut(table, f"were made {dtype} on their way")
    return array


def may_be_cut(value: Any) -> bool:
    """Whether a value is an array of JAX whose integers may have had 64 bits before they came there."""
    jax = backend_module("jax")
    if jax is None or not keras.ops.is_tensor(value):
        return False
    return bool(value.dtype.kind in "iu" and value.dtype.itemsize < 8 and not jax.config.jax_enable_x64)


def _cut(table: TablePort, how: str) -> InvalidInputError:
    return InvalidInputError(
        f"table {table.name!r}: its ids {how}: another row may be taken. Make their Input with dtype='int64', and give ids as a NumPy "
        "array of int64 to fit, evaluate, predict or predict_on_batch, which take all bits on every backend; a direct call of a model "
        "does not on JAX, where ids of 64 bits need jax_enable_x64"
    )
