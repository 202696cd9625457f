"""The cluster in this process, for tests of distribute: tables can be made and assigned, too."""

from typing import Any

import numpy as np
from memory_cluster import MemoryCluster, MemoryTable
from numpy.typing import NDArray

from kvemb.arrays.ids import normalize
from kvemb.errors import InvalidInputError, UnknownTableError
from kvemb.init import Initializer
from kvemb.optim import OptimizerSpec
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef


class MakingTable(MemoryTable):
    def assign(self, ids: NDArray[Any], rows: NDArray[np.float32]) -> None:
        flat, _ = normalize(ids, self.definition.id_dtype, self.name, self.definition.num_ids)
        state = self.optimizer.initial_state(len(flat), self.dim)
        self.cluster.changes += 2
        for at, row_id in enumerate(flat.tolist()):
            self.rows[row_id] = rows[at].copy(), state[at], make_version(1, self.step + 1)

    def __len__(self) -> int:
        return len(self.rows)


class MakingCluster(MemoryCluster):
    """`fail_after`: how many tables can be made before making one fails."""

    read_only = False

    def __init__(self, mode: str = "async", fail_after: int = 1000) -> None:
        super().__init__(mode)
        self.fail_after = fail_after

    def create_table(
        self, name: str, *, dim: int, optimizer: OptimizerSpec, initializer: Initializer, exist_ok: bool, **rest: Any
    ) -> MakingTable:
        definition = TableDef(name, dim, optimizer, initializer, **rest)
        if name in self.tables:
            if not exist_ok:
                raise InvalidInputError(f"table {name!r} exists")
            self.tables[name].definition.require_same(definition)
        elif len(self.tables) >= self.fail_after:
            raise ConnectionError("no shard answers")
        return self.tables.setdefault(name, MakingTable(self, definition))  # type: ignore[return-value]

    def table(self, name: str, *made: Any, **options: Any) -> MemoryTable:
        if not made and name not in self.tables:
            raise UnknownTableError(f"no table {name!r}")
        return super().table(name, *made, **options) if made else self.tables[name]

    def flush(self) -> None:
        """Everything is applied already."""
