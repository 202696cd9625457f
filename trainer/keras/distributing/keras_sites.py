"""Which embeddings of a Keras model become tables, which stay, and which cannot be either: decided before anything changes.

Strategy, as for torch: an embedding of enough rows is replaced, or refused with all reasons at once. It stays only for a stated reason: too
few rows, frozen, or asked for. The tables that a model's DistributedEmbedding layers declare are checked, then made or opened, each with a
rule of its own.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from numpy.typing import NDArray

from kvemb import init
from kvemb.errors import InvalidInputError
from kvemb.init import Initializer
from kvemb.schema.table_def import check_table_name

from ...bridge.filled_tables import TableOptions
from ..layers.distributed_embedding import DistributedEmbedding
from ..layers.feature_configs import TableConfig
from ..steps.model_state import refuse_unfit, rule_of
from .keras_rules import MappedRule

if TYPE_CHECKING:
    from kvemb.api import Cluster
    from kvemb.api.table import Table


Names = Mapping[str, str] | Callable[[str], str]
"""Table names by layer's name, or a function from it."""
_STD_WITHIN_2 = 0.87962566103423978  # of a normal distribution that is cut at 2 of its own: Keras scales by it


@dataclass(frozen=True, eq=False)
class KerasSite:
    """One keras.layers.Embedding that becomes a table.

    Args:
        table: its name.
        layer: may be not built yet, and then has no weight.
    """

    table: str
    layer: Any

    @property
    def n_rows(self) -> int:
        """Rows: ids are 0 to n_rows - 1."""
        return int(self.layer.input_dim)

    @property
    def dim(self) -> int:
        """Weights per row."""
        return int(self.layer.output_dim)

    @property
    def padding(self) -> list[int]:
        """None: Keras trains the row that is masked, if something looks at it."""
        return []

    def rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return rows [n, dim] of the layer's weight."""
        if keras.backend.backend() == "torch":
            rows: NDArray[np.float32] = self.layer._embeddings.value.detach().cpu().numpy()[ids]
            return rows
        return np.asarray(keras.ops.convert_to_numpy(keras.ops.take(self.layer._embeddings, ids, axis=0)), np.float32)

    def __str__(self) -> str:
        return f"table {self.table!r} (layer {self.layer.name!r})"


def find_sites(
    model: Any, min_rows: int, names: Names | None, leave: Collection[str], prefix: str
) -> tuple[list[KerasSite], list[tuple[str, str]]]:
    """Decide for each keras.layers.Embedding whether it becomes a table.

    Returns:
        The embeddings that become tables; (name, why) of those that stay.
    """
    layers = [layer for layer in model._flatten_layers() if type(layer).__mro__.count(keras.layers.Embedding)]
    plain = [layer for layer in layers if not hasattr(layer, "table_name")]
    known = {layer.name for layer in plain}
    for what, given in (("leave", set(leave)), ("names", set(names) if isinstance(names, Mapping) else set())):
        if unknown := sorted(given - known):
            raise InvalidInputError(f"{what}: no embedding is named {', '.join(unknown)}; there are: {', '.join(sorted(known)) or 'none'}")
    sites, left, problems = [], [], []
    timed = {id(one.layer) for one in model._flatten_layers() if isinstance(one, keras.layers.TimeDistributed)}
    for layer in plain:
        why = "leave=[…] names it" if layer.name in leave else _reason_to_stay(layer, min_rows)
        if why:
            left.append((layer.name, why))
            continue
        problems += [f"{layer.name!r}: {problem}" for problem in _problems(layer, id(layer) in timed)]
        sites.append(KerasSite(_name(layer.name, names, prefix), layer))
    if problems:
        raise InvalidInputError(
            "nothing was changed: " + "; ".join(problems) + ". Change the model, or keep these local with leave=[their names]"
        )
    tables = [site.table for site in sites]
    if twice := sorted({name for name in tables if tables.count(name) > 1}):
        raise InvalidInputError(
            f"names: several layers would be table {', '.join(twice)}; give each a name=, or share rows by sharing a layer"
        )
    return sites, left


def counterpart(given: Any, rows: int, dim: int) -> Initializer | None:
    """Return the counterpart of one of keras.initializers for a weight of that shape; None if there is none."""
    kinds = keras.initializers
    if type(given) is kinds.RandomUniform:
        return init.uniform(float(given.minval), float(given.maxval))
    if type(given) is kinds.RandomNormal:
        return init.normal(float(given.mean), float(given.stddev))
    if type(given) is kinds.TruncatedNormal:
        return init.truncated_normal(float(given.mean), float(given.stddev))
    if type(given) is kinds.Zeros:
        return init.zeros()
    if isinstance(given, kinds.VarianceScaling):
        return _by_variance(given, rows, dim)
    return init.constant(float(given.value)) if type(given) is kinds.Constant and isinstance(given.value, float | int) else None


