"""The policies of a table on real servers: kept with it, heard of by every shard, changed at one step of a sync job."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import kvemb
from kvemb import admit, evict
from kvemb.errors import InvalidInputError, UnknownTableError
from kvemb.local_cluster import LocalCluster
from kvemb.schema.policies import Policies
from tests.integration.table_clusters import new_table

IDS = np.arange(200)


@pytest.fixture(scope="module")
def local(require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    with LocalCluster("valkey", 1, shards=2) as running:
        yield running


def test_policies_are_the_tables_own_and_every_client_sees_them(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster, kvemb.connect(local.url) as other:
        table, plain = new_table(cluster, admission=admit.after(3)), new_table(cluster)
        assert other.table(table.name).policies() == Policies(admit.after(3), evict.never())
        assert other.table(plain.name).policies() == Policies()
        assert other.table(table.name).definition == table.definition
        other.table(table.name).set_policies(eviction=evict.keep(10) | evict.older_than(days=1))
        assert table.policies() == Policies(admit.after(3), evict.keep(10) | evict.older_than(days=1))
        again = cluster.create_table(table.name, dim=4, optimizer=kvemb.optim.sgd(1.0), initializer=kvemb.init.zeros(), exist_ok=True)
        assert again.policies() == table.policies()
        cluster.create_table(
            table.name, dim=4, optimizer=kvemb.optim.sgd(1.0), initializer=kvemb.init.zeros(), exist_ok=True, admission=admit.any()
        )
        assert table.policies().admission == admit.any()
        assert table.policies().eviction == evict.keep(10) | evict.older_than(days=1)


def test_wrong_policies_are_refused_before_anything_is_created(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        n_tables = len(cluster.tables())
        with pytest.raises(InvalidInputError, match=r"kvemb\.admit"):
            new_table(cluster, admission=evict.keep(3))
        assert len(cluster.tables()) == n_tables
        table = new_table(cluster)
        cluster.drop_table(table.name)
        with pytest.raises(UnknownTableError):
            table.set_policies(admission=admit.after(2))


def test_policies_outlive_the_shards_and_go_with_their_table(require_server: Callable[[str], str]) -> None:
    with LocalCluster("valkey", 1, shards=2) as local, kvemb.connect(local.url) as cluster:
        table = new_table(cluster, admission=admit.after(3))
        table.set_policies(eviction=evict.keep(5))
        for shard in (0, 1):
            local.shards[shard].kill()
            local.start_shard(shard)
        assert table.policies() == Policies(admit.after(3), evict.keep(5))
        cluster.drop_table(table.name)
        again = cluster.create_table(table.name, dim=4, optimizer=kvemb.optim.sgd(1.0), initializer=kvemb.init.zeros())
        assert again.policies() == Policies()
