"""What the tests of the TensorFlow bridge share: a sync job of one trainer on real storage."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow greets with pages otherwise; read when it is imported

import kvemb

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

collect_ignore = ["conftest.py", "strategies_job.py"]  # for doctests, which would not tell it from those of other folders


@pytest.fixture(scope="module")
def sync_cluster(require_server: Callable[[str], str]) -> Iterator[kvemb.Cluster]:
    """A sync job of one trainer on Redis, two shards."""
    require_server("redis-server")
    with kvemb.local(store="redis", shards=2, mode="sync", trainers=1) as url, kvemb.connect(url, trainer="tensorflow") as cluster:
        yield cluster
