"""The tables behind embedding columns, and options given by column."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvemb import optim
from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec

from ..lookahead.cluster_ports import TablePort
from .column_kinds import EmbeddingColumn

if TYPE_CHECKING:
    from kvemb.api import Cluster

DENSE_MOST = 1 << 30
"""Up to so many buckets a table is dense: most of its rows will come to exist, and pages suit them."""


@dataclass(frozen=True)
class ColumnOptions:
    """How columns' tables are trained and stored, as `trainer.torch.DenseFeatures` takes it; mappings are by column."""

    optimizer: OptimizerSpec | Mapping[str, OptimizerSpec] | None
    reduce: str
    emb_dtype: str | Mapping[str, str]
    emb_wire_dtype: str | Mapping[str, str]
    emb_unique: bool | Mapping[str, bool]


@dataclass(frozen=True)
class ColumnTable:
    """One table, its columns in the order of their names, and their common options."""

    name: str
    columns: tuple[EmbeddingColumn, ...]
    optimizer: OptimizerSpec
    dtype: str
    wire_dtype: str
    unique: bool

    @property
    def combiner(self) -> str:
        """How rows are combined."""
        return self.columns[0].combiner

    def create(self, cluster: "Cluster", reduce: str) -> TablePort:
        """Create the table, or open it where it exists with the same identity."""
        first = self.columns[0]
        n_ids = first.source.num_buckets
        table = cluster.create_table(
            self.name,
            dim=first.dimension,
            optimizer=self.optimizer,
            initializer=first.initializer,
            dtype=self.dtype,
            seed=0,
            reduce=reduce,
            num_ids=n_ids if n_ids <= DENSE_MOST else None,
            exist_ok=True,
        )
        if self.wire_dtype != "float32":
            table.set_wire_dtype(self.wire_dtype)
        return table


def tables_of(columns: Sequence[EmbeddingColumn], options: ColumnOptions) -> list[ColumnTable]:
    """Group columns by table and settle each table's options."""
    of_table: dict[str, list[EmbeddingColumn]] = {}
    for column in columns:
        of_table.setdefault(column.table_name, []).append(column)
    for name, ones in of_table.items():
        _check_alike(name, ones)
    known = {column.name for column in columns}
    defaults = {"optimizer": optim.rowwise_adagrad(), "emb_dtype": "float32", "emb_wire_dtype": "float32", "emb_unique": False}
    for option in defaults:
        _check_names(option, getattr(options, option), known)
    tables = []
    for name, ones in of_table.items():
        settled = [_agreed(option, getattr(options, option), default, ones) for option, default in defaults.items()]
        tables.append(ColumnTable(name, tuple(ones), *settled))
        if tables[-1].unique and len(ones) > 1:
            raise InvalidInputError(f"emb_unique is not for columns that share a table, as {', '.join(c.name for c in ones)} do")
    return tables


def _check_alike(table: str, columns: Sequence[EmbeddingColumn]) -> None:
    if len(columns) == 1:
        return
    if not all(column.shared for column in columns):
        raise InvalidInputError(f"table {table!r} is that of {len(columns)} columns; declare them by shared_embedding_columns")
    alike = {(c.dimension, c.combiner, c.initializer, c.source.num_buckets) for c in columns}
    if len(alike) > 1:
        raise InvalidInputError(f"columns that share table {table!r} must agree on dimension, combiner, initializer and number of buckets")


def _check_names(option: str, value: Any, known: set[str]) -> None:
    unknown = sorted(set(value) - known) if isinstance(value, Mapping) else []
    if unknown:
        raise InvalidInputError(f"{option} names {', '.join(map(repr, unknown))}; the embedding columns are {', '.join(sorted(known))}")


def _agreed(option: str, value: Any, default: Any, columns: Sequence[EmbeddingColumn]) -> Any:
    """Return a table's value of an option."""
    given = [value.get(column.name, default) if isinstance(value, Mapping) else default if value is None else value for column in columns]
    if any(one != given[0] for one in given):
        raise InvalidInputError(f"{option} must say the same of columns that share a table: {', '.join(c.name for c in columns)}")
    if not isinstance(given[0], type(default)):
        raise InvalidInputError(f"{option} of column {columns[0].name!r} is {given[0]!r}; expected {type(default).__name__}")
    return given[0]
