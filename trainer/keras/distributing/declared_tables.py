"""The tables that a model's DistributedEmbedding layers declare: checked, then made or opened, each with a rule of its own.

What must not live here: rules (`keras_rules`), embeddings that become tables (`keras_sites`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from kvemb.errors import InvalidInputError
from kvemb.init import Initializer

from ...bridge.filled_tables import TableOptions
from ..layers.distributed_embedding import DistributedEmbedding
from ..layers.feature_configs import TableConfig
from ..steps.gradient_scale import refuse_unfit, rule_of
from .keras_rules import MappedRule
from .keras_sites import counterpart

if TYPE_CHECKING:
    from kvemb.cluster import Cluster
    from kvemb.table import Table


@dataclass(frozen=True, eq=False)
class DeclaredTable:
    """One table, and what its TableConfig says in a cluster's words."""

    config: TableConfig
    optimizer: Any
    rule: MappedRule
    initializer: Initializer


def declared_tables(model: Any, initializer: Initializer | None) -> list[DeclaredTable]:
    """Return what a model's layers declare; `initializer` takes the place of theirs.

    Raises:
        InvalidInputError: an optimizer or initializer without a counterpart, or several tables of one name.
    """
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
    """Make a table, or open it where it exists.

    Raises:
        TableMismatchError: it exists with another identity.
    """
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
