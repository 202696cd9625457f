"""Compact tables on real servers: their buckets are compact strings where the servers' limits allow it, and rows are right where not."""

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
import redis
from matrix import one_of

import kvemb
from kvemb.errors import InvalidInputError
from kvemb.local_cluster import LocalCluster
from kvemb.schema.table_def import TableDef
from tests.real_servers import redis_client
from tests.warm_clusters import warm

PATIENCE_S = 60.0
N = 3000
IDS = np.random.default_rng(1).integers(-(1 << 62), 1 << 62, N)
SGD, ADAM, ZEROS = kvemb.optim.sgd(lr=1.0), kvemb.optim.adam(lr=0.1), kvemb.init.zeros()


@pytest.fixture(params=one_of("redis", "redis-cluster"))
def local(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    if request.param != "valkey":
        require_server("redis-server")
    with warm(request.param, 3 if request.param == "redis-cluster" else 2, shards=2, durability="os") as running:
        yield running


def encodings(local: LocalCluster, definition: TableDef) -> set[bytes]:
    found = set()
    for server in local.servers:
        with redis_client(server) as client:
            keys = [key for key in client.scan_iter(count=10_000) if key.startswith(definition.tag + b"{")]
            found |= {client.execute_command("OBJECT ENCODING", key) for key in keys}
    return found


def ones(table: "kvemb.Table", ids: "np.ndarray[tuple[int], np.dtype[np.int64]]" = IDS) -> None:
    table.push(ids, np.full((len(ids), table.dim), -1, np.float32), timeout_s=PATIENCE_S)
    table.flush()


def test_the_buckets_of_a_compact_table_are_compact_strings_and_those_of_others_are_not(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        fast = cluster.create_table("fast", dim=16, optimizer=SGD, initializer=ZEROS, expected_rows=200)
        small = cluster.create_table("small", dim=16, optimizer=SGD, initializer=ZEROS, expected_rows=N, layout="compact")
        moments = cluster.create_table("moments", dim=16, optimizer=ADAM, initializer=ZEROS, expected_rows=N, layout="compact")
        short = cluster.create_table("short", dim=2, optimizer=SGD, initializer=ZEROS, expected_rows=N, layout="compact")
        for table in (fast, small, moments, short):
            ones(table)
        assert encodings(local, fast.definition) == {b"hashtable"}
        assert {one for table in (small, moments, short) for one in encodings(local, table.definition)} == {b"listpack"}
        for table in (fast, small, short):
            np.testing.assert_array_equal(table.pull(IDS), np.ones((N, table.dim)))
        small.erase(IDS[:1000], timeout_s=PATIENCE_S)
        np.testing.assert_array_equal(small.pull(IDS)[:, 0], np.arange(N) >= 1000)
        cluster.drop_table("small")


def test_a_compact_table_that_outgrew_what_was_expected_is_right_in_hash_tables(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        table = cluster.create_table("grown", dim=16, optimizer=SGD, initializer=ZEROS, expected_rows=N // 10, layout="compact")
        for part in np.array_split(IDS, 5):
            ones(table, part)
        assert encodings(local, table.definition) == {b"hashtable"}
        np.testing.assert_array_equal(table.pull(IDS), np.ones((N, 16)))


def test_a_node_that_lost_its_rows_and_its_limits_holds_compact_strings_again(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster:
        table = cluster.create_table("small", dim=16, optimizer=SGD, initializer=ZEROS, expected_rows=N, layout="compact")
        ones(table)
        local.servers[0].restart(member=local.store == "redis-cluster")
        np.testing.assert_array_equal(table.pull(IDS, timeout_s=PATIENCE_S), np.ones((N, 16)))
        assert encodings(local, table.definition) == {b"listpack"}


def test_limits_that_may_not_be_changed_refuse_a_compact_table_by_name(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with warm("redis", 1, shards=1, durability="os") as local, kvemb.connect(local.url) as cluster:
        server = local.servers[0]
        with closing(redis.Redis(port=server.port)) as client:
            client.execute_command("ACL", "SETUSER", "default", "-config|set")

            def create() -> "kvemb.Table":
                return cluster.create_table("small", dim=16, optimizer=SGD, initializer=ZEROS, expected_rows=N, layout="compact")

            needed = r"hash-max-listpack-value is 64, 76 is needed \(CONFIG SET hash-max-listpack-value 76\)"
            with pytest.raises(InvalidInputError, match=rf"node {server.address}: table 'small'.*{needed}"):
                create()
            client.execute_command("ACL", "SETUSER", "default", "+config|set")
            client.config_set("hash-max-listpack-entries", 128)
            client.config_set("hash-max-listpack-value", 76)
            client.execute_command("ACL", "SETUSER", "default", "-config|set")
            ones(create())


def test_on_memcached_a_layout_is_refused_before_anything_is_made(require_server: Callable[[str], str]) -> None:
    require_server("memcached")
    with warm("memcached", 1, shards=1, durability="os") as local, kvemb.connect(local.url) as cluster:
        for layout in ("fast", "compact"):
            with pytest.raises(InvalidInputError, match=f"'small': layout='{layout}'.*a key for every row"):
                cluster.create_table("small", dim=16, optimizer=SGD, expected_rows=N, layout=layout)  # type: ignore[arg-type]
        ones(cluster.create_table("small", dim=16, optimizer=SGD, initializer=ZEROS, expected_rows=N))
