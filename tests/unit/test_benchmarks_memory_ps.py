"""The classic parameter server that `deepfm` compares with: it trains what ours trains. Real gRPC, in this process."""

from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from benchmarks.memory_ps import MemoryPs, MemoryRows, serve
from benchmarks.memory_ps_client import MemoryPsCluster, MemoryPsTable
from kvemb import init, optim
from kvemb.errors import ParameterServerError
from kvemb.protocol.message_format import TableRows
from kvemb.schema.table_def import TableDef
from paramserver.optim import build_optimizer

TABLE = TableDef("t", 3, optim.adam(lr=0.1), init.normal(std=1.0))


@pytest.fixture
def cluster() -> Iterator[MemoryPsCluster]:
    servers: list[tuple[grpc.Server, int]] = [serve(MemoryPs()) for _ in range(2)]
    cluster = MemoryPsCluster([f"127.0.0.1:{port}" for _, port in servers], "async", [])
    try:
        yield cluster
    finally:
        cluster.close()
        for server, _ in servers:
            server.stop(None).wait()


def create(cluster: MemoryPsCluster, name: str, dim: int = 3) -> MemoryPsTable:
    options = {"initializer": TABLE.initializer, "seed": 0, "reduce": "sum", "exist_ok": True}
    return cluster.create_table(name, dim=dim, optimizer=TABLE.optimizer, **options)  # type: ignore[arg-type]


def test_rows_are_trained_as_the_update_rule_says_however_many_there_are() -> None:
    rows, rule, rng = MemoryRows(TABLE), build_optimizer(TABLE.optimizer), np.random.default_rng(0)
    ids = np.arange(5000, dtype=np.uint64)
    weights, state = TABLE.initial_rows(ids), rule.initial_state(len(ids), 3)
    for step in range(1, 7):
        some = np.sort(rng.permutation(5000)[: 900 * step])
        grads = rng.normal(size=(len(some), 3)).astype(np.float32)
        rows.push(TableRows("t", TABLE.schema, ids[some], grads))
        weights[some], state[some] = rule.update(weights[some], state[some], grads, TABLE.optimizer.defaults(), step)
    assert np.array_equal(rows.pull(ids), weights)
    assert len(rows) <= 5000


def test_rows_of_several_tables_on_several_shards_come_back_in_their_places(cluster: MemoryPsCluster) -> None:
    tables = [create(cluster, "a"), create(cluster, "b", 2)]
    ids = np.random.default_rng(1).permutation(300)
    before = cluster.pull_versions({"a": ids, "b": ids})
    grads = {table.name: np.ones((len(ids), table.dim), np.float32) for table in tables}
    cluster.push({name: (ids, grads[name]) for name in grads}, hyper={"a": {**tables[0].hyper, "lr": 0.5}}).wait_applied()
    for table, lr in zip(tables, (0.5, 0.1), strict=True):
        assert np.array_equal(before[table.name][0], table.definition.initial_rows(ids.view(np.uint64)))
        after, _ = table.pull(ids, return_versions=True)
        assert after == pytest.approx(before[table.name][0] - lr, abs=1e-4)  # Adam's first step


def test_a_failure_of_the_server_is_raised(cluster: MemoryPsCluster) -> None:
    table = MemoryPsTable(cluster, TABLE)
    cluster._tables["t"] = table  # never created there
    with pytest.raises(ParameterServerError, match="'t'"):
        table.pull(np.array([1]), return_versions=True)
