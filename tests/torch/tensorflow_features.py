"""Columns of every kind, and the features of which TensorFlow's own result is known."""

from typing import Any

import numpy as np
import torch

from kvemb import init
from trainer.columns import (
    bucketized_column,
    categorical_column_with_identity,
    categorical_column_with_vocabulary_list,
    embedding_column,
    numeric_column,
    shared_embedding_columns,
    weighted_categorical_column,
)
from trainer.columns.column_kinds import DenseColumn
from trainer.torch.collections.jagged_tensors import JaggedTensor

FIRST = init.normal(std=1.0)


def identity(key: str, n: int = 20) -> Any:
    return categorical_column_with_identity(key, n)


def tensorflow_columns() -> list[DenseColumn]:
    """Numeric, identity, vocabulary, bucketized, weighted and shared columns, each combiner; in no order."""
    weighted = [
        embedding_column(weighted_categorical_column(identity(key, 6), weight), dim, combiner)
        for key, weight, dim, combiner in (("ad", "clicks", 2, "mean"), ("bid", "paid", 1, "sqrtn"), ("cat", "worth", 1, "sum"))
    ]
    return [
        numeric_column("size", shape=(2,)),
        numeric_column("price", normalizer_fn=lambda x: (x - 1) / 2),
        embedding_column(categorical_column_with_identity("page", 10, default_value=4), 2, combiner="sqrtn"),
        embedding_column(categorical_column_with_vocabulary_list("colour", ["red", "green", "blue"]), 2),
        embedding_column(bucketized_column(numeric_column("size", shape=(2,)), [0.0, 0.7, 10.0]), 1, combiner="sum"),
        *weighted,
        *shared_embedding_columns([identity("watched", 8), identity("liked", 8)], 2),
    ]


def tensorflow_features() -> dict[str, Any]:
    return {
        "size": torch.tensor([[-1.0, 0.7], [0.0, 10.0], [5.0, 99.0]]),
        "price": torch.tensor([[3.0], [1.0], [0.0]]),
        "page": torch.tensor([[1, 2, -1], [-1, -1, -1], [99, 3, 3]]),
        "colour": np.array([["red", "pink"], ["", ""], ["blue", "green"]]),
        "ad": JaggedTensor.from_lists([[1, 2], [], [3]]),
        "clicks": JaggedTensor.from_lists([[1.0, 3.0], [], [2.0]], torch.float32),
        "bid": [[1, 2, 3], [4], [5]],
        "paid": [[1.0, 3.0, -1.0], [0.0], [2.0]],
        "cat": [[1, 2], [4], [5]],
        "worth": [[1.0, -3.0], [0.0], [2.0]],
        "watched": torch.tensor([[1, 2], [3, -1], [7, 7]]),
        "liked": torch.tensor([0, -1, 6]),
    }
