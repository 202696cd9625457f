"""The cluster that the tests of a module share, where the module makes none of its own."""

from collections.abc import Callable, Iterator

import pytest
from matrix import one_of

import kvemb
from kvemb.api import Cluster
from kvemb.local_cluster import LocalCluster
from tests.integration.table_clusters import start


@pytest.fixture(scope="module", params=one_of("valkey", "memcached"))
def local(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    with start(request.param, require_server) as running:
        yield running


@pytest.fixture
def cluster(local: LocalCluster) -> Iterator[Cluster]:
    with kvemb.connect(local.url) as cluster:
        yield cluster
