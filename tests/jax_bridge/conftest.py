"""What the tests of the JAX bridge share: a job of one trainer on real storage, and the same model over a table of JAX's own."""

from collections.abc import Callable, Iterator

import pytest

import kvemb

collect_ignore = ["conftest.py", "processes_job.py", "sharded_job.py"]  # for doctests, which would not tell it from those of other folders


@pytest.fixture(scope="module")
def sync_cluster(require_server: Callable[[str], str]) -> Iterator[kvemb.Cluster]:
    """A sync job of one trainer on Redis, two shards."""
    require_server("redis-server")
    with kvemb.local(store="redis", shards=2, mode="sync", trainers=1) as url, kvemb.connect(url, trainer="jax") as cluster:
        yield cluster
