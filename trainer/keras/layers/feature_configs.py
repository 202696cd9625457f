"""TableConfig and FeatureConfig: keras-rs's words for a table and for a feature that is looked up in one. Values only.

Ragged and sparse bags of ids are made dense, with weights that leave out padding. NumPy, and methods of tf.RaggedTensor: within a
tf.data.Dataset it has no values yet, so its own methods are called.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import keras
import numpy as np
from numpy.typing import NDArray

from kvemb.errors import InvalidInputError
from kvemb.schema.table_def import check_table_name

from .row_embedding import COMBINERS
from .rows_at_hand import same_shape
from .whole_ids import is_ragged

Shape = Sequence[int | None]


def _fan_out() -> Any:
    return keras.initializers.VarianceScaling(mode="fan_out")


@dataclass(eq=False)
class TableConfig:
    """One embedding table. Features that name the same object share it.

    Args:
        name: of the table in the cluster.
        vocabulary_size: rows: ids are 0 to vocabulary_size - 1.
        embedding_dim: weights per row.
        initializer: of keras.initializers, or its name; normally distributed by the rows' length unless given, as in keras-rs.
        optimizer: of keras.optimizers, or its name: the table's own, independent of the model's.
        combiner: how the rows of a bag become one: "mean", "sum", "sqrtn".
        placement: "auto": rows are in the cluster.
        max_ids_per_partition, max_unique_ids_per_partition: refused; they size the buffers of a SparseCore.

    Raises:
        InvalidInputError: a value that a table cannot have, or a word that means nothing here.
    """

    name: str
    vocabulary_size: int
    embedding_dim: int
    initializer: Any = field(default_factory=_fan_out)
    optimizer: Any = "adam"
    combiner: str = "mean"
    placement: str = "auto"
    max_ids_per_partition: int | None = None
    max_unique_ids_per_partition: int | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_table_name(self.name)
        for what, value in (("vocabulary_size", self.vocabulary_size), ("embedding_dim", self.embedding_dim)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInputError(f"table {self.name!r}: {what} is {value!r}; give a whole number above 0")
        if self.combiner not in COMBINERS:
            raise InvalidInputError(f"table {self.name!r}: combiner is {self.combiner!r}; give one of {', '.join(COMBINERS)}")
        if self.placement != "auto":
            raise InvalidInputError(
                f"table {self.name!r}: placement is {self.placement!r}; its rows are in the cluster, which is 'auto'. For a table that "
                "stays in the model take keras.layers.Embedding"
            )
        for what in ("max_ids_per_partition", "max_unique_ids_per_partition"):
            if getattr(self, what) is not None:
                raise InvalidInputError(
                    f"table {self.name!r}: {what} sizes the buffers of a SparseCore; here a step grows with its rows. Leave it out"
                )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make an equal table."""
        return {
            "name": self.name,
            "vocabulary_size": self.vocabulary_size,
            "embedding_dim": self.embedding_dim,
            "initializer": keras.saving.serialize_keras_object(self.initializer),
            "optimizer": keras.saving.serialize_keras_object(self.optimizer),
            "combiner": self.combiner,
            "placement": self.placement,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Make a table from the result of `get_config`."""
        objects = {key: keras.saving.deserialize_keras_object(config[key]) for key in ("initializer", "optimizer")}
        return cls(**{**config, **objects})


@dataclass(eq=False)
class FeatureConfig:
    """One feature, and the table that it is looked up in.

    Args:
        name: of the feature; a layer has each once.
        table: its table.
        input_shape: of its ids: (batch,) for one id an example, (batch, n) for bags, of which ragged ones are cut at n. The batch's size is
            not enforced: the last one of an epoch is smaller.
        output_shape: of the result: (batch, embedding_dim).

    Raises:
        InvalidInputError: shapes that do not go together.
    """

    name: str
    table: TableConfig
    input_shape: Shape
    output_shape: Shape

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not isinstance(self.table, TableConfig):
            raise InvalidInputError(f"feature {self.name!r}: table is a {type(self.table).__name__}; give a TableConfig")
        self.input_shape, self.output_shape = tuple(self.input_shape), tuple(self.output_shape)
        returned = (*(self.input_shape[:1] if len(self.input_shape) < 2 else self.input_shape[:-1]), self.table.embedding_dim)
        if not self.input_shape or not same_shape(returned, self.output_shape):
            raise InvalidInputError(
                f"feature {self.name!r}: ids of shape {self.input_shape} in table {self.table.name!r} give {returned}, output_shape is "
                f"{self.output_shape}"
            )

    def check(self, shape: Shape) -> None:
        """Refuse ids of another shape; any batch size goes.

        Raises:
            InvalidInputError: got and expected.
        """
        one_each = len(self.input_shape) == 1 and same_shape((None, 1), shape)
        if not one_each and not same_shape((None, *self.input_shape[1:]), shape):
            raise InvalidInputError(f"feature {self.name!r} has ids of shape {tuple(shape)}, its input_shape is {self.input_shape}")

    def flat(self, ids: Any) -> Any:
        """Return one id an example as [batch]: `fit` makes [batch, 1] of arrays."""
        return ids[:, 0] if ids is not None and len(self.input_shape) == 1 and len(ids.shape) == 2 else ids

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make an equal feature, its table's included."""
        return {
            "name": self.name,
            "table": self.table.get_config(),
            "input_shape": list(self.input_shape),
            "output_shape": list(self.output_shape),
        }


def dense_ids(of: FeatureConfig, ids: Any, weights: Any) -> tuple[Any, Any]:
    """Return ids [b, n] and their weights, None if all count as 1: padded, and cut at the n of `input_shape` where that is known."""
    if not is_ragged(ids):
        return ids, weights
    n = of.input_shape[1] if len(of.input_shape) > 1 else 1
    if hasattr(ids, "to_tensor"):
        factors = ids.with_flat_values(ids.flat_values * 0 + 1) if weights is None else weights
        return ids.to_tensor(shape=[None, n]), factors.to_tensor(shape=[None, n])
    flat, lengths = _flat(of, ids)
    factors = np.ones(len(flat), np.float32) if weights is None else _flat(of, weights)[0]
    if len(factors) != len(flat):
        raise InvalidInputError(f"feature {of.name!r}: {len(flat)} ids with {len(factors)} weights")
    return padded_bags(flat, lengths, n), padded_bags(factors.astype(np.float32), lengths, n)


def _flat(of: FeatureConfig, given: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The values of all rows, one after another, and how many each row has [b]."""
    if not hasattr(given, "dense_shape"):
        lengths = np.fromiter(map(len, given), np.int64, len(given))
        return (np.concatenate(given) if len(given) else np.empty(0, np.int64)), lengths
    try:
        rows, n_rows = given.indices.numpy()[:, 0], int(given.dense_shape.numpy()[0])
    except AttributeError as error:
        raise InvalidInputError(
            f"feature {of.name!r} is a tf.SparseTensor without values yet; make it ragged (tf.RaggedTensor.from_sparse) before preprocess()"
        ) from error
    return given.values.numpy(), np.bincount(rows, minlength=n_rows)


def padded_bags(flat: NDArray[Any], lengths: NDArray[np.int64], n: int | None) -> NDArray[Any]:
    """Return values [m] of bags of these lengths [b] as [b, n], cut at n, filled up with 0; None: as long as the longest."""
    wide = int(lengths.max(initial=0)) if n is None else n
    row = np.repeat(np.arange(len(lengths)), lengths)  # [m], of each value
    column = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # [m], its place in its row
    kept = column < wide
    padded = np.zeros((len(lengths), wide), flat.dtype)
    padded[row[kept], column[kept]] = flat[kept]
    return padded
