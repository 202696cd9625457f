"""What the tests of the TensorFlow bridge share: a sync job of one trainer on real storage."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow greets with pages otherwise; read when it is imported

import kvemb

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

collect_ignore = [
    "conftest.py",
    "multi_worker_job.py",
    "strategies_job.py",
]  # for doctests, which would not tell it from those of other folders


@pytest.fixture(scope="module")
def sync_cluster(require_server: Callable[[str], str]) -> Iterator[kvemb.Cluster]:
    """A sync job of one trainer on Redis, two shards."""
    require_server("redis-server")
    local = kvemb.local(store="redis", shards=2, mode="sync", trainers=1, durability="os")
    with local as url, kvemb.connect(url, trainer="tensorflow", timeout_s=60) as cluster:
        yield cluster


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of this test's tables."""
    return "".join(c if c.isalnum() else "." for c in request.node.name)[-40:]
