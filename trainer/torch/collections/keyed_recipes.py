"""The computation of collections on a KeyedJaggedTensor: the ids of every table, and the results from their rows.

Sizes are read as `shape[0]`: torch.export keeps that as a symbol, where `len` would fix it.

The configs of a collection's tables have TorchRec's names, and say how a table is trained. Not offered: init_fn (rows have an
`initializer`, a pure function of their ids), data_type (here `dtype`, under kvemb's names), need_indices, and options for placing tables on
devices. Source: torchrec.modules.embedding_configs (interface only).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvemb import init, optim
from kvemb.errors import InvalidInputError
from kvemb.init import Initializer
from kvemb.optim import OptimizerSpec

from ...lookahead.cluster_ports import TablePort
from ..modules.pooling import LookedUp, LookUp, pool
from .jagged_tensors import JaggedTensor, KeyedTensor, split_features

if TYPE_CHECKING:
    from kvemb.api import Cluster

POOLINGS = ("sum", "mean")


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """One table of a collection: its name, its rows, the features that are looked up in it.

    Args:
        name: the table's.
        embedding_dim: weights per row.
        num_embeddings: ids are 0 to num_embeddings - 1 (`create_table`'s num_ids); None: any 64-bit ids.
        feature_names: the features that are looked up in it; its own name unless given.
        optimizer: the table's; rowwise_adagrad(), DLRM's usual choice, unless given.
        initializer: uniform in ± 1/sqrt(num_embeddings) as in TorchRec, or ± 0.05 for any ids, unless given.
        dtype, seed, reduce: see `kvemb.schema.table_def.TableDef`.
    """

    name: str
    embedding_dim: int
    num_embeddings: int | None
    feature_names: Sequence[str] = ()
    optimizer: OptimizerSpec | None = None
    initializer: Initializer | None = None
    dtype: str = "float32"
    seed: int = 0
    reduce: str = "sum"

    def __post_init__(self) -> None:
        if isinstance(self.feature_names, str):
            raise InvalidInputError(f"table {self.name!r}: feature_names must be a list of names, got one str")
        object.__setattr__(self, "feature_names", tuple(self.feature_names) or (self.name,))

    def create(self, cluster: "Cluster") -> TablePort:
        """Create the table, or open it where it exists with the same identity."""
        return cluster.create_table(
            self.name,
            dim=self.embedding_dim,
            optimizer=optim.rowwise_adagrad() if self.optimizer is None else self.optimizer,
            initializer=self._first_rows() if self.initializer is None else self.initializer,
            dtype=self.dtype,
            seed=self.seed,
            reduce=self.reduce,
            num_ids=self.num_embeddings,
            exist_ok=True,
        )

    def _first_rows(self) -> Initializer:
        if not self.num_embeddings:
            return init.uniform()
        bound = 1 / math.sqrt(self.num_embeddings)
        return init.uniform(-bound, bound)


@dataclass(frozen=True, kw_only=True)
class EmbeddingBagConfig(EmbeddingConfig):
    """One table of an EmbeddingBagCollection; arguments as EmbeddingConfig.

    Args:
        pooling: "sum" or "mean"; TorchRec's PoolingType is fine.
    """

    pooling: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        pooling = str(getattr(self.pooling, "value", self.pooling)).lower()
        if pooling not in POOLINGS:
            raise InvalidInputError(f"table {self.name!r}: pooling is {self.pooling!r}; give one of {', '.join(POOLINGS)}")
        object.__setattr__(self, "pooling", pooling)


class KeyedJagged(Protocol):
    """A KeyedJaggedTensor, ours or TorchRec's: values and lengths by feature."""

    def keys(self) -> Sequence[str]:
        """The features' names."""

    def values(self) -> Tensor:
        """All values, feature by feature, bag after bag: [m]."""

    def lengths(self) -> Tensor:
        """How many values each bag has: [features * b]."""

    def weights_or_none(self) -> Tensor | None:
        """A weight per value [m], or None."""


class KeyedRecipe:
    """The common part of both collections: features by table, and the names of results."""

    def __init__(self, configs: Sequence[EmbeddingConfig]) -> None:
        names = [config.name for config in configs]
        if not names or len(set(names)) < len(names):
            raise InvalidInputError(f"a collection needs tables of distinct names, got {names}")
        for config in configs:
            if len(set(config.feature_names)) < len(config.feature_names):
                raise InvalidInputError(f"table {config.name!r}: feature_names must be distinct, got {list(config.feature_names)}")
        self.configs = list(configs)
        every = [feature for config in configs for feature in config.feature_names]
        self._results = {  # per table; a feature of several tables is told apart as "feature@table"
            config.name: [f"{f}@{config.name}" if every.count(f) > 1 else f for f in config.feature_names] for config in configs
        }

    def ids(self, features: KeyedJagged) -> dict[str, Tensor]:
        """Return the ids of every table: those of its features, one feature after another."""
        return self._ids_of(self._read(features))

    def __str__(self) -> str:
        return ", ".join(f"{config.name}({', '.join(config.feature_names)})" for config in self.configs)

    def _ids_of(self, features: Mapping[str, JaggedTensor]) -> dict[str, Tensor]:
        return {c.name: torch.cat([features[name].values() for name in c.feature_names]) for c in self.configs}

    def _read(self, given: KeyedJagged) -> dict[str, JaggedTensor]:
        """Take features apart; those that no table has are left out."""
        if isinstance(given, torch.fx.Proxy):
            raise InvalidInputError(
                "torch.fx cannot record how features are taken apart; make this module a leaf of your Tracer (is_leaf_module), or give "
                "kvemb.torch.materialize(model) to torch.export"
            )
        if not all(callable(getattr(given, method, None)) for method in ("keys", "values", "lengths", "weights_or_none")):
            raise InvalidInputError(
                f"features must be a KeyedJaggedTensor, got {type(given).__name__}; of a dict of lists, "
                "KeyedJaggedTensor.from_lists makes one"
            )
        for method in ("variable_stride_per_key", "inverse_indices_or_none"):
            if getattr(given, method, bool)():  # TorchRec's, with bags that are not one per example and key
                raise InvalidInputError(f"features with {method}() are not supported: give each key the same number of bags")
        keys, values, lengths = list(given.keys()), given.values(), given.lengths()
        missing = sorted({name for config in self.configs for name in config.feature_names} - set(keys))
        if missing:
            raise InvalidInputError(f"no feature {', '.join(missing)}; there are {', '.join(keys)}")
        return split_features(keys, values, lengths, given.weights_or_none())


class BagRecipe(KeyedRecipe):
    """Pools the rows of each bag to one vector, for an EmbeddingBagCollection."""

    def __init__(self, configs: Sequence[EmbeddingBagConfig], is_weighted: bool) -> None:
        averaged = [config.name for config in configs if config.pooling != "sum"]
        if is_weighted and averaged:
            raise InvalidInputError(f"weights go with pooling 'sum' only; the tables {', '.join(averaged)} have another")
        super().__init__(configs)
        self.bag_configs, self.is_weighted = list(configs), is_weighted

    def run(self, features: KeyedJagged, look_up: LookUp) -> KeyedTensor:
        """Return float32 [b, embedding_dim] per feature, in the order of the tables and their features."""
        parts = self._read(features)
        if self.is_weighted and features.weights_or_none() is None:
            raise InvalidInputError("this collection is_weighted, but the features have no weights")
        looked_up = look_up(self._ids_of(parts))
        pooled = [block for config in self.bag_configs for block in self._pool(config, looked_up[config.name], parts)]
        names = [name for config in self.configs for name in self._results[config.name]]
        return KeyedTensor(names, [block.shape[1] for block in pooled], torch.cat(pooled, dim=1))

    def _pool(self, config: EmbeddingBagConfig, rows: LookedUp, parts: Mapping[str, JaggedTensor]) -> Iterator[Tensor]:
        """One block per feature of the table."""
        mine = [parts[name] for name in config.feature_names]
        weights = torch.cat([one.weights() for one in mine]).to(torch.float32) if self.is_weighted else None
        pooled = pool(rows, torch.cat([one.lengths() for one in mine]), config.pooling, weights)
        yield from torch.split(pooled, [one.lengths().shape[0] for one in mine])


class SequenceRecipe(KeyedRecipe):
    """Gives every value its own row, for an EmbeddingCollection."""

    def run(self, features: KeyedJagged, look_up: LookUp) -> dict[str, JaggedTensor]:
        """Return per feature float32 [m, embedding_dim] in its own bags, with its weights if it has any."""
        parts = self._read(features)
        looked_up = look_up(self._ids_of(parts))
        results: dict[str, JaggedTensor] = {}
        for config in self.configs:
            (leaf, at), mine = looked_up[config.name], [parts[name] for name in config.feature_names]
            rows = torch.split(leaf.index_select(0, at), [one.values().shape[0] for one in mine])
            for result, one, values in zip(self._results[config.name], mine, rows, strict=True):
                results[result] = JaggedTensor(values, one.weights_or_none(), one.lengths())
        return results
