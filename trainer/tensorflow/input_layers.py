"""TensorFlow's input layers under their names: from features by name, through feature columns, to one tensor.

Strategy: each embedding column's feature becomes sparse ids, as in TensorFlow. All columns of a call are one pull.

Source: tf.compat.v1.feature_column.input_layer, and tf.contrib's functions of these names (interfaces only).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec

from ..columns.column_kinds import (
    BucketizedColumn,
    CategoricalColumn,
    CrossedColumn,
    DenseColumn,
    EmbeddingColumn,
    HashedColumn,
    IdentityColumn,
    IndicatorColumn,
    NumericColumn,
    VocabularyColumn,
    WeightedColumn,
)
from ..columns.column_tables import ColumnOptions, tables_of
from ..columns.column_values import feature
from ..columns.feature_values import MISSING_INTEGER, Bags
from ..columns.tensorflow_columns import checked_dense_columns
from ..lookahead.cluster_ports import TablePort
from .embedding_lookups import fused_safe_embedding_lookup_sparse

if TYPE_CHECKING:
    from kvemb.api import Cluster

Features = Mapping[str, Any]


def column_tables(
    feature_columns: Iterable[DenseColumn],
    cluster: "Cluster",
    *,
    optimizer: OptimizerSpec | Mapping[str, OptimizerSpec] | None = None,
    reduce: str = "sum",
) -> dict[str, TablePort]:
    """Create the tables of embedding columns, by name, or open them where they exist with the same identity.

    Args:
        feature_columns: those of all input layers; numeric and indicator columns have no table.
        optimizer: of the tables, or a mapping from column name to it; rowwise_adagrad() unless given.
        reduce: how gradients of different trainers combine, "sum" or "mean".
    """
    embedded = [column for column in _sorted(feature_columns, sequences=True) if isinstance(column, EmbeddingColumn)]
    return {
        of.name: of.create(cluster, reduce) for of in tables_of(embedded, ColumnOptions(optimizer, reduce, "float32", "float32", False))
    }


def input_layer(features: Features, feature_columns: Iterable[DenseColumn], tables: Mapping[str, TablePort]) -> Any:
    """tf.compat.v1.feature_column.input_layer: a block per column, in the order of the columns' names.

    Args:
        features: by name. Of an embedding column: integers or text, dense ([b] or [b, l], where -1 and "" are missing), sparse or ragged.
            Of a numeric column: numbers [b] or [b, *shape].
        feature_columns: numeric, indicator and embedding columns (`kvemb.columns`, or TensorFlow's own), of unique names.
        tables: as `column_tables` returns them.

    Returns:
        float32 [b, width].

    Raises:
        InvalidInputError: a feature or a table is missing, or does not fit its column; nothing was looked up.

    Example:
        >>> import kvemb, tensorflow as tf
        >>> from kvemb.columns import categorical_column_with_hash_bucket, embedding_column, numeric_column
        >>> from kvemb.tensorflow import column_tables, input_layer
        >>> word = embedding_column(categorical_column_with_hash_bucket("word", 1000), 4)
        >>> with kvemb.local(shards=1) as url, kvemb.connect(url) as cluster:
        ...     columns = [word, numeric_column("price")]
        ...     features = {"price": [2.5, 3.0], "word": tf.ragged.constant([["red"], []])}
        ...     dense = input_layer(features, columns, column_tables(columns, cluster))
        >>> dense.shape.as_list(), dense[:, 0].numpy().tolist(), dense[1, 1:].numpy().tolist()
        ([2, 5], [2.5, 3.0], [0.0, 0.0, 0.0, 0.0])
    """
    columns = _sorted(feature_columns, sequences=False)
    embedded = _embedded(columns, features, tables, sequence=False)
    counts = {c.name: _counts(c, features, sequence=False) for c in columns if isinstance(c, IndicatorColumn)}
    numbers = {c.name: _numbers(c, features) for c in columns if isinstance(c, NumericColumn)}
    blocks = embedded | counts | numbers
    return tf.concat([blocks[column.name] for column in columns], axis=1)


def input_from_feature_columns(
    columns_to_tensors: Features, feature_columns: Iterable[DenseColumn], tables: Mapping[str, TablePort]
) -> Any:
    """tf.contrib.layers.input_from_feature_columns: `input_layer` under its older name."""
    return input_layer(columns_to_tensors, feature_columns, tables)


def sequence_input_layer(features: Features, feature_columns: Iterable[DenseColumn], tables: Mapping[str, TablePort]) -> tuple[Any, Any]:
    """tf.contrib.feature_column.sequence_input_layer: a block per column for each step of a sequence.

    Args:
        features: by name, sparse, ragged or dense [b, T]; of an embedding column also [b, T, k], of which k are combined.
        feature_columns: as `input_layer`; TensorFlow's sequence columns as well.
        tables: as `input_layer`.

    Returns:
        float32 [b, T, width], zeros behind a sequence's end; int64 [b], the length of each sequence.

    Raises:
        InvalidInputError: as `input_layer`; or a crossed column, which has no steps.
        tf.errors.InvalidArgumentError: lengths differ from column to column.
    """
    columns = _sorted(feature_columns, sequences=True)
    sequences = {column.name: _sparse(_sequence_key(column), features) for column in columns}
    embedded = _embedded(columns, features, tables, sequence=True)
    blocks, lengths = [], []
    for column in columns:
        values = sequences[column.name]
        if isinstance(column, NumericColumn):
            blocks.append(_steps(column, values))
            lengths.append(_lengths(values) // column.width)
        else:
            blocks.append(embedded[column.name] if isinstance(column, EmbeddingColumn) else _counts(column, features, sequence=True))
            lengths.append(_lengths(values))
    for other in lengths[1:]:
        tf.debugging.assert_equal(other, lengths[0], "columns of one sequence_input_layer have sequences of other lengths")
    return tf.concat(blocks, axis=2), lengths[0]


def sequence_input_from_feature_columns(
    columns_to_tensors: Features, feature_columns: Iterable[DenseColumn], tables: Mapping[str, TablePort]
) -> Any:
    """tf.contrib.layers.sequence_input_from_feature_columns: the result of `sequence_input_layer`, without lengths."""
    return sequence_input_layer(columns_to_tensors, feature_columns, tables)[0]


def _sorted(columns: Iterable[DenseColumn], *, sequences: bool) -> list[DenseColumn]:
    return sorted(checked_dense_columns(columns, sequences=sequences), key=lambda column: column.name)


def _embedded(columns: Sequence[DenseColumn], features: Features, tables: Mapping[str, TablePort], *, sequence: bool) -> dict[str, Any]:
    """The blocks of all embedding columns, by name."""
    embedded = [column for column in columns if isinstance(column, EmbeddingColumn)]
    for column in embedded:
        if column.table_name not in tables:
            raise InvalidInputError(f"column {column.name!r}: table {column.table_name!r} is not among {sorted(tables)}: see column_tables")
    if not embedded:
        return {}
    ids, weights = zip(*(_ids(column.source, features, sequence) for column in embedded), strict=True)
    of = [tables[column.table_name] for column in embedded]
    found = fused_safe_embedding_lookup_sparse(of, ids, weights, [column.combiner for column in embedded])
    return dict(zip((column.name for column in embedded), found, strict=True))


def _ids(source: CategoricalColumn, features: Features, sequence: bool) -> tuple[Any, Any]:
    """The sparse ids of a categorical column's feature, and weights if it has any; each step of a sequence a bag of its own."""
    weights = None
    if isinstance(source, CrossedColumn):
        return _crossed(source, features), None
    if isinstance(source, BucketizedColumn):
        numbers = _numbers(source.source, features)
        values = tf.sparse.from_dense(tf.ones_like(numbers))
        values = tf.SparseTensor(values.indices, tf.reshape(numbers, [-1]), values.dense_shape)
    else:
        values = _sparse(source.key, features)
    if isinstance(source, WeightedColumn):
        weights = _weights(source, values, features)
    ids = tf.SparseTensor(values.indices, _buckets(source, values.values), values.dense_shape)
    if not sequence and ids.shape.rank not in (None, 2):
        raise InvalidInputError(f"feature {source.key!r} has the shape {tuple(ids.shape)}; give [b], or bags [b, l]")
    if sequence and ids.shape.rank == 2:
        ids, weights = _alone(ids), None if weights is None else _alone(weights)
    return ids, weights


def _weights(source: WeightedColumn, values: Any, features: Features) -> Any:
    given = feature(source.weight_key, features)
    if isinstance(given, tf.RaggedTensor | tf.SparseTensor):
        given = _sparse(source.weight_key, features)
        tf.debugging.assert_equal(given.indices, values.indices, f"feature {source.weight_key!r} must hold a number for each value")
        numbers = given.values
    else:
        dense = tf.convert_to_tensor(given)
        numbers = tf.gather_nd(dense if dense.shape.rank != 1 else dense[:, tf.newaxis], values.indices)
    return tf.SparseTensor(values.indices, tf.cast(numbers, tf.float32), values.dense_shape)


def _buckets(source: IdentityColumn | HashedColumn | VocabularyColumn | BucketizedColumn | WeightedColumn, values: Any) -> Any:
    """Ids int64 [m] of values [m]; -1, which lookups leave out, where a value stands for no row."""
    return _in_numpy(lambda array: [source.buckets(array)], [values])[0]


def _crossed(source: CrossedColumn, features: Features) -> Any:
    """The sparse ids of all combinations of the values of each example."""
    parts = [_sparse(of, features, may_miss=False) if isinstance(of, str) else _ids(of, features, sequence=False)[0] for of in source.keys]

    def cross(*given: NDArray[Any]) -> Sequence[NDArray[np.int64]]:
        bags = [Bags(values, np.bincount(rows, minlength=int(n))) for values, rows, n in zip(*[iter(given)] * 3, strict=True)]
        made = source.cross(bags)
        return made.values, made.lengths

    ids, lengths = _in_numpy(cross, [of for part in parts for of in (part.values, part.indices[:, 0], part.dense_shape[0])], 2)
    return tf.RaggedTensor.from_row_lengths(ids, lengths).to_sparse()


def _counts(column: IndicatorColumn, features: Features, *, sequence: bool) -> Any:
    """How often each bucket comes, or the sum of its weights: float32 [b, width], of a sequence [b, T, width]."""
    ids, weights = _ids(column.source, features, sequence)
    there = ids.values >= 0  # NO_ROW is counted nowhere
    cells = tf.concat([ids.indices[:, :-1], ids.values[:, tf.newaxis]], 1)
    factors = tf.ones_like(ids.values, tf.float32) if weights is None else weights.values
    shape = tf.concat([ids.dense_shape[:-1], [column.width]], 0)
    made = tf.scatter_nd(tf.boolean_mask(cells, there), tf.boolean_mask(factors, there), shape)
    return tf.ensure_shape(made, [*[None] * (ids.shape.rank - 1), column.width])


def _in_numpy(function: Callable[..., Sequence[NDArray[np.int64]]], given: Sequence[Any], n_results: int = 1) -> Any:
    """The results, each int64 [m], of a function of arrays."""
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(of) for of in function(*(of.numpy() for of in given))]
    made = tf.numpy_function(function, given, [tf.int64] * n_results, stateful=False)
    return [tf.ensure_shape(of, [None]) for of in made]


