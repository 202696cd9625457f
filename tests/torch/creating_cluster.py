"""The cluster in this process, with tables created as modules do it, and every pull noted."""

from collections.abc import Mapping
from typing import Any

import torch
from memory_cluster import MemoryCluster, MemoryTable
from numpy.typing import NDArray

from kvemb.init import Initializer
from kvemb.optim import OptimizerSpec
from kvemb.schema.table_def import TableDef


class CreatingCluster(MemoryCluster):
    def __init__(self, mode: str = "async") -> None:
        super().__init__(mode)
        self.asked: list[dict[str, NDArray[Any]]] = []

    def create_table(
        self, name: str, *, dim: int, optimizer: OptimizerSpec, initializer: Initializer, exist_ok: bool, **identity: Any
    ) -> MemoryTable:
        assert exist_ok
        definition = TableDef(name, dim, optimizer, initializer, **identity)
        if name in self.tables:
            self.tables[name].definition.require_same(definition)
        return self.tables.setdefault(name, MemoryTable(self, definition))

    def pull_versions(self, ids: Mapping[str, NDArray[Any]], *, stored: bool = True) -> dict[str, Any]:
        self.asked.append(dict(ids))
        return super().pull_versions(ids)

    @property
    def n_round_trips(self) -> int:
        """Pulls of several tables, and pulls of one that was not among several."""
        alone = sum(table.n_pulls for table in self.tables.values()) - sum(len(asked) for asked in self.asked)
        return self.n_pulls + alone


def rows_of(table: MemoryTable, n_ids: int) -> torch.Tensor:
    """The rows of ids 0 to n_ids - 1 as one dense matrix that requires a gradient."""
    n_pulls = table.n_pulls
    rows = torch.from_numpy(table.pull(range(n_ids)))
    table.n_pulls = n_pulls
    return rows.requires_grad_()


def pushed_grad(cluster: MemoryCluster, name: str, like: torch.Tensor) -> torch.Tensor:
    """What the last push held of a table, as one dense matrix."""
    ids, grads = cluster.pushes[-1][name]
    dense = torch.zeros_like(like)
    dense[torch.from_numpy(ids)] = torch.from_numpy(grads)
    return dense
