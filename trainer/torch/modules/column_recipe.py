"""The computation of DenseFeatures on features by name: the ids of every table, and one block per column.

Features are tensors, arrays, lists or jagged features, read into bags or numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvemb.errors import InvalidInputError

from ...columns.column_kinds import DenseColumn, IndicatorColumn, NumericColumn
from ...columns.column_tables import ColumnTable
from ...columns.column_values import ColumnValues, feature
from ...columns.feature_values import Bags, dense_bags, jagged_bags, list_bags
from .pooling import LookedUp, LookUp, exporting, pool


class Jagged(Protocol):
    """A jagged feature, our JaggedTensor or TorchRec's: values and lengths."""

    def values(self) -> Tensor:
        """All values, bag after bag: [m]."""

    def lengths(self) -> Tensor:
        """How many values each bag has: [b]."""


Feature = Tensor | Jagged | NDArray[Any] | Sequence[Any]


def numbers(column: NumericColumn, features: Mapping[str, Feature]) -> Tensor:
    """Read the numbers of a column, normalized: float32 [b, width]."""
    value = feature(column.key, features)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iufb":
        value = torch.from_numpy(value.astype(np.float32))  # a copy: arrays may be read-only, which torch would warn of
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(f"feature {column.key!r} holds no numbers: {error}") from error
    if tensor.is_complex():
        raise InvalidInputError(f"feature {column.key!r} is {tensor.dtype}, its column takes real numbers")
    column.check_shape(tensor.shape)
    tensor = tensor.to(torch.float32).reshape(-1, *column.shape)
    if column.normalizer_fn is not None:
        given, tensor = tensor, column.normalizer_fn(tensor)
        if tensor.shape != given.shape:
            raise InvalidInputError(
                f"feature {column.key!r}: normalizer_fn made {tuple(tensor.shape)} of {tuple(given.shape)}; it must keep the shape"
            )
    return tensor.reshape(len(tensor), column.width)


def device_of(features: Mapping[str, Feature]) -> torch.device:
    """Return the device of the first tensor among the features."""
    tensors = (value.values() if _is_jagged(value) else value for value in features.values())
    return next((tensor.device for tensor in tensors if isinstance(tensor, Tensor)), torch.device("cpu"))


def _read(value: Feature) -> tuple[Bags, bool]:
    """Read a feature's bags; refuse weights that require a gradient: read as plain numbers they would silently stay untrained."""
    if _is_jagged(value):
        _refuse_gradient(value.values())
        return jagged_bags(_array(value.values()), _array(value.lengths())), False
    if isinstance(value, Tensor):
        _refuse_gradient(value)
        return dense_bags(_array(value)), True
    if isinstance(value, np.ndarray):
        return dense_bags(value), True
    if isinstance(value, list | tuple):
        return list_bags(value), True
    raise InvalidInputError(f"it must be a tensor, an array, a list or a jagged feature, got {type(value).__name__}")


def _refuse_gradient(values: Tensor) -> None:
    if values.requires_grad and torch.is_grad_enabled():
        raise InvalidInputError(
            "the weights require a gradient, and columns give them none; detach() them, or use an EmbeddingBagCollection with "
            "is_weighted=True"
        )


def _is_jagged(value: object) -> TypeGuard[Jagged]:
    """Whether it has a jagged feature's methods, since it may be TorchRec's; sparse tensors have `values`, too."""
    return not isinstance(value, Tensor | np.ndarray) and hasattr(value, "lengths") and hasattr(value, "values")


def _array(tensor: Tensor) -> NDArray[Any]:
    plain = tensor.detach().cpu()
    array: NDArray[Any] = (plain.float() if plain.is_floating_point() else plain).numpy()
    return array


@dataclass(frozen=True, eq=False)
class _TableIds:
    """The ids int64 [m] of all columns of one table; the place of each in the bags, None where that is 0, 1, 2, …; the bags by column."""

    ids: Tensor
    order: Tensor | None
    bags: list[Bags]