def _sequence_key(column: DenseColumn) -> str:
    """Return the feature whose steps a column's are."""
    if isinstance(column, NumericColumn):
        return column.key
    if isinstance(column.source, CrossedColumn):
        raise InvalidInputError(f"column {column.name!r}: a cross has no steps; give it to input_layer")
    return column.source.key


def _sparse(key: str, features: Features, *, may_miss: bool = True) -> Any:
    """Return a feature as a SparseTensor, without the missing values of a dense one if it may have such."""
    value = feature(key, features)
    if isinstance(value, tf.SparseTensor):
        return _alone(value) if value.shape.rank == 1 else value
    if isinstance(value, tf.RaggedTensor):
        return value.to_sparse()
    dense = tf.convert_to_tensor(value)
    if dense.shape.rank == 0:
        raise InvalidInputError(f"feature {key!r} is one value without examples; give [b], or bags [b, l]")
    dense = dense[:, tf.newaxis] if dense.shape.rank == 1 else dense
    if dense.dtype.is_floating or not may_miss:
        there = tf.ones(tf.shape(dense), tf.bool)
    else:
        there = tf.not_equal(dense, "" if dense.dtype == tf.string else tf.cast(MISSING_INTEGER, dense.dtype))
    indices = tf.where(there)
    return tf.SparseTensor(indices, tf.gather_nd(dense, indices), tf.shape(dense, tf.int64))


