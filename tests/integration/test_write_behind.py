"""Write-behind with real processes: whatever dies, every push that was accepted is in storage in the end, exactly once."""

import threading
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from matrix import one_of

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.local_cluster import LocalCluster
from tests.integration.counting_trainers import KINDS, N_IDS, PATIENCE_S, Trainer, wait_for


@pytest.mark.parametrize("kind", one_of("memcached", "redis"))
def test_nothing_is_lost_while_shards_with_dirty_rows_are_killed_under_load(kind: str, require_server: Callable[[str], str]) -> None:
    require_server(KINDS[kind])
    with LocalCluster(kind, nodes=2, shards=2, write_behind_batches=20, write_behind_ms=60_000, journal_max_mb=1) as local:
        with kvemb.connect(local.url) as cluster:
            cluster.create_table("ledger", dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        stop = threading.Event()
        trainers = [Trainer(local.url, number, stop) for number in range(2)]
        for trainer in trainers:
            trainer.start()
        n_before = 0
        for victim in (0, 1, 0):
            wait_for(lambda n=n_before: all(t.n_pushes > n + 40 or t.error for t in trainers))  # type: ignore[misc]
            local.shards[victim].kill()
            local.start_shard(victim)
            n_before = max(trainer.n_pushes for trainer in trainers)
        wait_for(lambda: all(t.n_pushes > n_before + 40 or t.error for t in trainers))
        stop.set()
        for trainer in trainers:
            trainer.join(PATIENCE_S)
        assert [trainer.error for trainer in trainers] == [None, None]
        expected = sum(trainer.counts for trainer in trainers)
        with kvemb.connect(local.url) as cluster:
            cluster.flush()
            np.testing.assert_array_equal(cluster.table("ledger").pull(np.arange(N_IDS)), expected)


def test_applied_rows_are_dirty_until_a_flush_or_the_end(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    ids, grads = np.arange(N_IDS), -np.ones((N_IDS, 4), np.float32)
    with LocalCluster("redis", write_behind_batches=1000, write_behind_ms=60_000) as local, kvemb.connect(local.url) as cluster:
        table = cluster.create_table("ledger", dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        pushed = count(1)

        def push() -> float:
            table.push(ids, grads, timeout_s=PATIENCE_S).wait_applied(PATIENCE_S)
            return float(next(pushed))

        push()
        assert cluster.status().shards[0].reply.dirty_rows == 0  # type: ignore[union-attr]
        push()
        assert cluster.status().shards[0].reply.dirty_rows == N_IDS  # type: ignore[union-attr]
        np.testing.assert_array_equal(table.pull(ids), np.full((N_IDS, 4), 1.0))
        cluster.flush()
        np.testing.assert_array_equal(table.pull(ids), np.full((N_IDS, 4), 2.0))
        push()
        assert local.shards[0].stop(PATIENCE_S) == 0
        np.testing.assert_array_equal(table.pull(ids), np.full((N_IDS, 4), 3.0))
