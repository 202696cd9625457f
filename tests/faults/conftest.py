"""What the tests of faults share: clusters behind proxies. Every wait has a deadline; none relies on a time being short."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from chaos.cluster import FaultyCluster
from chaos.run import LedgerRun
from jobs import PATIENCE_S

import kvemb
from kvemb.net.deadline import Deadline

LAUNCHER = str(Path(__file__).with_name("shard_launcher.py"))
KINDS = ("memcached", "redis", pytest.param("redis-cluster", marks=pytest.mark.long))


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> str:
    """Each storage kind, where its server is installed."""
    name = str(request.param)
    require_server("memcached" if name == "memcached" else "redis-server")
    return name


@pytest.fixture(scope="session")
def shared_cluster(kind: str) -> Iterator[FaultyCluster]:
    """Three nodes and two shards of that kind, a proxy before each; see `local`."""
    with FaultyCluster(kind, 3, shards=2, storage={"timeout_s": 1}) as cluster:
        yield cluster


@pytest.fixture
def local(shared_cluster: FaultyCluster) -> Iterator[FaultyCluster]:
    """The session's cluster, healed after each test. For faults that leave no rows lost."""
    yield shared_cluster
    shared_cluster.heal()


@pytest.fixture
def connected(local: FaultyCluster) -> Iterator[kvemb.Cluster]:
    """A trainer of the session's cluster."""
    cluster = kvemb.connect(local.url, timeout_s=20)
    try:
        yield cluster
        local.heal()
    finally:
        cluster.close()


@pytest.fixture(scope="session")
def redis_cluster_of_one(require_server: Callable[[str], str]) -> Iterator[FaultyCluster]:
    """One shard on one Redis, for what does not depend on the storage kind."""
    require_server("redis-server")
    with FaultyCluster("redis", 1, shards=1, storage={"timeout_s": 1}) as cluster:
        yield cluster


@pytest.fixture
def single(redis_cluster_of_one: FaultyCluster) -> Iterator[FaultyCluster]:
    """The same, healed after each test."""
    yield redis_cluster_of_one
    redis_cluster_of_one.heal()


@dataclass(frozen=True)
class Training:
    """Trainers of the ledger at work.

    Args:
        run: theirs.
        points: folder in which a file of the name "<point> <shard>" ends that shard at that point; see shard_launcher.
    """

    run: LedgerRun
    points: Path

    @property
    def cluster(self) -> FaultyCluster:
        """Theirs."""
        return self.run.cluster

    def goes_on(self, n_pushes: int = 10) -> None:
        """Every trainer has so many more pushes acknowledged."""
        self.run.wait_for_acks(n_pushes, Deadline.after(2 * PATIENCE_S))

    def is_kept(self) -> None:
        """Stop, verify every row and every push so far."""
        verdict = self.run.finish()
        assert verdict.kept, f"{verdict}\n{self.run.last_words()}"
        assert verdict.pushes_acked >= 20


@pytest.fixture(scope="session")
def shared_training(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """Two trainers, two shards, three nodes of that kind; see `training`."""
    points = tmp_path_factory.mktemp("points")
    program = [sys.executable, LAUNCHER, str(points)]
    with ExitStack() as stack:
        cluster = stack.enter_context(FaultyCluster(kind, 3, shards=2, storage={"timeout_s": 2}, shard_program=program))
        yield Training(stack.enter_context(LedgerRun(cluster, n_trainers=2, seed=1, grace_s=25)), points)


@pytest.fixture
def training(shared_training: Training) -> Training:
    """The session's, every trainer at work."""
    run = shared_training.run
    for trainer, process in enumerate(run.trainers):
        if process.poll() is not None:
            run.start_trainer(trainer)
    shared_training.goes_on()
    return shared_training
