"""Where the embeddings of a Keras model are, and which cannot be tables; and the tables that its DistributedEmbedding layers declare."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from numpy.typing import NDArray

from kvemb import init
from kvemb.errors import InvalidInputError
from kvemb.init import Initializer

from ...bridge.filled_tables import TableOptions, WeightPlace
from ..layers.distributed_embedding import DistributedEmbedding
from ..layers.feature_configs import TableConfig
from ..steps.model_state import refuse_unfit, rule_of
from .keras_rules import MappedRule

if TYPE_CHECKING:
    from kvemb.api import Cluster
    from kvemb.api.table import Table


_STD_WITHIN_2 = 0.87962566103423978  # of a normal distribution that is cut at 2 of its own: Keras scales by it


def places_of(model: Any) -> list[WeightPlace]:
    """Find every keras.layers.Embedding that is not over a table, by its name; one that is not built yet has no weight."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding) and not hasattr(layer, "table_name")]
    frozen = "frozen: it is not trained"
    return [
        WeightPlace((of.name,), of, of, int(of.input_dim), int(of.output_dim), partial(_rows, of), "" if of.trainable else frozen)
        for of in layers
    ]


def _rows(layer: Any, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    if keras.backend.backend() == "torch":
        rows: NDArray[np.float32] = layer._embeddings.value.detach().cpu().numpy()[ids]
        return rows
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.take(layer._embeddings, ids, axis=0)), np.float32)


def problems_of(model: Any, layer: Any) -> Iterator[str]:
    """Yield the reasons why a layer cannot be one over a table."""
    if any(one.layer is layer for one in model._flatten_layers() if isinstance(one, keras.layers.TimeDistributed)):
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


@dataclass(frozen=True, eq=False)
class DeclaredTable:
    """One table, with its TableConfig in a cluster's words."""

    config: TableConfig
    optimizer: Any
    rule: MappedRule
    initializer: Initializer


def declared_tables(model: Any, initializer: Initializer | None) -> list[DeclaredTable]:
    """Return the tables that a model's layers declare, checked; `initializer` takes the place of theirs."""
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