def _numbers(column: NumericColumn, features: Features) -> Any:
    """The numbers of a column, normalized: float32 [b, width]."""
    value = feature(column.key, features)
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        raise InvalidInputError(f"feature {column.key!r} is {type(value).__name__}; a numeric column takes dense numbers")
    tensor = tf.convert_to_tensor(value)
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
        raise InvalidInputError(f"feature {column.key!r} holds {tensor.dtype.name}, and its column takes numbers")
    column.check_shape([None] if tensor.shape.rank is None else tensor.shape.as_list())
    n = tf.shape(tensor)[0]  # a shape that is known later is compared by the reshape
    tensor = tf.reshape(tf.cast(tensor, tf.float32), [n, *column.shape])
    if column.normalizer_fn is not None:
        tensor = column.normalizer_fn(tensor)
    return tf.reshape(tensor, [n, column.width])


def _steps(column: NumericColumn, values: Any) -> Any:
    """The numbers of a sequence: float32 [b, T, width], zeros behind its end."""
    numbers = tf.cast(values.values, tf.float32)
    if column.normalizer_fn is not None:
        numbers = column.normalizer_fn(numbers)
    dense = tf.sparse.to_dense(tf.SparseTensor(values.indices, numbers, values.dense_shape))
    return tf.reshape(dense, [tf.shape(dense)[0], -1, column.width])


def _alone(values: Any) -> Any:
    """Make a bag of each value: from [b, T] to [b, T, 1]."""
    return tf.sparse.expand_dims(values, axis=-1)


def _lengths(values: Any) -> Any:
    """Return the length of each sequence, int64 [b]: up to its last value that is not missing."""
    n = tf.cast(values.dense_shape[0], tf.int64)
    last = tf.math.unsorted_segment_max(values.indices[:, 1] + 1, values.indices[:, 0], n)
    return tf.maximum(last, tf.zeros([], tf.int64))
