"""A table as it must be: every push applied once, in order, on every shard; and what storage really holds, bit for bit."""

from dataclasses import dataclass

import numpy as np
from jobs import PATIENCE_S

import kvemb
from kvemb.net.deadline import Deadline
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart
from kvemb.stores.storage_kinds import open_store
from paramserver.optim import build_optimizer
from tests.owners import shard_of


@dataclass
class Replayed:
    """One table of two shards whose pushes are never merged ("mean"); rows 0 to n_rows - 1.

    Args:
        definition: of the table.
        n_rows: that pushes may touch.
    """

    definition: TableDef
    n_rows: int

    def __post_init__(self) -> None:
        self.optimizer = build_optimizer(self.definition.optimizer)
        self.ids = np.arange(self.n_rows, dtype=np.uint64)
        self.weights = self.definition.initial_rows(self.ids)
        self.state = self.optimizer.initial_state(self.n_rows, self.definition.dim)
        self.exists = np.zeros(self.n_rows, bool)
        self.steps = [0, 0]

    def push(self, ids: np.ndarray, grads: np.ndarray) -> None:
        """Apply one push."""
        hyper = self.definition.optimizer.defaults()
        for shard in (0, 1):
            mine = shard_of(ids.astype(np.uint64), 2) == shard
            if mine.any():
                self.steps[shard] += 1
                rows = ids[mine]
                new = self.optimizer.update(self.weights[rows], self.state[rows], grads[mine], hyper, self.steps[shard])
                self.weights[rows], self.state[rows] = new
                self.exists[rows] = True

    def require_stored(self, cluster: kvemb.Cluster) -> np.ndarray:
        """Storage holds exactly these rows; return their versions, uint64 [n_rows], 0 where there is none."""
        record = self.definition.record
        with open_store(cluster.config.storage, role="trainer") as store:
            store.open(Deadline.after(PATIENCE_S))
            keys = self.definition.keys(self.ids, pages=store.capabilities.pages)
            (read,) = store.rows.read([ReadPart(keys, record.size_bytes, record.size_bytes)], Deadline.after(PATIENCE_S))
        got, name = read.in_key_order(), self.definition.name
        np.testing.assert_array_equal(got.found, self.exists, err_msg=name)
        record.check(got.records, self.ids, got.found)
        np.testing.assert_array_equal(record.weights(got.records)[self.exists], self.weights[self.exists], err_msg=name)
        np.testing.assert_array_equal(record.state(got.records)[self.exists], self.state[self.exists], err_msg=name)
        return np.where(got.found, record.versions(got.records), np.uint64(0))
