"""The rows of a DeepFM by themselves: in tables that are made by hand, or in torch's own modules. The model does not know which.

The example converts a torch model instead (examples/deepfm/embeddings.py); here ids are any 64 bits, and the cluster may be a peer's.

Both begin with the same rows, the table's initial ones, and are trained by the same optimizer, so that runs compare.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import kvemb
from kvemb.init import Initializer
from kvemb.optim import OptimizerSpec
from trainer.torch import Embedding, EmbeddingBag, SparseOptimizer

MAX_UNAPPLIED = 2
LINEAR, FACTORS = "deepfm.linear", "deepfm.factors"
INITIALIZERS: dict[str, Initializer] = {LINEAR: kvemb.init.zeros(), FACTORS: kvemb.init.normal(std=0.01)}
SPECS: dict[str, Callable[[float], OptimizerSpec]] = {
    "sgd": lambda lr: kvemb.optim.sgd(lr),
    "adagrad": lambda lr: kvemb.optim.adagrad(lr),
    "adam": lambda lr: kvemb.optim.adam(lr),
}
DENSE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}
SPARSE = {**DENSE, "adam": torch.optim.SparseAdam}  # SGD and Adagrad take sparse gradients as they are


@dataclass(frozen=True)
class Settings:
    """What both places of rows must agree on.

    Args:
        dim: of the factors.
        optimizer: "sgd", "adagrad" or "adam", of rows and of dense weights.
        lr: learning rate of both.
        seed: of the initial rows.
        reduce: how the gradients of several trainers combine: "mean" when each takes the mean loss of its own batch.
    """

    dim: int
    optimizer: str
    lr: float
    seed: int
    reduce: str = "mean"

    def dims(self) -> dict[str, int]:
        """Weights per row, by table."""
        return {LINEAR: 1, FACTORS: self.dim}


@dataclass(frozen=True)
class Rows:
    """The two lookups of a DeepFM, what trains them, and how to make all pushes visible."""

    linear: nn.Module
    factors: nn.Module
    optimizer: torch.optim.Optimizer
    settle: Callable[[], None]


def stored_rows(cluster: Any, settings: Settings, suffix: str = "") -> Rows:
    """Create the tables in a cluster, or go on with those it has.

    Args:
        cluster: an open kvemb.Cluster.
        settings: the tables' identity and learning rate.
        suffix: appended to the tables' names.

    Raises:
        TableMismatchError: the cluster has tables of these names with another dim, optimizer or seed.
    """
    tables = {
        name: cluster.create_table(
            name + suffix,
            dim=dim,
            optimizer=SPECS[settings.optimizer](settings.lr),
            initializer=INITIALIZERS[name],
            seed=settings.seed,
            reduce=settings.reduce,
            exist_ok=True,
        )
        for name, dim in settings.dims().items()
    }
    linear, factors = EmbeddingBag(tables[LINEAR], mode="sum"), Embedding(tables[FACTORS])
    optimizer = SparseOptimizer(nn.ModuleList([linear, factors]), max_unapplied=MAX_UNAPPLIED)
    return Rows(linear, factors, optimizer, cluster.flush)


def local_rows(known_ids: NDArray[np.int64], settings: Settings, suffix: str = "") -> Rows:
    """Keep rows in torch's own modules; an id is its position in `known_ids` (see `indexed`).

    Args:
        known_ids: int64 [n], distinct and ascending: every id there will ever be.
        settings, suffix: as for `stored_rows`; initial rows depend on seed and table name.
    """
    weights = {
        name: torch.from_numpy(INITIALIZERS[name].rows(known_ids.view(np.uint64), dim, table=name + suffix, seed=settings.seed))
        for name, dim in settings.dims().items()
    }
    linear = nn.EmbeddingBag.from_pretrained(weights[LINEAR], freeze=False, mode="sum", sparse=True)
    factors = nn.Embedding.from_pretrained(weights[FACTORS], freeze=False, sparse=True)  # type: ignore[no-untyped-call]
    optimizer = SPARSE[settings.optimizer]([linear.weight, factors.weight], lr=settings.lr)
    return Rows(linear, factors, optimizer, lambda: None)


def indexed(clicks: Any, known_ids: NDArray[np.int64]) -> Any:
    """Replace the ids of the example's Clicks by their positions in `known_ids`, as torch's own modules need them."""
    return replace(clicks, ids=np.searchsorted(known_ids, clicks.ids))
