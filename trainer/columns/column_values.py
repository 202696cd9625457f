"""What columns make of the features of one batch, in NumPy for all bridges; a bridge says how its features are read."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import refuse_masked
from kvemb.errors import InvalidInputError

from .column_kinds import BucketizedColumn, CategoricalColumn, CrossedColumn, NumericColumn, WeightedColumn
from .feature_values import Bags


def feature(key: str, features: Any) -> Any:
    """Return the feature of that name."""
    if not isinstance(features, Mapping) or key not in features:
        raise InvalidInputError(f"no feature {key!r}; there are {', '.join(sorted(features))}")
    refuse_masked(features[key], f"feature {key!r}")
    return features[key]


class ColumnValues:
    """The values of columns; a column that several others are made of is read once.

    `read` returns a feature's bags, and whether values may be missing; `numbers` those of a numeric column, float32 [b, width].
    """

    def __init__(
        self,
        features: Mapping[str, Any],
        read: Callable[[Any], tuple[Bags, bool]],
        numbers: Callable[[NumericColumn, Mapping[str, Any]], NDArray[Any]],
    ) -> None:
        self._features, self._read, self._numbers = features, read, numbers
        self._known: dict[int, Bags] = {}

    def ids(self, column: CategoricalColumn) -> Bags:
        """Return a column's buckets int64, bag after bag, and weights; NO_ROW where a value stands for no row."""
        if id(column) not in self._known:
            self._known[id(column)] = self._ids(column)
        return self._known[id(column)]

    def _ids(self, column: CategoricalColumn) -> Bags:
        if isinstance(column, CrossedColumn):
            return column.cross([self._bags(key)[0] if isinstance(key, str) else self.ids(key) for key in column.keys])
        if isinstance(column, BucketizedColumn):
            values = self._numbers(column.source, self._features)
            return Bags(column.buckets(values.reshape(-1)), np.full(len(values), column.source.width, np.int64))
        bags, may_miss = self._bags(column.key)
        if isinstance(column, WeightedColumn):
            given = self._bags(column.weight_key)[0]
            if not np.array_equal(given.lengths, bags.lengths) or given.values.dtype.kind not in "iuf":
                raise InvalidInputError(f"feature {column.weight_key!r} must hold a number for each value of feature {column.key!r}")
            bags = Bags(bags.values, bags.lengths, given.values.astype(np.float32))
        bags = bags.present() if may_miss else bags
        return Bags(column.buckets(bags.values), bags.lengths, bags.weights)

    def _bags(self, key: str) -> tuple[Bags, bool]:
        value = feature(key, self._features)
        try:
            return self._read(value)
        except InvalidInputError as error:
            raise InvalidInputError(f"feature {key!r}: {error}") from error
