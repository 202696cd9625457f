"""A shard whose memory for indexes is small knows its rows by its row log: through batches, kills, lost nodes, saves and loads."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.local_cluster import LocalCluster

IDS = np.arange(0, 60_000, dtype=np.int64)
DIM = 4


def trained(table: kvemb.Table, model: np.ndarray, exists: np.ndarray, rng: np.random.Generator) -> None:
    """Push to some rows, erase some, in the table and in the model."""
    some = np.unique(rng.integers(0, len(IDS), 8_000))
    grads = rng.integers(-8, 8, (len(some), DIM)).astype(np.float32)
    table.push(IDS[some], grads)
    model[some] = np.where(exists[some, None], model[some], 0) - grads
    exists[some] = True
    gone = np.unique(rng.integers(0, len(IDS), 200))
    table.flush()
    table.erase(IDS[gone])
    model[gone], exists[gone] = 0, False


@pytest.mark.parametrize("kind", ["redis", pytest.param("memcached", marks=pytest.mark.full)])
def test_rows_that_do_not_fit_into_the_memory_for_indexes_are_known_by_the_row_log(
    kind: str, tmp_path: Path, require_server: Callable[[str], str]
) -> None:
    require_server("memcached" if kind == "memcached" else "redis-server")
    rng, model, exists = np.random.default_rng(5), np.zeros((len(IDS), DIM), np.float32), np.zeros(len(IDS), bool)
    with LocalCluster(kind, nodes=2, index_mb=0, cache_mb=0, journal_max_mb=1) as cluster:

        def same(table: kvemb.Table) -> None:
            np.testing.assert_array_equal(table.pull(IDS), np.where(exists[:, None], model, 0))
            assert len(table) == exists.sum()

        with kvemb.connect(cluster.url, read_only=False, trainer="t") as client:
            table = client.create_table("t", dim=DIM, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
            for _ in range(25):
                trained(table, model, exists, rng)
            same(table)
            first = (tmp_path / "first").as_uri()
            client.save(first)
            at_first, there_at_first = model.copy(), exists.copy()
            for _ in range(2):
                cluster.shards[0].kill()
                cluster.start_shard(0)
                for _ in range(6):
                    trained(table, model, exists, rng)
                same(table)
            cluster.servers[0].restart()  # empty
            same(table)
            second = (tmp_path / "second").as_uri()
            client.save(second, base=first)
            at_second, there_at_second = model.copy(), exists.copy()
            for url, rows, there in ((first, at_first, there_at_first), (second, at_second, there_at_second)):
                trained(table, model, exists, rng)
                client.load(url)
                model, exists = rows.copy(), there.copy()
                same(table)
                trained(table, model, exists, rng)
                same(table)
