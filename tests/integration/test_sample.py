"""Rows drawn at random: which come, how many, and what they are."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import kvemb
from kvemb.api import Cluster
from kvemb.errors import InvalidInputError, UnknownTableError
from kvemb.local_cluster import LocalCluster

N = 3000


@pytest.fixture(scope="module")
def cluster(require_server: Callable[[str], str]) -> Iterator[Cluster]:
    with LocalCluster("redis", 1, shards=2) as running, kvemb.connect(running.url) as connected:
        yield connected


def test_a_sample_has_rows_of_the_table_each_once_from_all_shards(cluster: Cluster) -> None:
    table = cluster.create_table("many", dim=2, optimizer=kvemb.optim.sgd(lr=1.0))
    ids = -np.arange(2, N + 2)
    table.assign(ids, np.stack([ids, -ids], axis=1).astype(np.float32))
    drawn, rows = cluster.sample("many", 500)
    assert len(np.unique(drawn)) == len(drawn) == 500
    assert rows.tolist() == [[own, -own] for own in drawn.view("i8").tolist()]
    shards = cluster.store.nodes.cluster_map.shards_of(table.definition.placement.slots(drawn))
    assert 150 < np.count_nonzero(shards == 0) < 350
    assert set(drawn.tolist()) != set(cluster.sample("many", 500)[0].tolist())


def test_a_table_with_fewer_rows_gives_all_of_them(cluster: Cluster) -> None:
    table = cluster.create_table("few", dim=2, optimizer=kvemb.optim.sgd(lr=1.0))
    assert [len(one) for one in cluster.sample("few", 10)] == [0, 0]
    table.assign([1, 2, 3], np.ones((3, 2)))
    table.erase([2])
    assert sorted(cluster.sample("few", 10)[0].tolist()) == [1, 3]


def test_what_cannot_be_drawn_is_refused(cluster: Cluster) -> None:
    with pytest.raises(InvalidInputError, match="give 1 to 262144"):
        cluster.sample("few", 0)
    with pytest.raises(UnknownTableError):
        cluster.sample("nowhere", 1)
