"""Features as a batch holds them: tensors, arrays, lists or jagged features, read into bags or numbers.

What must not live here: what values mean (`trainer.columns`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvemb.arrays.ids import refuse_masked
from kvemb.errors import InvalidInputError

from ...columns.column_kinds import BucketizedColumn, CategoricalColumn, NumericColumn, WeightedColumn
from ...columns.feature_bags import Bags, dense_bags, jagged_bags, list_bags


class Jagged(Protocol):
    """What a jagged feature offers, our JaggedTensor or TorchRec's: values and lengths."""

    def values(self) -> Tensor:
        """All values, bag after bag: [m]."""
        ...

    def lengths(self) -> Tensor:
        """How many values each bag has: [b]."""
        ...


Feature = Tensor | Jagged | NDArray[Any] | Sequence[Any]


def read_bags(column: CategoricalColumn, features: Mapping[str, Feature]) -> Bags:
    """Read the values of a column, with their weights if it has any; missing ones are left out.

    Raises:
        InvalidInputError: the feature is not there or cannot be read, naming it.
    """
    if isinstance(column, BucketizedColumn):
        values = numbers(column.source, features)
        flat = _array(values).reshape(-1)
        return Bags(flat, np.full(len(values), column.source.width, np.int64))
    value = _feature(column.key, features)
    bags = _read(column.key, value)
    if isinstance(column, WeightedColumn):
        weights = _feature(column.weight_key, features)
        _refuse_gradient(column.weight_key, weights)
        given = _read(column.weight_key, weights)
        if not np.array_equal(given.lengths, bags.lengths) or given.values.dtype.kind not in "iuf":
            raise InvalidInputError(f"feature {column.weight_key!r} must hold a number for each value of feature {column.key!r}")
        bags = Bags(bags.values, bags.lengths, given.values.astype(np.float32))
    return bags if _is_jagged(value) else bags.present()


def numbers(column: NumericColumn, features: Mapping[str, Feature]) -> Tensor:
    """Read the numbers of a column, normalized: float32 [b, width].

    Raises:
        InvalidInputError: the feature is not there, holds no numbers, or has another shape; naming it.
    """
    value = _feature(column.key, features)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iufb":
        value = torch.from_numpy(value.astype(np.float32))  # a copy: arrays may be read-only, which torch would warn of
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(f"feature {column.key!r} holds no numbers: {error}") from error
    if tensor.is_complex() or tensor.dim() == 0 or tensor.shape[1:] not in (column.shape, () if column.width == 1 else column.shape):
        shape = ", ".join(map(str, ("b", *column.shape)))
        raise InvalidInputError(f"feature {column.key!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected numbers [{shape}]")
    tensor = tensor.to(torch.float32).reshape(-1, *column.shape)
    if column.normalizer_fn is not None:
        tensor = _normalized(column, tensor)
    return tensor.reshape(len(tensor), column.width)


def device_of(features: Mapping[str, Feature]) -> torch.device:
    """Return the device of the first tensor among the features."""
    tensors = (value.values() if _is_jagged(value) else value for value in features.values())
    return next((tensor.device for tensor in tensors if isinstance(tensor, Tensor)), torch.device("cpu"))


def _normalized(column: NumericColumn, given: Tensor) -> Tensor:
    assert column.normalizer_fn is not None
    tensor: Tensor = column.normalizer_fn(given)
    if tensor.shape != given.shape:
        raise InvalidInputError(
            f"feature {column.key!r}: normalizer_fn made {tuple(tensor.shape)} of {tuple(given.shape)}; it must keep the shape"
        )
    return tensor


def _refuse_gradient(key: str, weights: Feature) -> None:
    """Weights are read as plain numbers; whoever wants to train them must not find out by their standing still."""
    values = weights.values() if _is_jagged(weights) else weights
    if isinstance(values, Tensor) and values.requires_grad and torch.is_grad_enabled():
        raise InvalidInputError(
            f"feature {key!r} holds weights that require a gradient, and columns give them none; detach() them, or use an "
            "EmbeddingBagCollection with is_weighted=True"
        )


def _feature(key: str, features: Mapping[str, Feature]) -> Feature:
    if key not in features:
        raise InvalidInputError(f"no feature {key!r}; there are {', '.join(sorted(features))}")
    value = features[key]
    refuse_masked(value, f"feature {key!r}")
    return value


def _read(key: str, value: Feature) -> Bags:
    try:
        if isinstance(value, Tensor):
            return dense_bags(_array(value))
        if _is_jagged(value):
            return jagged_bags(_array(value.values()), _array(value.lengths()))
        if isinstance(value, np.ndarray):
            return dense_bags(value)
        if isinstance(value, list | tuple):
            return list_bags(value)
    except InvalidInputError as error:
        raise InvalidInputError(f"feature {key!r}: {error}") from error
    raise InvalidInputError(f"feature {key!r} must be a tensor, an array, a list or a jagged feature, got {type(value).__name__}")


def _is_jagged(value: object) -> TypeGuard[Jagged]:
    """Told by its methods, since it may be TorchRec's; sparse tensors have `values`, too."""
    return not isinstance(value, Tensor | np.ndarray) and hasattr(value, "lengths") and hasattr(value, "values")


def _array(tensor: Tensor) -> NDArray[Any]:
    plain = tensor.detach().cpu()
    array: NDArray[Any] = (plain.float() if plain.is_floating_point() else plain).numpy()
    return array
