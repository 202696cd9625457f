"""DenseFeatures: from features by name, through columns, to one tensor, as tf.keras.layers.DenseFeatures and HybridBackend's.

Rows of embedding columns live in kvemb tables; all of them are one pull, or as many as `emb_num_groups` allows. What must not live
here: what columns mean and how features come in (`trainer.columns`, `feature_reading`), pulling (`collection_tables`), options by
column (`column_options`).

HybridBackend's `batch_size` is not offered: nothing is laid out by it here, memory follows the batches that come.

Source: tf.feature_column, and HybridBackend's options of the same names (interfaces only).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec
from trainer.columns.bags import Bags
from trainer.columns.columns import NO_ROW, CategoricalColumn, DenseColumn, EmbeddingColumn, NumericColumn
from trainer.torch.collection_configs import TableCreator
from trainer.torch.collection_tables import LookedUp, TableCollection, pool
from trainer.torch.column_options import ColumnTable, Options, tables_of
from trainer.torch.eager import eager
from trainer.torch.feature_reading import Feature, device_of, numbers, read_bags
from trainer.torch.shared import Asked


@dataclass(frozen=True, eq=False)
class _TableIds:
    """What one table is asked for.

    Args:
        ids: int64 [m]: bags of all its columns, one column after another; ascending where they were promised to be unique.
        order: int64 [m]: the place of each of `ids` in the bags, or None where that is 0, 1, 2, ….
        bags: by column; their values are the ids.
    """

    ids: Tensor
    order: Tensor | None
    bags: list[Bags]


class DenseFeatures(TableCollection):
    """Turn features into one float32 tensor [b, width]: a block per column, in the order of the columns' names.

    Args:
        feature_columns: numeric and embedding columns (`trainer.columns`), of distinct names.
        cluster: where the tables of embedding columns are created, or opened if they exist with the same identity. A table of up to
            2**30 buckets is dense (`create_table`'s num_ids); beyond that its rows have keys of their own.
        optimizer: of the tables, or a mapping from column name to it; rowwise_adagrad() unless given.
        reduce: of the tables: how gradients of different trainers combine, "sum" or "mean".
        emb_num_groups: pull the tables in at most so many pulls; more than 1 bounds the size of each.
        emb_dtype: how the tables store weights: "float32", "float16", "bfloat16", or a mapping from column name to that.
        emb_wire_dtype: how gradients travel, the same names (`Table.set_wire_dtype`), or a mapping from column name.
        emb_unique: whether no id stands twice in a batch: the search for duplicates is left out. True, or a mapping from column name. A
            broken promise is found, and refused. Not for columns that share a table.

    Raises:
        InvalidInputError: columns or options cannot be used.
        TableMismatchError: a table exists with another identity.

    Example:
        >>> import kvemb
        >>> from trainer.columns import categorical_column_with_hash_bucket, embedding_column, numeric_column
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
        cluster: TableCreator,
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
        columns = sorted(_checked(feature_columns), key=lambda column: column.name)
        embedded = [column for column in columns if isinstance(column, EmbeddingColumn)]
        options = Options(optimizer, reduce, emb_dtype, emb_wire_dtype, emb_unique)
        specs = tables_of(embedded, options)
        super().__init__([spec.create(cluster, options.reduce) for spec in specs], emb_num_groups)
        self._columns, self._specs = columns, specs

    @property
    def width(self) -> int:
        """Columns of the result."""
        return sum(column.width if isinstance(column, NumericColumn) else column.dimension for column in self._columns)

    def asked(self, features: Mapping[str, Feature]) -> list[Asked]:
        """Return what forward would look up."""
        return self._asked({name: of.ids for name, of in self._table_ids(features).items()})

    @eager
    def forward(self, features: Mapping[str, Feature]) -> Tensor:
        """Put together the blocks of all columns.

        Args:
            features: by name, each with b examples. Of an embedding column's feature: a tensor or array of integers or text, [b] or [b, l],
                where -1 and "" are missing; lists of b values, or of b lists of any length; or a jagged feature (`values()`, `lengths()`;
                JaggedTensor here and in TorchRec), where nothing is missing. Of a numeric column's: numbers [b] or [b, *shape].
                Features that no column reads may be there.

        Returns:
            float32 [b, width], on the device of the features' tensors.

        Raises:
            InvalidInputError: a feature is missing or does not fit its column, naming it; nothing was sent.
        """
        tables = self._table_ids(features)
        blocks = {c.name: numbers(c, features) for c in self._columns if isinstance(c, NumericColumn)}
        sizes = {name: len(block) for name, block in blocks.items()}
        sizes |= {c.name: len(b.lengths) for s in self._specs for c, b in zip(s.columns, tables[s.name].bags, strict=True)}
        if len(set(sizes.values())) > 1:
            raise InvalidInputError(f"features must have the same number of examples, got by column {sizes}")
        looked_up = self._look_up({name: of.ids for name, of in tables.items()})
        for spec in self._specs:
            blocks |= _pooled(spec, tables[spec.name], looked_up[spec.name])
        return torch.cat([blocks[column.name] for column in self._columns], dim=1)

    def extra_repr(self) -> str:
        """Name the columns in their order."""
        return ", ".join(column.name for column in self._columns)

    def _table_ids(self, features: Mapping[str, Feature]) -> dict[str, _TableIds]:
        """Find the ids that each table is asked for."""
        device = device_of(features)
        known: dict[int, Bags] = {}  # two embeddings of one column read it once
        tables: dict[str, _TableIds] = {}
        for spec in self._specs:
            bags = [_weighed(column, _ids(column.source, features, known)) for column in spec.columns]
            ids = np.concatenate([one.values for one in bags])
            order = _unique_order(spec, ids) if spec.unique else None
            sent = torch.from_numpy(ids if order is None else ids[order]).to(device)
            tables[spec.name] = _TableIds(sent, None if order is None else torch.from_numpy(order).to(device), bags)
        return tables


def _checked(columns: Iterable[DenseColumn]) -> list[DenseColumn]:
    listed = list(columns)
    for column in listed:
        if not isinstance(column, DenseColumn):
            hint = "; wrap it with embedding_column" if isinstance(column, CategoricalColumn) else ""
            raise InvalidInputError(f"feature_columns takes numeric and embedding columns, got {type(column).__name__}{hint}")
    names = [column.name for column in listed]
    if not names or len(set(names)) < len(names):
        raise InvalidInputError(f"feature_columns must be columns of distinct names, got {names}")
    return listed


def _ids(source: CategoricalColumn, features: Mapping[str, Feature], known: dict[int, Bags]) -> Bags:
    """The bags of a categorical column, values replaced by ids."""
    if id(source) not in known:
        bags = read_bags(source, features)
        ids = source.buckets(bags.values)
        known[id(source)] = Bags(ids, bags.lengths, bags.weights).keep(ids != NO_ROW)
    return known[id(source)]


def _weighed(column: EmbeddingColumn, bags: Bags) -> Bags:
    """Leave out what has no place in a weighted mean, as TensorFlow does."""
    return bags if bags.weights is None or column.combiner == "sum" else bags.keep(bags.weights > 0)


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
