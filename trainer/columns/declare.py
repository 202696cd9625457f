"""The functions that make feature columns, under TensorFlow's names, with TensorFlow's arguments and defaults.

Every wrong argument is found here. Left out, since nothing here could honour them: of `numeric_column` default_value and dtype (they belong
to parsing; results are float32). Of embedding columns ckpt_to_load_from, tensor_name_in_ckpt, max_norm and trainable.

Source: tf.feature_column of TensorFlow 2.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb import init
from kvemb.errors import InvalidInputError
from kvemb.init import Initializer
from kvemb.schema.table_def import MAX_DIM, check_table_name

from .column_kinds import (
    COMBINERS,
    NO_ROW,
    BucketizedColumn,
    CategoricalColumn,
    CrossedColumn,
    EmbeddingColumn,
    HashedColumn,
    IdentityColumn,
    IndicatorColumn,
    NumericColumn,
    VocabularyColumn,
    WeightedColumn,
    check_integer,
    check_key,
    check_unique,
)
from .feature_values import text_bytes

_CATEGORICAL = IdentityColumn | HashedColumn | VocabularyColumn
_MOST = 1 << 63
_DTYPES = ("string", "int64")


def numeric_column(key: str, shape: int | Sequence[int] = (1,), normalizer_fn: Callable[[Any], Any] | None = None) -> NumericColumn:
    """Declare numbers that go into the result as they are.

    Args:
        key: the feature's name.
        shape: of one example's values.
        normalizer_fn: applied to the float32 values [b, *shape] first; of and to the framework's own tensors.

    Example:
        >>> numeric_column("price").width, numeric_column("size", shape=(2, 3)).width
        (1, 6)
    """
    check_key(key)
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    checked = tuple(check_integer(f"column {key!r}: shape", size, 1, _MOST) for size in sizes)
    if normalizer_fn is not None and not callable(normalizer_fn):
        raise InvalidInputError(f"column {key!r}: normalizer_fn is {normalizer_fn!r}; give a function")
    return NumericColumn(key, checked, normalizer_fn)


def categorical_column_with_identity(key: str, num_buckets: int, default_value: int | None = None) -> IdentityColumn:
    """Declare integers that are rows themselves: 0 to num_buckets - 1.

    Args:
        key: the feature's name.
        num_buckets: how many.
        default_value: takes the place of values out of range; without one they are refused.

    Example:
        >>> import numpy as np
        >>> categorical_column_with_identity("hour", 24, default_value=0).buckets(np.array([3, 99])).tolist()
        [3, 0]
    """
    check_key(key)
    size = check_integer(f"column {key!r}: num_buckets", num_buckets, 1, _MOST)
    if default_value is not None:
        default_value = check_integer(f"column {key!r}: default_value", default_value, 0, size)
    return IdentityColumn(key, size, default_value)


def categorical_column_with_hash_bucket(key: str, hash_bucket_size: int, dtype: str = "string") -> HashedColumn:
    """Declare values that are hashed to rows; two values may meet in one.

    The hash is `trainer.columns.feature_values`'s, so not TensorFlow's: rows of a model trained there cannot be carried over by bucket.

    Args:
        key: the feature's name.
        hash_bucket_size: how many rows.
        dtype: of the values, "string" or "int64". The other kind is refused: 7 and "7" have different buckets here.

    Example:
        >>> import numpy as np
        >>> categorical_column_with_hash_bucket("word", 1000).buckets(np.array(["apple"], object)).tolist()
        [847]
    """
    check_key(key)
    _check_one_of(f"column {key!r}: dtype", dtype, _DTYPES)
    return HashedColumn(key, check_integer(f"column {key!r}: hash_bucket_size", hash_bucket_size, 1, _MOST), dtype)


def categorical_column_with_vocabulary_list(
    key: str, vocabulary_list: Sequence[Any] | NDArray[Any], dtype: str | None = None, default_value: int = -1, num_oov_buckets: int = 0
) -> VocabularyColumn:
    """Declare values that are listed; a value's row is its place in the list.

    Args:
        key: the feature's name.
        vocabulary_list: text (str, or its UTF-8 bytes), or integers; unique.
        dtype: "string" or "int64"; the list's own unless given.
        default_value: the row of values that are not listed; -1: they are left out.
        num_oov_buckets: rows behind the vocabulary to which values that are not listed are hashed; not with default_value.

    Example:
        >>> import numpy as np
        >>> column = categorical_column_with_vocabulary_list("colour", ["red", "green"], num_oov_buckets=1)
        >>> column.buckets(np.array(["green", "pink", "red"], object)).tolist()
        [1, 2, 0]
    """
    check_key(key)
    words, found = _vocabulary(key, vocabulary_list)
    if dtype is not None and dtype != found:
        raise InvalidInputError(f"column {key!r}: dtype is {dtype!r}, the vocabulary_list holds {found}")
    n_oov = check_integer(f"column {key!r}: num_oov_buckets", num_oov_buckets, 0, _MOST - len(words))
    default = check_integer(f"column {key!r}: default_value", default_value, NO_ROW, len(words))
    if n_oov and default != NO_ROW:
        raise InvalidInputError(f"column {key!r}: give default_value or num_oov_buckets, not both")
    return VocabularyColumn(key, words, found, default, n_oov)


def bucketized_column(source_column: NumericColumn, boundaries: Sequence[float]) -> BucketizedColumn:
    """Declare numbers that become the number of the range they are in: below boundaries[0], from there to boundaries[1], ….

    Args:
        source_column: the numbers; with several per example each has ranges of its own.
        boundaries: ascending; compared as float32.

    Example:
        >>> import numpy as np
        >>> bucketized_column(numeric_column("age"), [18, 65]).buckets(np.array([17.5, 18, 70], np.float32)).tolist()
        [0, 1, 2]
    """
    if not isinstance(source_column, NumericColumn):
        raise InvalidInputError(f"source_column must be a numeric_column, got {type(source_column).__name__}")
    floats = np.array(list(boundaries), np.float32)
    if not len(floats) or not np.isfinite(floats).all() or not (floats[1:] > floats[:-1]).all():
        raise InvalidInputError(f"column {source_column.key!r}: boundaries are {boundaries!r}; give finite numbers that ascend as float32")
    return BucketizedColumn(source_column, tuple(floats.tolist()))


def weighted_categorical_column(categorical_column: CategoricalColumn, weight_feature_key: str) -> WeightedColumn:
    """Declare values with weights: factors of their rows, of which "mean" and "sqrtn" make weighted means.

    Args:
        categorical_column: an identity, hashed or vocabulary column.
        weight_feature_key: the feature that holds the weights, floats of the shape of the values. With "mean" and "sqrtn" values
            whose weight is not above 0 are left out.

    Example:
        >>> weighted_categorical_column(categorical_column_with_identity("page", 9), "seconds").name
        'page_weighted_by_seconds'
    """
    if not isinstance(categorical_column, _CATEGORICAL):
        raise InvalidInputError(f"weights go with identity, hashed and vocabulary columns, got {type(categorical_column).__name__}")
    return WeightedColumn(categorical_column, check_key(weight_feature_key))


def crossed_column(
    keys: Sequence[str | IdentityColumn | VocabularyColumn | BucketizedColumn | CrossedColumn], hash_bucket_size: int
) -> CrossedColumn:
    """Declare combinations of features that are hashed to rows: each value of an example's one feature with each value of the others.

    Args:
        keys: two or more. A feature's name: its values, integers or text, as they are; none of them is missing, "" and -1 neither. Or an
            identity, vocabulary or bucketized column: its ids. A crossed column stands for its own keys.
        hash_bucket_size: how many rows. The hash is `feature_values.cross_bags`'s, so not TensorFlow's.

    Example:
        >>> age = bucketized_column(numeric_column("age"), [18, 65])
        >>> crossed_column([age, "city"], 1000).name
        'age_bucketized_X_city'
    """
    leaves: list[str | IdentityColumn | VocabularyColumn | BucketizedColumn] = []
    for key in [keys] if isinstance(keys, str) else keys:
        if isinstance(key, HashedColumn):
            raise InvalidInputError(f"a cross hashes by itself: give the name {key.key!r} in the place of its hashed column")
        if isinstance(key, CrossedColumn):
            leaves += key.keys
        elif isinstance(key, IdentityColumn | VocabularyColumn | BucketizedColumn):
            leaves.append(key)
        elif isinstance(key, str):
            leaves.append(check_key(key))
        else:
            raise InvalidInputError(
                f"keys are features' names, identity, vocabulary and bucketized columns, got {type(key).__name__}; a cross has no weights"
            )
    if len(leaves) < 2:
        raise InvalidInputError(f"a cross has two keys or more, got {keys!r}")
    return CrossedColumn(tuple(leaves), check_integer("crossed_column: hash_bucket_size", hash_bucket_size, 1, _MOST))


def indicator_column(categorical_column: CategoricalColumn) -> IndicatorColumn:
    """Declare how often each bucket comes in an example, as numbers: float32 [b, buckets]; of a weighted column the sums of its weights.

    Args:
        categorical_column: of any kind. Each bucket is a column of the result, so have few.

    Example:
        >>> indicator_column(categorical_column_with_identity("hour", 24)).width
        24
    """
    _check_categorical(categorical_column)
    return IndicatorColumn(categorical_column)


def embedding_column(
    categorical_column: CategoricalColumn,
    dimension: int,
    combiner: str = "mean",
    initializer: Initializer | None = None,
    *,
    table_name: str | None = None,
) -> EmbeddingColumn:
    """Declare a table of rows for a categorical column, and how the rows of an example's values are combined.

    Args:
        categorical_column: which rows.
        dimension: weights per row.
        combiner: "mean", "sqrtn" (the sum over the root of the number of values) or "sum". No value: zeros.
        initializer: the first value of a row; truncated_normal(std=1/sqrt(dimension)) unless given.
        table_name: of the kvemb table; the column's name unless given.

    Example:
        >>> embedding_column(categorical_column_with_identity("hour", 24), 4).name
        'hour_embedding'
    """
    _check_categorical(categorical_column)
    column = _embedding(categorical_column, dimension, combiner, initializer, table_name or f"{categorical_column.name}_embedding")
    check_table_name(column.table_name)
    return column


def shared_embedding_columns(
    categorical_columns: Sequence[CategoricalColumn],
    dimension: int,
    combiner: str = "mean",
    initializer: Initializer | None = None,
    shared_embedding_collection_name: str | None = None,
) -> list[EmbeddingColumn]:
    """Declare one table for several categorical columns with the same buckets; arguments as `embedding_column`.

    Args:
        shared_embedding_collection_name: of the kvemb table; unless given, the columns' sorted names and "shared_embedding", joined by "_".

    Returns:
        A column for each, in the same order.

    Example:
        >>> watched = categorical_column_with_identity("watched", 1000)
        >>> liked = categorical_column_with_identity("liked", 1000)
        >>> columns = shared_embedding_columns([watched, liked], 8)
        >>> [column.name for column in columns], columns[0].table_name
        (['watched_shared_embedding', 'liked_shared_embedding'], 'liked_watched_shared_embedding')
    """
    columns = list(categorical_columns)
    if not columns:
        raise InvalidInputError("shared_embedding_columns needs at least one column")
    for column in columns:
        _check_categorical(column)
    sizes = {column.name: column.num_buckets for column in columns}
    if len(set(sizes.values())) > 1:
        raise InvalidInputError(f"columns that share a table must have the same number of buckets, got {sizes}")
    name = check_table_name(shared_embedding_collection_name or "_".join([*sorted(c.name for c in columns), "shared_embedding"]))
    return [_embedding(column, dimension, combiner, initializer, name, shared=True) for column in columns]


def _embedding(
    column: CategoricalColumn, dimension: int, combiner: str, initializer: Initializer | None, table_name: str, *, shared: bool = False
) -> EmbeddingColumn:
    dim = check_integer(f"column {column.name!r}: dimension", dimension, 1, MAX_DIM + 1)
    _check_one_of(f"column {column.name!r}: combiner", combiner, COMBINERS)
    if initializer is not None and not isinstance(initializer, Initializer):
        raise InvalidInputError(f"column {column.name!r}: initializer is {initializer!r}; call one of kvemb.init's functions")
    first = init.truncated_normal(std=1 / math.sqrt(dim)) if initializer is None else initializer
    return EmbeddingColumn(column, dim, combiner, first, table_name, shared)


def _check_categorical(column: object) -> None:
    if not isinstance(column, CategoricalColumn):
        raise InvalidInputError(f"such a column is made of a categorical, bucketized or crossed column, got {type(column).__name__}")


def _check_one_of(where: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise InvalidInputError(f"{where} is {value!r}; give one of {', '.join(known)}")


def _vocabulary(key: str, given: Sequence[Any] | NDArray[Any]) -> tuple[tuple[Any, ...], str]:
    """Return the words and their type, "string" or "int64"."""
    if isinstance(given, str | bytes):
        raise InvalidInputError(f"column {key!r}: vocabulary_list must be a list of words, got one {type(given).__name__}")
    words = tuple(given.tolist() if isinstance(given, np.ndarray) else given)
    where = f"column {key!r}: vocabulary_list"
    if not words:
        raise InvalidInputError(f"{where} is empty")
    if isinstance(words[0], str | bytes):
        check_unique(where, [text_bytes(word) for word in words])
        return words, "string"
    integers = tuple(check_integer(where, word, -_MOST, _MOST) for word in words)
    check_unique(where, integers)
    return integers, "int64"
