"""How far the shards have come: up to which batch storage has everything."""

import numpy as np
import pytest

import kvemb
from kvemb.api import Cluster
from kvemb.errors import ReadOnlyError, ShardUnavailableError
from tests.owners import shard_of
from tests.warm_clusters import warm

IDS = np.arange(100)
PATIENCE_S = 60.0


def table_of(cluster: Cluster) -> kvemb.Table:
    return cluster.create_table("user", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())


def push(table: kvemb.Table, ids: np.ndarray) -> None:
    table.push(ids, np.ones((len(ids), 2), np.float32)).wait_applied(PATIENCE_S)


def test_every_batch_up_to_k_is_seen_by_pulls() -> None:
    first = IDS[shard_of(IDS.astype(np.uint64), 2) == 0]
    with warm("valkey", shards=2) as local, kvemb.connect(local.url) as cluster:
        table = table_of(cluster)
        assert cluster.progress() == [(1, 0), (1, 0)]
        push(table, IDS)
        push(table, first)
        assert cluster.progress() == [(1, 2), (1, 1)]
        _, versions = table.pull(first, return_versions=True)
        assert set(versions.tolist()) == {1 << 48 | 2}
        local.shards[1].stop(PATIENCE_S)
        with pytest.raises(ShardUnavailableError, match="shard 1"):
            cluster.progress(timeout_s=0.5)
        local.start_shard(1)
        assert cluster.progress() == [(1, 2), (2, 1)]  # started again: the next batch has the new epoch
        push(table, IDS)
        assert cluster.progress() == [(1, 3), (2, 2)]
        with kvemb.connect(local.url, read_only=True) as reader, pytest.raises(ReadOnlyError):
            reader.progress()
