"""Blocks of rows as they travel between records and data files: columns, not records. Pure array functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.rounding import storage_dtype
from kvemb.schema.record import HEADER_SIZE
from kvemb.schema.table_def import TableDef


@dataclass(frozen=True, eq=False)
class RowBlock:
    """n rows of one table, ascending by id.

    Args:
        ids: uint64 [n].
        versions: uint64 [n].
        weights: [n, dim] in the storage dtype, contiguous.
        state: float32 [n, state_size], contiguous; None where a checkpoint holds weights only.
    """

    ids: NDArray[np.uint64]
    versions: NDArray[np.uint64]
    weights: NDArray[Any]
    state: NDArray[np.float32] | None

    def __len__(self) -> int:
        return len(self.ids)

    @staticmethod
    def of_records(definition: TableDef, ids: NDArray[np.uint64], records: NDArray[np.uint8], weights_only: bool) -> "RowBlock":
        """Split whole records into columns.

        Args:
            definition: the table.
            ids: uint64 [n], ascending.
            records: uint8 [n, record bytes] of these ids; copied.
            weights_only: leave the state out.
        """
        record = definition.record
        weights = np.ascontiguousarray(records[:, HEADER_SIZE : record.prefix_bytes]).view(storage_dtype(definition.dtype))
        state = None if weights_only else np.ascontiguousarray(records[:, record.prefix_bytes :]).view("<f4")
        return RowBlock(ids, record.versions(records), weights, state)

    def records(self, definition: TableDef, versions: NDArray[np.uint64] | int) -> NDArray[np.uint8]:
        """Return the rows as records with these versions: uint8 [n, record bytes]. State that is not there is a new row's."""
        state = new_state(definition, len(self)) if self.state is None else self.state
        return definition.record.encode(self.ids, versions, self.weights, state)

    def take(self, rows: NDArray[Any] | slice) -> "RowBlock":
        """Return some of the rows."""
        state = None if self.state is None else self.state[rows]
        return RowBlock(self.ids[rows], self.versions[rows], self.weights[rows], state)

    @staticmethod
    def concatenate(blocks: Sequence["RowBlock"]) -> "RowBlock":
        """Put blocks behind each other; at least one."""
        if len(blocks) == 1:
            return blocks[0]
        state = [block.state for block in blocks if block.state is not None]
        return RowBlock(
            np.concatenate([block.ids for block in blocks]),
            np.concatenate([block.versions for block in blocks]),
            np.concatenate([block.weights for block in blocks]),
            np.concatenate(state) if state else None,
        )


def new_state(definition: TableDef, n: int) -> NDArray[np.float32]:
    """Return the state of n rows that were never pushed: float32 [n, state_size]."""
    fields = definition.optimizer.state_fields()
    one_row = np.repeat(np.array([s.initial for s in fields], np.float32), [s.size(definition.dim) for s in fields])
    return np.tile(one_row, (n, 1))


def row_bytes(definition: TableDef, weights_only: bool) -> int:
    """Return how many bytes one row takes in a data file at least."""
    weights = definition.dim * (2 if definition.dtype == "float16" else 4)
    return 16 + weights + (0 if weights_only else 4 * definition.record.state_size)
