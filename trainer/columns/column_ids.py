"""The ids of a categorical column from features, as a bridge reads them: one reading for all kinds of columns."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError

from .column_kinds import BucketizedColumn, CategoricalColumn, CrossedColumn, NumericColumn, WeightedColumn
from .feature_values import Bags


def read_ids(column: CategoricalColumn, read: Callable[[str], tuple[Bags, bool]], numbers: Callable[[NumericColumn], NDArray[Any]]) -> Bags:
    """Read a column's buckets, bag after bag, with their weights if it has any.

    Args:
        numbers: the values of a numeric column: float32 [b, width].

    Returns:
        int64 ids; NO_ROW where a value stands for no row.
    """
    if isinstance(column, CrossedColumn):
        return column.cross([read(key)[0] if isinstance(key, str) else read_ids(key, read, numbers) for key in column.keys])
    if isinstance(column, BucketizedColumn):
        values = numbers(column.source)
        return Bags(column.buckets(values.reshape(-1)), np.full(len(values), column.source.width, np.int64))
    bags, may_miss = read(column.key)
    if isinstance(column, WeightedColumn):
        given = read(column.weight_key)[0]
        if not np.array_equal(given.lengths, bags.lengths) or given.values.dtype.kind not in "iuf":
            raise InvalidInputError(f"feature {column.weight_key!r} must hold a number for each value of feature {column.key!r}")
        bags = Bags(bags.values, bags.lengths, given.values.astype(np.float32))
    bags = bags.present() if may_miss else bags
    return Bags(column.buckets(bags.values), bags.lengths, bags.weights)
