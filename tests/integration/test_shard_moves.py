"""Slots that change their shard while trainers push: every acknowledged push is applied once, by the one shard or by the other."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest
from matrix import one_of
from moving_load import MovingLoad
from shard_moves import DIM, IDS, N_IDS, PATIENCE_S, HastyTrainer, ShardMoves

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.schema.cluster_map import equal_runs
from kvemb.schema.move_plan import DRAINING, FLIPPED, MOVING, SERVING
from kvemb.schema.slots import N_SLOTS
from tests.integration.encrypted_cluster import EncryptedCluster

KINDS = {"redis": "redis-server", "memcached": "memcached", "redis-cluster": "redis-server"}
NODES = {"redis": 2, "redis-cluster": 3}


@pytest.fixture(params=one_of("redis", "redis-cluster", "memcached"))
def local(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    require_server(KINDS[request.param])
    with LocalCluster(request.param, 3, shards=3, memory_mb=64) as made:
        yield made


@pytest.mark.timeout(600)
def test_the_slots_of_a_shard_go_to_the_others_and_come_back_while_rows_are_pushed(local: LocalCluster) -> None:
    with MovingLoad(local) as load:
        hasty = [HastyTrainer(local.url, "h", seed) for seed in (1, 2)]
        moves = ShardMoves(local.url)
        try:
            thirds = equal_runs(3)
            for owners in (np.where(thirds == 2, equal_runs(32) % 2, thirds), np.full(N_SLOTS, 1), thirds):
                before = load.n_steps
                serial = moves.begin(owners).serial
                now = moves.wait()
                assert (now.slot_shards == owners).all()
                assert now.serial == serial + 1
                assert load.n_steps >= before
        finally:
            moves.close()
            counts = [trainer.stop() for trainer in hasty]
    with kvemb.connect(local.url, read_only=True) as reader:
        np.testing.assert_array_equal(-reader.table("h").pull(IDS, timeout_s=PATIENCE_S)[:, 0], sum(counts))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", one_of("redis", "redis-cluster"))
def test_the_slots_of_a_shard_go_to_the_others_and_come_back_between_two_steps_of_a_sync_job(
    kind: str, require_server: Callable[[str], str]
) -> None:
    require_server("redis-server")
    with LocalCluster(kind, NODES[kind], shards=3, mode="sync", trainers=2, memory_mb=64, barrier_timeout_s=PATIENCE_S) as local:
        trainers = [HastyTrainer(local.url, "h", seed) for seed in (1, 2)]
        moves, thirds = ShardMoves(local.url), equal_runs(3)
        try:
            for owners in (np.where(thirds == 2, equal_runs(32) % 2, thirds), np.full(N_SLOTS, 1), thirds):
                moves.begin(owners)
                now = moves.wait()
                assert (now.slot_shards == owners).all()
                for trainer in trainers:
                    eventually(lambda t=trainer, n=trainer.n_pushed: t.n_pushed > n + 20)
        finally:
            moves.close()
            counts = [trainer.stop() for trainer in trainers]
        with kvemb.connect(local.url, read_only=True) as reader:
            np.testing.assert_array_equal(-reader.table("h").pull(IDS, timeout_s=PATIENCE_S)[:, 0], sum(counts))


def test_a_trainer_of_a_sync_job_starts_anew_while_a_shard_has_no_slots(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    ones = np.ones((N_IDS, DIM), np.float32)
    with LocalCluster("redis", 1, shards=2, mode="sync", trainers=2, memory_mb=64) as local, ExitStack() as stack:
        trainers = [stack.enter_context(kvemb.connect(local.url, trainer=name)) for name in ("a", "b")]
        table = trainers[0].create_table("t", dim=DIM, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        moves = stack.enter_context(closing(ShardMoves(local.url)))

        def steps(n: int) -> None:
            for ack in [trainer.table("t").push(IDS, ones) for _ in range(n) for trainer in trainers]:
                ack.wait_applied(PATIENCE_S)

        steps(2)
        for owners in (np.ones(N_SLOTS), equal_runs(2)):
            moves.begin(owners)
            moves.wait()
            steps(2)
            trainers[1] = stack.enter_context(kvemb.connect(local.url, trainer="b"))
            steps(2)
        np.testing.assert_array_equal(table.pull(IDS)[:, 0], -20.0)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", one_of("redis", "redis-cluster"))
def test_a_node_that_loses_its_rows_while_slots_change_their_shard_is_repaired(kind: str, require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster(kind, NODES[kind], shards=3, memory_mb=64) as local, MovingLoad(local) as load:
        moves, thirds = ShardMoves(local.url), equal_runs(3)
        try:
            for number, owners in enumerate((np.where(thirds == 2, 1, thirds), thirds, np.where(thirds == 2, 1, thirds))):
                moves.begin(owners)
                phases = [(MOVING, DRAINING, FLIPPED, SERVING), (DRAINING, FLIPPED, SERVING), (FLIPPED, SERVING)][number]
                moves.wait(lambda now, phases=phases: now.plan is None or now.plan.phase in phases)
                local.servers[number % NODES[kind]].restart(member=True)
                now = moves.wait()
                assert now.plan is None  # done, or given up since a node was away for seconds
                steps = load.n_steps
                eventually(lambda least=steps: load.n_steps > least + 1)
            for server in local.servers:  # the shard that has the rows now can reconstruct them
                server.restart(member=True)
                steps = load.n_steps
                eventually(lambda least=steps: load.n_steps > least + 1)
        finally:
            moves.close()


def test_shards_ask_each_other_under_tls_by_their_certificates(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with EncryptedCluster("redis", 1, shards=2, memory_mb=64) as local:
        hasty, moves = HastyTrainer(local.url, "h", 1), ShardMoves(local.url)
        try:
            moves.begin(np.full(N_SLOTS, 1))
            assert (moves.wait().slot_shards == 1).all()
            before = hasty.n_pushed
            eventually(lambda: hasty.n_pushed > before + 10)
        finally:
            moves.close()
            counts = hasty.stop()
        with kvemb.connect(local.url, read_only=True) as reader:
            np.testing.assert_array_equal(-reader.table("h").pull(IDS, timeout_s=PATIENCE_S)[:, 0], counts)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = Deadline.after(PATIENCE_S)
    while not holds():
        assert not deadline.expired
        time.sleep(0.02)