class ColumnRecipe:
    """Read features, and put the blocks of all columns together."""

    def __init__(self, columns: Sequence[DenseColumn], specs: Sequence[ColumnTable]) -> None:
        self.columns, self.specs = list(columns), list(specs)

    @property
    def width(self) -> int:
        """Columns of the result."""
        return sum(column.width for column in self.columns)

    def ids(self, features: Mapping[str, Feature]) -> dict[str, Tensor]:
        """Return the ids of every table."""
        return {name: of.ids for name, of in self._table_ids(_values(features), device_of(features)).items()}

    def run(self, features: Mapping[str, Feature], look_up: LookUp) -> Tensor:
        """Return float32 [b, width]."""
        if exporting():
            raise InvalidInputError(
                "feature columns read features outside of torch, which torch.export cannot record; keep the copy with torch.save, and "
                "export what comes behind the columns"
            )
        values, device = _values(features), device_of(features)
        tables = self._table_ids(values, device)
        blocks = {c.name: numbers(c, features) for c in self.columns if isinstance(c, NumericColumn)}
        counted = [column for column in self.columns if isinstance(column, IndicatorColumn)]
        blocks |= {column.name: torch.from_numpy(column.counts(values.ids(column.source))).to(device) for column in counted}
        sizes = {name: len(block) for name, block in blocks.items()}
        sizes |= {c.name: len(b.lengths) for s in self.specs for c, b in zip(s.columns, tables[s.name].bags, strict=True)}
        if len(set(sizes.values())) > 1:
            raise InvalidInputError(f"features must have the same number of examples, got by column {sizes}")
        looked_up = look_up({name: of.ids for name, of in tables.items()})
        for spec in self.specs:
            blocks |= _pooled(spec, tables[spec.name], looked_up[spec.name])
        return torch.cat([blocks[column.name] for column in self.columns], dim=1)

    def __str__(self) -> str:
        return ", ".join(column.name for column in self.columns)

    def _table_ids(self, values: ColumnValues, device: torch.device) -> dict[str, _TableIds]:
        """Find the ids that each table is asked for."""
        tables: dict[str, _TableIds] = {}
        for spec in self.specs:
            bags = [column.rows(values.ids(column.source)) for column in spec.columns]
            ids = np.concatenate([one.values for one in bags])
            order = _unique_order(spec, ids) if spec.unique else None
            sent = torch.from_numpy(ids if order is None else ids[order]).to(device)
            tables[spec.name] = _TableIds(sent, None if order is None else torch.from_numpy(order).to(device), bags)
        return tables


def _values(features: Mapping[str, Feature]) -> ColumnValues:
    return ColumnValues(features, _read, lambda column, features: _array(numbers(column, features)))


def _unique_order(spec: ColumnTable, ids: NDArray[np.int64]) -> NDArray[np.intp]:
    """The order in which ids ascend; refused if one stands twice."""
    order = np.argsort(ids)
    twice = np.flatnonzero(np.diff(ids[order]) == 0)
    if len(twice):
        raise InvalidInputError(
            f"column {spec.columns[0].name!r}: emb_unique promises that no id stands twice in a batch, but "
            f"{int(ids[order[twice[0]]])} does. Leave emb_unique out for this column."
        )
    return order


def _pooled(spec: ColumnTable, asked: _TableIds, rows: LookedUp) -> dict[str, Tensor]:
    """The blocks of a table's columns."""
    leaf, at = rows
    if asked.order is not None:
        at = torch.empty_like(at).index_copy_(0, asked.order, at)
    lengths = torch.from_numpy(np.concatenate([one.lengths for one in asked.bags]))
    pooled = pool((leaf, at), lengths, spec.combiner, _weights(asked.bags, at.device))
    parts = torch.split(pooled, [len(one.lengths) for one in asked.bags])
    return {column.name: part for column, part in zip(spec.columns, parts, strict=True)}


def _weights(bags: list[Bags], device: torch.device) -> Tensor | None:
    """The weights of all columns of a table, 1 where a column has none; None where no column has any."""
    if all(one.weights is None for one in bags):
        return None
    parts = [np.ones(len(one.values), np.float32) if one.weights is None else one.weights for one in bags]
    return torch.from_numpy(np.concatenate(parts)).to(device)
