"""Feature columns: from named features to rows of tables, in TensorFlow's words, for every framework's bridge."""

from .declare import (
    bucketized_column,
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    categorical_column_with_vocabulary_list,
    crossed_column,
    embedding_column,
    indicator_column,
    numeric_column,
    shared_embedding_columns,
    weighted_categorical_column,
)
from .tensorflow_columns import from_tensorflow

__all__ = [
    "bucketized_column",
    "categorical_column_with_hash_bucket",
    "categorical_column_with_identity",
    "categorical_column_with_vocabulary_list",
    "crossed_column",
    "embedding_column",
    "from_tensorflow",
    "indicator_column",
    "numeric_column",
    "shared_embedding_columns",
    "weighted_categorical_column",
]
