"""The second ledger: optimizers with memory. Counts cannot see a torn slot, so rows and slots are compared, bit for bit, with a replay."""

from dataclasses import dataclass

import numpy as np
from jobs import PATIENCE_S

import kvemb
from kvemb.hashing import shard_of
from kvemb.net.deadline import Deadline
from kvemb.stores.base import ReadPart
from kvemb.stores.registry import open_store
from kvemb.table_def import TableDef
from kvemb.testing.faults import processes, storage
from kvemb.testing.faults.cluster import FaultyCluster
from paramserver.optim import build

N_PUSHES, N_ROWS, DIM = 40, 600, 5
OPTIMIZERS = {
    "adam": kvemb.optim.adam(lr=0.05),
    "momentum": kvemb.optim.sgd(lr=0.1, momentum=0.9),
    "adagrad": kvemb.optim.adagrad(lr=0.1),
}


@dataclass
class Replayed:
    """One table as it must be: every push applied once, in order, on every shard."""

    definition: TableDef

    def __post_init__(self) -> None:
        self.optimizer = build(self.definition.optimizer)
        self.ids = np.arange(N_ROWS, dtype=np.uint64)
        self.weights = self.definition.initializer.rows(self.ids, DIM, table=self.definition.name, seed=self.definition.seed)
        self.slots = self.optimizer.init_slots(N_ROWS, DIM)
        self.exists = np.zeros(N_ROWS, bool)
        self.steps = [0, 0]

    def push(self, ids: np.ndarray, grads: np.ndarray) -> None:
        hyper = self.definition.optimizer.defaults()
        for shard in (0, 1):
            mine = shard_of(ids.astype(np.uint64), 2) == shard
            if mine.any():
                self.steps[shard] += 1
                rows = ids[mine]
                new = self.optimizer.update(self.weights[rows], self.slots[rows], grads[mine], hyper, self.steps[shard])
                self.weights[rows], self.slots[rows] = new
                self.exists[rows] = True


def push(number: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(number)
    ids = np.sort(random.permutation(N_ROWS)[:250])
    return ids, random.standard_normal((250, DIM), dtype=np.float32)


def test_rows_and_slots_are_those_of_an_undisturbed_job_bit_for_bit(local: FaultyCluster, connected: kvemb.Cluster) -> None:
    # "mean": pushes are never merged, so that every push is a batch of its own, in order.
    tables = {name: connected.create_table(name, dim=DIM, optimizer=spec, reduce="mean") for name, spec in OPTIMIZERS.items()}
    replayed = {name: Replayed(table.definition) for name, table in tables.items()}
    acks = []
    for number in range(N_PUSHES):
        ids, grads = push(number)
        acks.append(connected.push({name: (ids, grads) for name in tables}, timeout_s=PATIENCE_S))
        for one in replayed.values():
            one.push(ids, grads)
        if number in (10, 25):
            processes.kill(local.shards[number % 2])
            local.start_shard(number % 2)
        if number in (15, 30):
            storage.flush(local.servers[number % 3])
        if number % 7 == 3:
            local.node_proxies[number % 3].reset_all()
            local.shard_proxies[number % 2].reset_all()
    for ack in acks:
        ack.wait_applied(timeout_s=PATIENCE_S)
    with open_store(connected.config.storage, role="trainer") as store:
        store.open(Deadline.after(PATIENCE_S))
        for name, one in replayed.items():
            record = one.definition.record
            keys = one.definition.keys(one.ids, pages=False)
            (read,) = store.read([ReadPart(keys, record.size_bytes, record.size_bytes)], Deadline.after(PATIENCE_S))
            got = read.in_key_order()
            np.testing.assert_array_equal(got.found, one.exists)
            record.check(got.records, one.ids, got.found)
            np.testing.assert_array_equal(record.weights(got.records)[one.exists], one.weights[one.exists], err_msg=name)
            np.testing.assert_array_equal(record.slots(got.records)[one.exists], one.slots[one.exists], err_msg=name)
