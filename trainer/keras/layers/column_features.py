"""ColumnFeatures, `kvemb.keras.DenseFeatures`: feature columns as a Keras layer, in TensorFlow's words.

Strategy: text and hashes are no work for a compiled step, so `preprocess` turns features into ids in the input pipeline. The layer looks
these up as a `DistributedEmbedding` of one bag for each embedding column, and puts the blocks side by side.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Self

import keras
import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError
from kvemb.init import Initializer

from ...columns import column_kinds
from ...columns.column_kinds import DenseColumn, EmbeddingColumn, IndicatorColumn, NumericColumn
from ...columns.column_tables import ColumnOptions, tables_of
from ...columns.column_values import ColumnValues, feature
from ...columns.feature_values import Bags, dense_bags, list_bags
from ...columns.tensorflow_columns import checked_dense_columns
from .distributed_embedding import DistributedEmbedding
from .feature_configs import FeatureConfig, TableConfig, padded_bags
from .whole_ids import may_be_cut

_FIRST = {
    "truncated_normal": "TruncatedNormal",
    "normal": "RandomNormal",
    "uniform": "RandomUniform",
    "constant": "Constant",
    "zeros": "Zeros",
}
_WORDS = {"std": "stddev", "low": "minval", "high": "maxval"}
_FACTORS = "_weights"


@keras.saving.register_keras_serializable(package="kvemb", name="DenseFeatures")
class ColumnFeatures(DistributedEmbedding):
    """Put together the blocks of all columns, in the order of their names, as tf.keras.layers.DenseFeatures does.

    `kvemb.keras.distribute(model, cluster)` makes the tables, or opens them, and connects the layer. Features go through `preprocess`
    first.
    """

    def __init__(self, feature_columns: Iterable[DenseColumn], *, optimizer: Any = "adagrad", **kwargs: Any) -> None:
        columns = sorted(checked_dense_columns(feature_columns), key=lambda column: column.name)
        embedded = [column for column in columns if isinstance(column, EmbeddingColumn)]
        if not embedded:
            raise InvalidInputError("feature_columns has no embedding column: numbers need no layer")
        configs = {
            column.name: FeatureConfig(column.name, table, (None, None), (None, table.embedding_dim))
            for of in tables_of(embedded, ColumnOptions(None, "sum", "float32", "float32", False))
            for table in [_table(of.columns[0], optimizer)]
            for column in of.columns
        }
        super().__init__({name: configs[name] for name in sorted(configs)}, **kwargs)
        object.__setattr__(self, "_columns", columns)
        object.__setattr__(self, "_optimizer", optimizer)

    def preprocess(self, inputs: Any, weights: Any = None, training: bool = False) -> Any:
        """Make features ready for the layer; in a generator, or before `fit`. It pulls nothing.

        Args:
            inputs: features by name: integers or text, [b] or [b, l], where -1 and "" are missing; lists of b values, or of b lists. Of a
                numeric column: numbers [b] or [b, *shape]. Features that no column reads may be there.

        Returns:
            By column: ids int64 [b, n] and, under its name with "_weights", their factors float32 [b, n]; numbers and counts float32
            [b, width]. n is the longest bag's length, rounded up to a power of 2, so that a step is compiled a few times only.
        """
        ready: dict[str, NDArray[Any]] = {}
        values = ColumnValues(inputs, _read, _numbers)
        for column in self._columns:
            if isinstance(column, NumericColumn):
                ready[column.name] = _numbers(column, inputs)
                continue
            if isinstance(column, IndicatorColumn):
                ready[column.name] = column.counts(values.ids(column.source))
                continue
            bags = column.rows(values.ids(column.source))
            factors = np.ones(len(bags.values), np.float32) if bags.weights is None else bags.weights
            n = 1 << (max(1, int(bags.lengths.max(initial=0))) - 1).bit_length()
            filled = padded_bags(np.ones(len(factors), np.bool_), bags.lengths, n)
            # Padding repeats an id of the batch: no other row gets a gradient, of zeros.
            ready[column.name] = np.where(filled, padded_bags(bags.values, bags.lengths, n), bags.values[:1].sum())
            ready[column.name + _FACTORS] = padded_bags(factors, bags.lengths, n)
        return ready

    def symbolic_inputs(self) -> dict[str, Any]:
        """Return keras.Input for all that `preprocess` returns: the inputs of a functional model."""
        made = {}
        for column in self._columns:
            if isinstance(column, EmbeddingColumn):
                made[column.name] = keras.Input((None,), dtype="int64", name=column.name)
                made[column.name + _FACTORS] = keras.Input((None,), name=column.name + _FACTORS)
            else:
                made[column.name] = keras.Input((column.width,), name=column.name)
        return made

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """Put the blocks together.

        Returns:
            [b, width], of the layer's compute dtype.
        """
        if not isinstance(inputs, Mapping) or any(of.name + _FACTORS not in inputs for of in self.features):
            raise InvalidInputError(f"layer {self.name!r} takes what its preprocess() returns: put it into the input pipeline")
        rows = {of.name: self._of_table[of.table.name](inputs[of.name], weights=inputs[of.name + _FACTORS]) for of in self.features}
        blocks = [rows[one.name] if one.name in rows else inputs[one.name] for one in self._columns]
        return keras.ops.concatenate([keras.ops.cast(block, self.compute_dtype) for block in blocks], axis=-1)

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> Any:
        """Return shape and dtype of the result."""
        width = sum(column.width for column in self._columns)
        return keras.KerasTensor((keras.tree.flatten(inputs)[0].shape[0], width), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make an equal layer."""
        optimizer = keras.saving.serialize_keras_object(self._optimizer)
        return {**keras.layers.Layer.get_config(self), "feature_columns": [_plain(one) for one in self._columns], "optimizer": optimizer}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Make a layer that `distribute` connects."""
        rest = dict(config)
        columns = [_column(one) for one in rest.pop("feature_columns")]
        return cls(columns, optimizer=keras.saving.deserialize_keras_object(rest.pop("optimizer")), **rest)


def _table(column: EmbeddingColumn, optimizer: Any) -> TableConfig:
    first = column.initializer
    if first.kind not in _FIRST:
        raise InvalidInputError(f"column {column.name!r}: Keras has no initializer {first.kind!r}; take one of {', '.join(_FIRST)}")
    made = getattr(keras.initializers, _FIRST[first.kind])(**{_WORDS.get(name, name): value for name, value in first.params})
    return TableConfig(column.table_name, column.source.num_buckets, column.dimension, made, optimizer, column.combiner)


def _host(value: Any) -> Any:
    return value if isinstance(value, list | tuple | np.ndarray) else keras.ops.convert_to_numpy(value)


def _numbers(column: NumericColumn, features: Mapping[str, Any]) -> NDArray[np.float32]:
    try:
        given = np.asarray(_host(feature(column.key, features)), np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"feature {column.key!r} holds no numbers of shape [b, {column.width}]: {error}") from error
    column.check_shape(given.shape)
    values = given.reshape(-1, *column.shape)
    values = values if column.normalizer_fn is None else np.asarray(column.normalizer_fn(values), np.float32)
    column.check_shape(values.shape)
    return values.reshape(len(given), column.width)


def _read(value: Any) -> tuple[Bags, bool]:
    if may_be_cut(value):
        raise InvalidInputError("it is an array of JAX, which cuts integers to 32 bits without a word: give it in NumPy")
    value = _host(value)
    return list_bags(value) if isinstance(value, list | tuple) else dense_bags(value), True


def _plain(value: Any) -> Any:
    """A column as JSON takes it: its class under "kind", its fields."""
    if is_dataclass(value):
        return {"kind": type(value).__name__, "fields": {one.name: _plain(getattr(value, one.name)) for one in fields(value)}}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return {"function": keras.saving.serialize_keras_object(value)} if callable(value) else value


def _column(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(_column(one) for one in plain)
    if not isinstance(plain, dict):
        return plain
    if "function" in plain:
        return keras.saving.deserialize_keras_object(plain["function"])
    made = Initializer if plain["kind"] == Initializer.__name__ else getattr(column_kinds, plain["kind"])
    return made(**{name: _column(of) for name, of in plain["fields"].items()})
