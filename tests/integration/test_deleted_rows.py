"""Rows that another program deletes in storage, and that no push touches: found and restored."""

import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from matrix import one_of

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.client import missing_rows
from kvemb.config import load
from kvemb.errors import RowsRestoredWarning
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.stores.row_io import WritePart
from kvemb.stores.storage_kinds import open_store
from paramserver.lifecycle.start import start
from paramserver.repair import scrub
from tests.warm_clusters import warm

PATIENCE_S = 60.0
IDS = np.arange(3000)
GONE = IDS[::50]
PROGRAMS = {"redis": "redis-server", "memcached": "memcached", "redis-cluster": "redis-server"}
KINDS = [
    *one_of(("redis", 5000), ("redis", None), ("valkey", None), ("valkey", 5000)),
    ("memcached", None),
    pytest.param(("redis-cluster", None), marks=pytest.mark.long),
    pytest.param(("redis-cluster", 5000), marks=pytest.mark.long),
]


@pytest.fixture(params=KINDS, ids=lambda case: f"{case[0]}{' in pages' if case[1] else ''}" if isinstance(case, tuple) else None)
def trained(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[tuple[LocalCluster, "kvemb.Table"]]:
    kind, num_ids = request.param
    if kind in PROGRAMS:
        require_server(PROGRAMS[kind])
    n_nodes = 3 if kind == "redis-cluster" else 2
    with warm(kind, n_nodes, shards=2, durability="os", cache_mb=0) as local, kvemb.connect(local.url) as cluster:
        optimizer, first = kvemb.optim.adam(lr=0.1), kvemb.init.normal()
        table = cluster.create_table("t", dim=4, optimizer=optimizer, initializer=first, num_ids=num_ids)
        table.push(IDS, np.random.default_rng(1).normal(size=(3000, 4)).astype(np.float32), timeout_s=PATIENCE_S)
        table.flush()
        yield local, table


def delete(local: LocalCluster, table: "kvemb.Table") -> None:
    """Take rows away as a stranger would, whatever they lie in."""
    with open_store(load(local.config_path, {}).storage, role="trainer") as store:
        store.open(Deadline.after(PATIENCE_S))
        keys = table.definition.keys(GONE.astype(np.uint64), pages=store.capabilities.pages)
        store.rows.erase([WritePart(keys, np.empty((0, 0), np.uint8))], Deadline.after(PATIENCE_S))


def until(ready: Callable[[], bool]) -> None:
    deadline = Deadline.after(PATIENCE_S)
    while not ready():
        assert not deadline.expired
        time.sleep(0.05)


def test_a_pull_that_meets_deleted_rows_has_them_restored_and_says_so(trained: tuple[LocalCluster, "kvemb.Table"]) -> None:
    local, table = trained
    before = table.pull(IDS)
    delete(local, table)
    assert (table.pull(IDS) != before).any(axis=1).sum() == len(GONE)  # the initializer's rows, for now
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        until(lambda: bool((table.pull(IDS) == before).all()))
        until(lambda: bool(told) or bool((table.pull(IDS) != before).any()))
    assert {warning.category for warning in told} == {RowsRestoredWarning}
    assert "table 't'" in str(told[0].message)
    log = "".join(shard.log.read_text() for shard in local.shards)
    assert "rows were missing, old or overwritten in storage" in log
    np.testing.assert_array_equal(table.pull(np.arange(3000, 3100)), table.pull(np.arange(3000, 3100)))  # new ids: no news


def test_deleted_rows_that_nobody_asks_for_are_found_and_restored(
    trained: tuple[LocalCluster, "kvemb.Table"], monkeypatch: pytest.MonkeyPatch
) -> None:
    local, table = trained
    before = table.pull(IDS)
    monkeypatch.setattr(scrub, "_ROUND_S", 0.2)
    monkeypatch.setattr(scrub, "_SLICE_ROWS", 400)
    monkeypatch.setattr(scrub, "_SHARE_OF_TIME", 1)
    monkeypatch.setattr(missing_rows, "PAUSE_S", 1e9)
    config = load(local.config_path, {})
    for process in local.shards:
        process.stop(PATIENCE_S)
    shards = []
    try:
        for number in range(2):
            shards.append(start(config, number, listen=config.servers.shards[number], start_timeout_s=PATIENCE_S, wait=time.sleep))
        delete(local, table)
        with kvemb.connect(local.url, read_only=True) as reader:
            until(lambda: bool((reader.table("t").pull(IDS) == before).all()))
        with kvemb.connect(local.url) as cluster:
            until(lambda: all(s.reply is not None and "last full round" in s.reply.compared for s in cluster.status().shards))
            compared = [s.reply.compared for s in cluster.status().shards if s.reply is not None]
        assert sum(int(text.split("; ")[1].split()[0]) for text in compared) == len(GONE)
    finally:
        for shard in shards:
            shard.stop(PATIENCE_S)
