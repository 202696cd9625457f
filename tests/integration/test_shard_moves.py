"""Slots that change their shard while trainers push: every acknowledged push is applied once, by the one shard or by the other."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from moving_load import MovingLoad
from shard_moves import IDS, PATIENCE_S, HastyTrainer, ShardMoves

import kvemb
from kvemb.local_cluster import LocalCluster
from kvemb.schema.cluster_map import equal_runs
from kvemb.schema.slots import N_SLOTS


@pytest.fixture
def local(require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    require_server("redis-server")
    with LocalCluster("redis", 2, shards=3, memory_mb=64) as made:
        yield made


def test_the_slots_of_a_shard_go_to_the_others_and_come_back_while_rows_are_pushed(local: LocalCluster) -> None:
    load = MovingLoad(local)
    hasty = [HastyTrainer(local.url, "h", seed) for seed in (1, 2)]
    moves = ShardMoves(local.url)
    try:
        thirds = equal_runs(3)
        for owners in (np.where(thirds == 2, equal_runs(32) % 2, thirds), thirds, np.full(N_SLOTS, 1), thirds):
            before = load.n_steps
            serial = moves.begin(owners).serial
            now = moves.wait()
            assert (now.slot_shards == owners).all()
            assert now.serial == serial + 1
            assert load.n_steps >= before
    finally:
        moves.close()
        counts = [trainer.stop() for trainer in hasty]
        load.stop()
    with kvemb.connect(local.url, read_only=True) as reader:
        np.testing.assert_array_equal(-reader.table("h").pull(IDS, timeout_s=PATIENCE_S)[:, 0], sum(counts))
