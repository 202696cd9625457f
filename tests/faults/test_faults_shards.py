"""Shards that die at any point, wake up as zombies, roll, or meet another configuration: the ledger is kept, or the start is refused."""

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
import yaml
from chaos import processes
from chaos.cluster import FaultyCluster
from chaos.run import LedgerRun
from jobs import PATIENCE_S, add, counting_table, eventually, ids_of_shard, raw_part, require
from shard_launcher import POINTS
from training import Training

import kvemb
from kvemb.local_cluster.processes import LocalProcessError
from kvemb.net.deadline import Deadline
from tests.raw_shard import RawShard, RawStream

IDS = np.arange(100)


@pytest.mark.full  # test_shard_crash.py kills shards under load
def test_a_shard_killed_at_any_point_goes_on_where_its_journal_ends(training: Training) -> None:
    for number, point in enumerate(POINTS):
        shard = number % 2
        (training.points / f"{point} {shard}").touch()
        process = training.cluster.shards[shard]
        eventually(lambda: process.poll() is not None, f"shard {shard} never came to the point {point!r}")  # noqa: B023
        assert process.poll() == -signal.SIGKILL, point
        training.cluster.start_shard(shard)
        training.goes_on()
    training.is_kept()


def test_a_shard_that_wakes_up_after_another_took_over_changes_nothing(kind: str) -> None:
    with FaultyCluster(kind, 3, shards=2, storage={"timeout_s": 2}) as cluster, LedgerRun(cluster, n_trainers=2) as run:
        run.wait_for_acks(10, Deadline.after(PATIENCE_S))
        zombie = cluster.shards[0]
        processes.pause(zombie)  # in the middle of whatever it was doing
        cluster.move_shard(0)
        cluster.start_shard(0, "--take-over")
        cluster.shard_proxies[0].reset_all()
        run.wait_for_acks(5, Deadline.after(PATIENCE_S))
        processes.resume(zombie)
        run.wait_for_acks(20, Deadline.after(PATIENCE_S))
        eventually(lambda: zombie.poll() is not None, "the zombie does not end")
        assert zombie.poll() == 5
        verdict = run.finish()
        assert verdict.kept, f"{verdict}\n{run.last_words()}"


@pytest.mark.full
def test_a_shard_without_pushes_that_looked_at_its_nodes_for_long_still_learns_of_a_take_over(require_server: Callable[[str], str]) -> None:
    require_server("memcached")
    with FaultyCluster("memcached", 3, shards=1, storage={"timeout_s": 5}) as cluster:
        with processes.paused(cluster.servers[0].process):
            time.sleep(2.5)  # a look begins every second; this one takes more than a second
        time.sleep(0.5)
        zombie = cluster.shards[0]
        processes.pause(zombie)
        cluster.move_shard(0)
        cluster.start_shard(0, "--take-over")
        processes.resume(zombie)
        eventually(lambda: zombie.poll() is not None, "the zombie does not end")
        assert zombie.poll() == 5


@pytest.mark.full
def test_all_shards_may_be_restarted_in_turn_under_load(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with FaultyCluster("redis", 3, shards=2, storage={"timeout_s": 1}) as cluster, LedgerRun(cluster, n_trainers=2) as run:
        run.wait_for_acks(10, Deadline.after(PATIENCE_S))
        for shard in (0, 1):
            assert processes.terminate(cluster.shards[shard], PATIENCE_S) == 0, cluster.shards[shard].log_tail()
            cluster.start_shard(shard)
            run.wait_for_acks(5, Deadline.after(PATIENCE_S))
        verdict = run.finish()
        assert verdict.kept, f"{verdict}\n{run.last_words()}"


@pytest.mark.full
def test_a_shard_or_trainer_with_another_configuration_is_refused(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with FaultyCluster("redis", 2, shards=1, storage={"timeout_s": 1}) as cluster, kvemb.connect(cluster.url) as connected:
        table = counting_table(connected, "t")
        add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
        right = cluster.config_path.read_text(encoding="utf-8")
        tree = yaml.safe_load(right)
        tree["cluster"] = "another"
        cluster.config_path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        with pytest.raises(kvemb.errors.KvembError, match="cluster"):
            kvemb.connect(cluster.url, timeout_s=5)
        assert processes.terminate(cluster.shards[0], PATIENCE_S) == 0
        with pytest.raises(LocalProcessError, match="cluster"):
            cluster.start_shard(0, "--start-timeout", "3")
        cluster.config_path.write_text(right, encoding="utf-8")
        cluster.start_shard(0)
        add(table, IDS).wait_applied(timeout_s=PATIENCE_S)
        require(table, IDS, 2)


def test_a_sync_step_of_a_trainer_that_died_in_the_middle_is_not_applied_by_half(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    options = {"barrier_timeout_s": 3}
    with (
        FaultyCluster("redis", 2, shards=2, mode="sync", trainers=2, storage={"timeout_s": 1}, servers=options) as cluster,
        ExitStack() as stack,
    ):
        a = stack.enter_context(kvemb.connect(cluster.url, trainer="a", timeout_s=PATIENCE_S))
        table = counting_table(a, "t")
        shards = [stack.enter_context(RawShard(proxy.address)) for proxy in cluster.shard_proxies]
        mine = [ids_of_shard(shard, 2, 50) for shard in (0, 1)]
        incarnation = shards[0].hello("b").incarnation
        shards[1].hello("b", incarnation)
        streams = [stack.enter_context(RawStream(shard)) for shard in shards]
        for shard in (0, 1):
            streams[shard].send(raw_part(table.definition, mine[shard], "b", incarnation, 1))
        everything = np.concatenate(mine)
        add(table, everything).wait_applied(timeout_s=PATIENCE_S)
        require(table, everything, 2)
        streams[0].send(raw_part(table.definition, mine[0], "b", incarnation, 2))
        for stream in streams:  # b is gone before its second step reached shard 1
            stream.end()
        pending = add(table, everything)
        with pytest.raises(kvemb.errors.BarrierError, match=r"\bb\b"):
            pending.wait_applied(timeout_s=PATIENCE_S)
        require(table, mine[1], 2)  # nothing of a's part either
        require(table, mine[0], 4)  # a step is one promise per shard
        a.close()
