"""What the tests of faults share: clusters behind proxies. Every wait has a deadline; none relies on a time being short."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
from chaos.cluster import FaultyCluster
from chaos.run import LedgerRun
from matrix import one_of
from training import LAUNCHER, Training

import kvemb

KINDS = (*one_of("memcached", "redis"), pytest.param("redis-cluster", marks=pytest.mark.long))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> str:
    """Each storage kind, where its server is installed."""
    name = str(request.param)
    require_server("memcached" if name == "memcached" else "redis-server")
    return name


@pytest.fixture(scope="session")
def shared_clusters() -> Iterator[Callable[[str], FaultyCluster]]:
    """By kind, started when first asked for: three nodes and two shards, a proxy before each; see `local`."""
    with ExitStack() as stack:
        yield cache(lambda kind: stack.enter_context(FaultyCluster(kind, 3, shards=2, storage={"timeout_s": 1})))


@pytest.fixture
def local(kind: str, shared_clusters: Callable[[str], FaultyCluster]) -> Iterator[FaultyCluster]:
    """The session's cluster of that kind, healed after each test. For faults that leave no rows lost."""
    cluster = shared_clusters(kind)
    yield cluster
    cluster.heal()


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


@pytest.fixture(scope="session")
def shared_trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Training]]:
    """By kind, started when first asked for: two trainers, two shards, three nodes; see `training`."""
    with ExitStack() as stack:

        def start(kind: str) -> Training:
            points = tmp_path_factory.mktemp("points")
            program = [sys.executable, LAUNCHER, str(points)]
            cluster = stack.enter_context(FaultyCluster(kind, 3, shards=2, storage={"timeout_s": 2}, shard_program=program))
            return Training(stack.enter_context(LedgerRun(cluster, n_trainers=2, seed=1, grace_s=25)), points)

        yield cache(start)


@pytest.fixture
def training(kind: str, shared_trainings: Callable[[str], Training]) -> Iterator[Training]:
    """The session's of that kind, every trainer at work until the test ends."""
    shared = shared_trainings(kind)
    for trainer, process in enumerate(shared.run.trainers):
        if process.poll() is not None:
            shared.run.start_trainer(trainer)
    shared.goes_on()
    yield shared
    shared.run.stop()
