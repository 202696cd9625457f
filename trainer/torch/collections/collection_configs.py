"""The configs of a collection's tables: TorchRec's words, and how a table is trained.

Not offered: init_fn (rows have an `initializer`, a pure function of their ids), data_type (here `dtype`, under kvemb's names),
need_indices. Nor what TorchRec needs for placing tables on devices. What must not live here: lookups (`embedding_collections`).

Source: torchrec.modules.embedding_configs (interface only).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvemb import init, optim
from kvemb.errors import InvalidInputError
from kvemb.init import Initializer
from kvemb.optim import OptimizerSpec

from ...bridge.cluster_ports import TablePort
from ...bridge.table_creator import TableCreator

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

    def create(self, cluster: TableCreator) -> TablePort:
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
