"""The updates of many batches applied to rows in a few calls. Pure.

A journal of small batches would otherwise cost NumPy's price per call for every table of every batch. Updates of one row must follow each
other; those of different rows are independent. So the n-th waiting update of every row makes one round, whichever batches they are from. A
round is one call of the optimizer, with the numbers of each row's batch (`Optimizer.update_in_place`). The result has the same bits as if
batch after batch were applied.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items, as_rows
from kvemb.arrays.rounding import round_nearest, round_stochastic, to_float32

from ..model.tables import TableState
from ..model.transition import first_values
from ..optim.update_rule import Array, Factors
from .run_set import FoundRows
from .sorted_run import Ids

_BLOCK_WEIGHTS = 1 << 17  # as the engine's: the arrays of one round are still in the processor's cache for the next


@dataclass(frozen=True, eq=False)
class _BatchEffect:
    """The update of some of the rows by one batch; fields as of `Rounds.add`."""

    at: NDArray[np.intp]
    grads: Array
    version: int
    factors: Mapping[str, float]


class Rounds:
    """Gathers the updates that wait for rows of one table, and applies the n-th of every row in one call.

    Args:
        ids: uint64 [n], of all rows.
    """

    def __init__(self, table: TableState, ids: Ids, base: FoundRows) -> None:
        self.table, self.ids, self.base = table, ids, base
        self._waiting: list[_BatchEffect] = []
        self.size_bytes = 0

    def add(self, at: NDArray[np.intp], grads: Array, version: int, factors: Mapping[str, float]) -> None:
        """Add an update of rows, after those added before.

        Args:
            at: intp [n], unique places of rows.
            grads: float32 [n, dim]; kept.
        """
        self._waiting.append(_BatchEffect(at, grads, version, factors))
        self.size_bytes += at.nbytes + grads.nbytes

    def run(self) -> None:
        """Apply everything that waits."""
        if not self._waiting:
            return
        batches, self._waiting, self.size_bytes = self._waiting, [], 0
        updates = _Updates.of(batches)
        n_block = max(1, _BLOCK_WEIGHTS // self.table.definition.dim)
        for start in range(0, len(updates.rows), n_block):
            self._block(updates, slice(start, start + n_block))

    def _block(self, updates: "_Updates", block: slice) -> None:
        """All rounds of some rows."""
        base, definition, optimizer = self.base, self.table.definition, self.table.optimizer
        rows = updates.rows[block]  # intp [u], places of the block's u rows; those with the most updates first
        # ids: uint64 [u]; old: uint8 [u, record bytes], which the new records overwrite; weights: float32 [u, dim]; row_state: [u, s].
        ids, old = self.ids[rows], as_rows(as_items(base.records)[rows])
        weights, row_state = first_values(self.table, ids, old, base.exists[rows])
        for n, grads, factors, versions in updates.rounds(block):  # the first n rows have one more update: grads [n, dim], versions [n]
            optimizer.update_in_place(weights[:n], row_state[:n], grads, factors)
            if definition.dtype != "float32":
                stored = round_stochastic(weights[:n], definition.dtype, ids=ids[:n], versions=versions, seed=definition.seed)
                weights[:n] = to_float32(stored, definition.dtype)
        last = updates.last_versions(block)  # uint64 [u]
        definition.record.encode(ids, last, round_nearest(weights, definition.dtype), row_state, old)  # weights are as they are stored
        as_items(base.records)[rows], base.versions[rows], base.exists[rows] = as_items(old), last, True


@dataclass(frozen=True, eq=False)
class _Updates:
    """The updates of all batches, by row: m updates of u rows, from b batches.

    Args:
        rows: intp [u], unique places; those with the most updates first, so that a round's rows are the first ones of the round before.
        first: intp [u], where each row's updates begin in `order`.
        counts: intp [u], number of each row's updates; descending.
        order: intp [m], the updates row by row, and of each row in the order of the batches.
        grads: float32 [m, dim], in the order of the batches.
        batch: intp [m], the batch of each update, in the same order.
        versions: uint64 [b].
        same: factors that are the same in all batches.
        names: of the other factors.
        differing: float32 [b, number of names], their values.
    """

    rows: NDArray[np.intp]
    first: NDArray[np.intp]
    counts: NDArray[np.intp]
    order: NDArray[np.intp]
    grads: Array
    batch: NDArray[np.intp]
    versions: Ids
    same: Mapping[str, float]
    names: tuple[str, ...]
    differing: Array

    @classmethod
    def of(cls, batches: list[_BatchEffect]) -> "_Updates":
        """Sort the updates of batches, which are in order."""
        at = np.concatenate([one.at for one in batches])  # intp [m]: the row of each update, in the order of the batches
        order = np.argsort(at, kind="stable")
        by_row = at[order]  # [m]: the row of each update, ascending
        first = np.flatnonzero(np.diff(by_row, prepend=-1))  # [u], as are counts and most
        counts = np.diff(first, append=len(at))
        most = np.argsort(-counts, kind="stable")  # the rows in the order of `rows`: those with the most updates first
        values = {name: [one.factors[name] for one in batches] for name in batches[0].factors}
        names = tuple(name for name, numbers in values.items() if numbers.count(numbers[0]) < len(numbers))
        return cls(
            by_row[first[most]],
            first[most],
            counts[most],
            order,
            np.concatenate([one.grads for one in batches]),
            np.repeat(np.arange(len(batches)), [len(one.at) for one in batches]),
            np.array([one.version for one in batches], np.uint64),
            {name: numbers[0] for name, numbers in values.items() if name not in names},
            names,
            np.array([values[name] for name in names], np.float32).T,
        )

    def rounds(self, block: slice) -> Iterator[tuple[int, Array, Factors, Ids]]:
        """Yield, for each round of a block of rows: how many rows take part, the block's first; their grads, factors and versions."""
        first, counts = self.first[block], self.counts[block]  # [u] each, of the block's rows; the first one has the most updates
        for turn in range(int(counts[0])):
            n = len(counts) - int(np.searchsorted(counts[::-1], turn, side="right"))
            updates = self.order[first[:n] + turn]  # intp [n]: of each row its update number `turn`
            batch = self.batch[updates]  # intp [n]: the batch of each
            differing = self.differing[batch] if self.names else self.differing
            factors: dict[str, float | Array] = dict(self.same)
            factors.update({name: differing[:, i : i + 1] for i, name in enumerate(self.names)})
            yield n, np.take(self.grads, updates, axis=0), factors, self.versions[batch]

    def last_versions(self, block: slice) -> Ids:
        """Return the version that each row of a block has in the end."""
        versions: Ids = self.versions[self.batch[self.order[self.first[block] + self.counts[block] - 1]]]
        return versions
