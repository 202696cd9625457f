"""The second ledger: optimizers with memory. Counts cannot see a torn state, so rows and state are compared, bit for bit, with a replay."""

import numpy as np
import pytest
from chaos import processes, storage
from chaos.cluster import FaultyCluster
from jobs import PATIENCE_S
from replayed import Replayed

import kvemb

pytestmark = pytest.mark.full  # faults at further points of a way; tests/models searches the steps

N_PUSHES, N_ROWS, DIM = 40, 600, 5
OPTIMIZERS = {
    "adam": kvemb.optim.adam(lr=0.05),
    "momentum": kvemb.optim.sgd(lr=0.1, momentum=0.9),
    "adagrad": kvemb.optim.adagrad(lr=0.1),
}


def push(number: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(number)
    ids = np.sort(random.permutation(N_ROWS)[:250])
    return ids, random.standard_normal((250, DIM), dtype=np.float32)


def test_rows_and_state_are_those_of_an_undisturbed_job_bit_for_bit(local: FaultyCluster, connected: kvemb.Cluster) -> None:
    # "mean": pushes are never merged, so that every push is a batch of its own, in order.
    tables = {name: connected.create_table(name, dim=DIM, optimizer=spec, reduce="mean") for name, spec in OPTIMIZERS.items()}
    replayed = {name: Replayed(table.definition, N_ROWS) for name, table in tables.items()}
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
    for one in replayed.values():
        one.require_stored(connected)
