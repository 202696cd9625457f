"""What the tests of the Keras bridge share: a job of one trainer on real storage.

Keras takes one backend for a process: KERAS_BACKEND says which, `make frameworks` runs the folder once for each.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvemb

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
collect_ignore = ["conftest.py"]  # for doctests, which would not tell it from those of other folders
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2] / "examples")]
with warnings.catch_warnings():  # of what they say about themselves while they are imported
    warnings.simplefilter("ignore")
    try:
        import keras
    except ImportError:
        keras = None
        collect_ignore.append("keras_models.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """And while they run."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(480))  # a process's first step imports and compiles, on a busy machine for minutes


@pytest.fixture(scope="session", params=["redis", "memcached"])
def in_step(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[kvemb.Cluster]:
    """A sync job of one trainer, two shards: it learns the same as Keras."""
    require_server({"redis": "redis-server", "memcached": "memcached"}[request.param])
    local = kvemb.local(store=request.param, shards=2, mode="sync", trainers=1, durability="os")
    with local as url, kvemb.connect(url, trainer="keras", timeout_s=60) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster(require_server: Callable[[str], str]) -> Iterator[kvemb.Cluster]:
    """The same on Redis alone, where the kind of storage does not matter."""
    require_server("redis-server")
    with (
        kvemb.local(store="redis", mode="sync", trainers=1, durability="os") as url,
        kvemb.connect(url, trainer="keras", timeout_s=60) as cluster,
    ):
        yield cluster


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of this test's tables."""
    return "".join(c if c.isalnum() else "." for c in request.node.name)[-40:]
