"""What DenseFeatures computes of features by name: the ids of every table, and one block per column.

What must not live here: what columns mean (`trainer.columns`), how features come in (`feature_reading`), rows and where they come from
(`dense_features`, `plain_tables`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvemb.errors import InvalidInputError

from ...columns.column_kinds import NO_ROW, CategoricalColumn, DenseColumn, EmbeddingColumn, NumericColumn
from ...columns.column_tables import ColumnTable
from ...columns.feature_bags import Bags
from .feature_reading import Feature, device_of, numbers, read_bags
from .pooling import pool
from .recipes import LookedUp, LookUp, exporting


@dataclass(frozen=True, eq=False)
class _TableIds:
    """The ids that all columns of one table are looked up by, in one array.

    Args:
        ids: int64 [m]: bags of all its columns, one column after another; ascending where they were promised to be unique.
        order: int64 [m]: the place of each of `ids` in the bags, or None where that is 0, 1, 2, ….
        bags: by column; their values are the ids.
    """

    ids: Tensor
    order: Tensor | None
    bags: list[Bags]


class ColumnRecipe:
    """Read features, and put the blocks of all columns together.

    Args:
        columns: in the order of their blocks.
        specs: the tables of those that are embedded.
    """

    def __init__(self, columns: Sequence[DenseColumn], specs: Sequence[ColumnTable]) -> None:
        self.columns, self.specs = list(columns), list(specs)

    @property
    def width(self) -> int:
        """Columns of the result."""
        return sum(column.width if isinstance(column, NumericColumn) else column.dimension for column in self.columns)

    def ids(self, features: Mapping[str, Feature]) -> dict[str, Tensor]:
        """Return the ids of every table."""
        return {name: of.ids for name, of in self._table_ids(features).items()}

    def run(self, features: Mapping[str, Feature], look_up: LookUp) -> Tensor:
        """Return float32 [b, width]."""
        if exporting():
            raise InvalidInputError(
                "feature columns read features outside of torch, which torch.export cannot record; keep the copy with torch.save, and "
                "export what comes behind the columns"
            )
        tables = self._table_ids(features)
        blocks = {c.name: numbers(c, features) for c in self.columns if isinstance(c, NumericColumn)}
        sizes = {name: len(block) for name, block in blocks.items()}
        sizes |= {c.name: len(b.lengths) for s in self.specs for c, b in zip(s.columns, tables[s.name].bags, strict=True)}
        if len(set(sizes.values())) > 1:
            raise InvalidInputError(f"features must have the same number of examples, got by column {sizes}")
        looked_up = look_up({name: of.ids for name, of in tables.items()})
        for spec in self.specs:
            blocks |= _pooled(spec, tables[spec.name], looked_up[spec.name])
        return torch.cat([blocks[column.name] for column in self.columns], dim=1)

    def __str__(self) -> str:
        return ", ".join(column.name for column in self.columns)

    def _table_ids(self, features: Mapping[str, Feature]) -> dict[str, _TableIds]:
        """Find the ids that each table is asked for."""
        device = device_of(features)
        known: dict[int, Bags] = {}  # two embeddings of one column read it once
        tables: dict[str, _TableIds] = {}
        for spec in self.specs:
            bags = [_weighed(column, _ids(column.source, features, known)) for column in spec.columns]
            ids = np.concatenate([one.values for one in bags])
            order = _unique_order(spec, ids) if spec.unique else None
            sent = torch.from_numpy(ids if order is None else ids[order]).to(device)
            tables[spec.name] = _TableIds(sent, None if order is None else torch.from_numpy(order).to(device), bags)
        return tables


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
