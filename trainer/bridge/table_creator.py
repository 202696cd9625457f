"""What modules that declare their tables need of a cluster: types only."""

from typing import Protocol

from kvemb.init import Initializer
from kvemb.optim import OptimizerSpec

from .cluster_ports import TablePort


class CreatedTable(TablePort, Protocol):
    """A table whose gradients may travel in 16 bits: `kvemb.Table`."""

    def set_wire_dtype(self, name: str) -> None:
        """Choose how gradients travel."""
        ...


class TableCreator(Protocol):
    """What is needed of a cluster: `kvemb.Cluster.create_table`."""

    def create_table(
        self,
        name: str,
        *,
        dim: int,
        optimizer: OptimizerSpec,
        initializer: Initializer | None,
        dtype: str,
        seed: int,
        reduce: str,
        num_ids: int | None,
        exist_ok: bool,
    ) -> CreatedTable:
        """Create a table, or open it."""
        ...
