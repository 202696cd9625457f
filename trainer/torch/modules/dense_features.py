"""DenseFeatures: from features by name, through columns, to one tensor, as tf.keras.layers.DenseFeatures and HybridBackend's.

All tables are one pull, or as many as `emb_num_groups` allows. HybridBackend's `batch_size` has no meaning: memory follows the batches.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec

from ...columns.column_kinds import DenseColumn, EmbeddingColumn
from ...columns.column_tables import ColumnOptions, tables_of
from ...columns.tensorflow_columns import checked_dense_columns
from ..lookup.parameter_walks import eager
from .column_recipe import ColumnRecipe, Feature
from .table_collection import TableCollection

if TYPE_CHECKING:
    from kvemb.api import Cluster


class DenseFeatures(TableCollection[ColumnRecipe]):
    """Turn features into one float32 tensor [b, width]: a block per column, in the order of the columns' names.

    Args:
        feature_columns: numeric, indicator and embedding columns (`trainer.columns`, or TensorFlow's own), of unique names.
        cluster: where the tables of embedding columns are created, or opened if they exist with the same identity. A table of up to
            2**30 buckets is dense (`create_table`'s num_ids); the rows of a larger one are placed by a hash of their ids.
        optimizer: of the tables, or a mapping from column name to it; rowwise_adagrad() unless given.
        reduce: of the tables: how gradients of different trainers combine, "sum" or "mean".
        emb_num_groups: pull the tables in at most so many pulls, ahead (`prepare`) as well; more than 1 bounds the size of each.
        emb_dtype: how the tables store weights: "float32", "float16", "bfloat16", or a mapping from column name to that.
        emb_wire_dtype: how gradients travel, the same names (`Table.set_wire_dtype`), or a mapping from column name.
        emb_unique: whether no id stands twice in a batch: the search for duplicates is left out. True, or a mapping from column name. A
            broken promise is found, and refused. Not for columns that share a table.

    Raises:
        InvalidInputError: columns or options cannot be used.
        TableMismatchError: a table exists with another identity.

    Example:
        >>> import kvemb, torch
        >>> from kvemb.columns import categorical_column_with_hash_bucket, embedding_column, numeric_column
        >>> word = embedding_column(categorical_column_with_hash_bucket("word", 1000), 4)
        >>> with kvemb.local(shards=1) as url, kvemb.connect(url) as cluster:
        ...     layer = DenseFeatures([word, numeric_column("price")], cluster)
        ...     dense = layer({"price": torch.tensor([2.5, 3.0]), "word": [["red", "apple"], []]})
        >>> tuple(dense.shape), dense[:, 0].tolist(), dense[1, 1:].tolist()
        ((2, 5), [2.5, 3.0], [0.0, 0.0, 0.0, 0.0])
    """

    def __init__(
        self,
        feature_columns: Iterable[DenseColumn],
        cluster: "Cluster",
        *,
        optimizer: OptimizerSpec | Mapping[str, OptimizerSpec] | None = None,
        reduce: str = "sum",
        emb_num_groups: int = 1,
        emb_dtype: str | Mapping[str, str] = "float32",
        emb_wire_dtype: str | Mapping[str, str] = "float32",
        emb_unique: bool | Mapping[str, bool] = False,
    ) -> None:
        if isinstance(emb_num_groups, bool) or not isinstance(emb_num_groups, int) or emb_num_groups < 1:
            raise InvalidInputError(f"emb_num_groups is {emb_num_groups!r}; give an integer of at least 1")
        columns = sorted(checked_dense_columns(feature_columns), key=lambda column: column.name)
        embedded = [column for column in columns if isinstance(column, EmbeddingColumn)]
        options = ColumnOptions(optimizer, reduce, emb_dtype, emb_wire_dtype, emb_unique)
        specs = tables_of(embedded, options)
        recipe = ColumnRecipe(columns, specs)
        super().__init__([spec.create(cluster, options.reduce) for spec in specs], recipe, emb_num_groups)

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.recipe.width

    @eager
    def forward(self, features: Mapping[str, Feature]) -> Tensor:
        """Put together the blocks of all columns.

        Args:
            features: by name, each with b examples. Of an embedding column's feature: a tensor or array of integers or text, [b] or [b, l],
                where -1 and "" are missing. Or lists of b values, or of b lists of any length. Or a jagged feature (`values()`,
                `lengths()`; JaggedTensor here and in TorchRec), where nothing is missing. Of a numeric column's: numbers [b] or [b,
                *shape]. Features that no column reads may be there.

        Returns:
            float32 [b, width], on the device of the features' tensors.

        Raises:
            InvalidInputError: a feature is missing or does not fit its column, naming it; nothing was sent.
        """
        return self.recipe.run(features, self._look_up).to(self.dtype)