def _by_variance(given: Any, rows: int, dim: int) -> Initializer:
    fan = {"fan_in": rows, "fan_out": dim, "fan_avg": (rows + dim) / 2}[given.mode]
    variance = given.scale / max(1.0, fan)
    if given.distribution == "uniform":
        return init.uniform(-math.sqrt(3 * variance), math.sqrt(3 * variance))
    if given.distribution == "untruncated_normal":
        return init.normal(0.0, math.sqrt(variance))
    return init.truncated_normal(0.0, math.sqrt(variance) / _STD_WITHIN_2)


def _reason_to_stay(layer: Any, min_rows: int) -> str:
    if layer.input_dim < min_rows:
        return f"{layer.input_dim} rows, fewer than min_rows={min_rows}"
    return "" if layer.trainable else "frozen: it is not trained"


def _problems(layer: Any, timed: bool) -> Iterator[str]:
    if timed:
        yield "TimeDistributed calls it once for each step of time: it takes ids of any shape, so call it without that layer"
    if type(layer) is not keras.layers.Embedding:
        yield f"{type(layer).__name__} is a class of its own"
    if layer.embeddings_regularizer is not None:
        yield "embeddings_regularizer: it needs all rows in every step"
    if layer.embeddings_constraint is not None:
        yield "embeddings_constraint: it would write rows, which only parameter servers do"
    if layer.lora_rank or layer.quantization_mode:
        yield "LoRA and quantization need all rows at once"
    if layer.variable_dtype != "float32":
        yield f"its weight is {layer.variable_dtype}, and rows are looked up as float32 (storage may be 16 bits: dtype=)"


def _name(layer: str, names: Names | None, prefix: str) -> str:
    given = names(layer) if callable(names) else (names or {}).get(layer, layer)
    try:
        return check_table_name(prefix + given)
    except InvalidInputError as error:
        raise InvalidInputError(f"layer {layer!r}: {error}; give names={{{layer!r}: …}}") from error


@dataclass(frozen=True, eq=False)
class DeclaredTable:
    """One table, with its TableConfig in a cluster's words."""

    config: TableConfig
    optimizer: Any
    rule: MappedRule
    initializer: Initializer


def declared_tables(model: Any, initializer: Initializer | None) -> list[DeclaredTable]:
    """Return the tables that a model's layers declare; `initializer` takes the place of theirs."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, DistributedEmbedding)]
    configs = list({id(table): table for layer in layers for table in layer.tables}.values())
    names = [config.name for config in configs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidInputError(f"several TableConfig objects are named {', '.join(twice)}; layers share a table by naming one object")
    return [_declared(config, initializer) for config in configs]


def _declared(config: TableConfig, given: Initializer | None) -> DeclaredTable:
    try:
        optimizer = keras.optimizers.get(config.optimizer)
        first = keras.initializers.get(config.initializer)
    except ValueError as error:
        raise InvalidInputError(f"table {config.name!r}: {error}") from error
    try:
        refuse_unfit(optimizer)
        if rule_of(optimizer).gradient_accumulation_steps:
            raise InvalidInputError("batches of a step are counted by the optimizer that the model is compiled with; give it there")
        if rule_of(optimizer) is not optimizer or optimizer.loss_scale_factor:
            raise InvalidInputError("losses are scaled by the optimizer that the model is compiled with; give the table one without")
        rule = MappedRule(optimizer)
    except InvalidInputError as error:
        raise InvalidInputError(f"optimizer of table {config.name!r}: {error}") from error
    found = given or counterpart(first, config.vocabulary_size, config.embedding_dim)
    if found is None:
        raise InvalidInputError(
            f"table {config.name!r}: its {type(first).__name__} has no counterpart; take another one, or give initializer=kvemb.init.…"
        )
    found.check_dim(config.embedding_dim)
    return DeclaredTable(config, optimizer, rule, found)


def make_declared(cluster: "Cluster", one: DeclaredTable, options: TableOptions) -> "Table":
    """Make a table, or open it where it exists."""
    return cluster.create_table(
        one.config.name,
        dim=one.config.embedding_dim,
        optimizer=one.rule.spec,
        initializer=one.initializer,
        dtype=options.dtype,
        seed=options.seed,
        reduce=options.reduce,
        num_ids=one.config.vocabulary_size,
        exist_ok=True,
    )
