"""Tables that come and go, and loads, while slots change their shard: right, or refused by name, nothing half done."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from chaos.processes import paused
from matrix import one_of
from shard_moves import IDS, PATIENCE_S, HastyTrainer, ShardMoves

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.checkpoint.checkpoint_messages import LOAD_CHECKPOINT, SAVE_CHECKPOINT, LoadRequest, SaveRequest
from kvemb.errors import CheckpointError, MoveRefusedError, ShardUnavailableError
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import equal_runs

SERVERS = {"redis": "redis-server", "memcached": "memcached"}
THIRDS = equal_runs(3)
GIVEN = np.where(THIRDS == 2, 1, THIRDS)
ONES = np.ones((len(IDS), 2), np.float32)


@pytest.fixture(params=one_of("redis", "memcached"))
def local(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    require_server(SERVERS[request.param])
    with LocalCluster(request.param, 2, shards=3, memory_mb=64) as made:
        yield made


def table_of_ones(cluster: kvemb.Cluster, name: str) -> kvemb.Table:
    table = cluster.create_table(name, dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
    table.push(IDS, ONES).wait_applied(PATIENCE_S)
    return table


def require_progress(trainer: HastyTrainer) -> None:
    """Wait until it has pushed some more."""
    deadline, before = Deadline.after(PATIENCE_S), trainer.n_pushed
    while trainer.n_pushed <= before + 20:
        assert not deadline.expired
        time.sleep(0.02)


def test_a_table_is_dropped_after_slots_have_changed_their_shard(local: LocalCluster) -> None:
    moves = ShardMoves(local.url)
    with kvemb.connect(local.url) as cluster:
        table_of_ones(cluster, "t")
        moves.begin(GIVEN)
        moves.wait()
        assert cluster.drop_table("t", timeout_s=PATIENCE_S) == len(IDS)
        again = table_of_ones(cluster, "t")
        assert np.unique(again.pull(IDS)).tolist() == [-1]
        assert int(cluster.shards.sizes().rows.sum()) == len(IDS)
    moves.close()


def test_while_slots_move_between_shards_no_table_is_dropped_and_nothing_is_loaded_or_saved(local: LocalCluster) -> None:
    moves = ShardMoves(local.url)
    with kvemb.connect(local.url) as cluster:
        table = table_of_ones(cluster, "t")
        saved = cluster.save(f"{local.folder}/saves/before")
        with paused(local.shards[2]):  # all have to say that they know of the plan
            assert moves.begin(GIVEN).plan is not None
            with pytest.raises(MoveRefusedError, match=r"between shards \(phase moving\), and nothing was changed"):
                cluster.drop_table("t", timeout_s=PATIENCE_S)
            with pytest.raises(CheckpointError, match=r"between shards \(phase moving\), and nothing was changed"):
                moves.ask_shard_0(LOAD_CHECKPOINT, LoadRequest("load", saved.url, saved.manifest.save_id, True))
            with pytest.raises(CheckpointError, match=r"between shards \(phase moving\), and nothing was changed"):
                moves.ask_shard_0(SAVE_CHECKPOINT, SaveRequest("save", saved.url, 0, False, PATIENCE_S))
        moves.wait()
        table.push(IDS, ONES).wait_applied(PATIENCE_S)
        assert np.unique(table.pull(IDS)).tolist() == [-2]
        cluster.load(saved.url)
        assert np.unique(cluster.table("t").pull(IDS)).tolist() == [-1]
        assert cluster.drop_table("t", timeout_s=PATIENCE_S) == len(IDS)
    moves.close()


@pytest.mark.full
def test_no_slots_move_between_shards_while_a_table_is_being_dropped(local: LocalCluster) -> None:
    moves = ShardMoves(local.url)
    with kvemb.connect(local.url) as cluster:
        table_of_ones(cluster, "t")
        with paused(local.shards[2]), pytest.raises(ShardUnavailableError):
            cluster.drop_table("t", timeout_s=2.0)
        with pytest.raises(MoveRefusedError, match=r"table 't' is being dropped; .*Nothing was changed"):
            moves.begin(GIVEN)
        cluster.drop_table("t", timeout_s=PATIENCE_S)
        moves.begin(GIVEN)
        moves.wait()
        assert int(cluster.shards.sizes().rows.sum()) == 0
    moves.close()


def test_tables_that_are_made_while_slots_move_between_shards_are_trained_like_any(local: LocalCluster) -> None:
    moves, tables = ShardMoves(local.url), []
    with kvemb.connect(local.url) as cluster:
        table_of_ones(cluster, "before")
        for owners in (GIVEN, THIRDS):
            moves.begin(owners)
            for _ in range(10):
                tables.append(table_of_ones(cluster, f"t{len(tables)}"))
                if moves.now().plan is None:
                    break
            moves.wait()
        for table in tables:
            table.push(IDS, ONES).wait_applied(PATIENCE_S)
            assert np.unique(table.pull(IDS)).tolist() == [-2]
    moves.close()


@pytest.mark.full
def test_a_trainer_that_slept_through_two_moves_has_what_it_pushed_before_applied_once(local: LocalCluster) -> None:
    moves = ShardMoves(local.url)
    with kvemb.connect(local.url) as sleeper, kvemb.connect(local.url) as never_pushed:
        table = table_of_ones(sleeper, "t")
        late = never_pushed.table("t")
        for owners in (GIVEN, THIRDS):
            moves.begin(owners)
            moves.wait()
        for one in (table, late):
            one.push(IDS, ONES).wait_applied(PATIENCE_S)
        assert np.unique(table.pull(IDS)).tolist() == [-3]
    moves.close()
