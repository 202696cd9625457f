"""Tables with num_ids through the public API on every kind of storage: the same rows, bit for bit, as a table with a key for every row."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from matrix import one_of

import kvemb
from kvemb.api import Cluster
from kvemb.api.table import Table
from kvemb.config import load
from kvemb.errors import InvalidInputError, PushRejectedError, TableMismatchError
from kvemb.local_cluster import LocalCluster
from kvemb.operate.cluster_status import survey
from kvemb.stores.storage_kinds import open_store
from kvemb.testing.store_contract import within
from tests.real_servers import redis_client
from tests.warm_clusters import warm

NODES = {"memcached": 2, "redis": 1, "valkey": 2, "redis-cluster": 3}
PROGRAMS = {"memcached": "memcached", "redis": "redis-server", "redis-cluster": "redis-server"}
N = 20_000
names = (f"t{i}" for i in count())


@pytest.fixture(scope="module", params=one_of("valkey", "memcached", "redis", "redis-cluster"))
def local_cluster(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    if request.param in PROGRAMS:
        require_server(PROGRAMS[request.param])
    with warm(request.param, NODES[request.param], shards=2) as local:
        yield local


@pytest.fixture
def cluster(local_cluster: LocalCluster) -> Iterator[Cluster]:
    with kvemb.connect(local_cluster.url) as cluster:
        yield cluster


def new_table(cluster: Cluster, num_ids: int | None = N, **options: object) -> Table:
    options = {"dim": 4, "optimizer": kvemb.optim.sgd(lr=1.0), "initializer": kvemb.init.zeros()} | options
    return cluster.create_table(next(names), num_ids=num_ids, **options)  # type: ignore[arg-type]


def n_keys(cluster: Cluster) -> int:
    return sum(node.n_keys for node in cluster.status().nodes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dense_table_learns_what_any_other_table_learns(cluster: Cluster, dtype: str) -> None:
    # Pushed to together, so that both tables' rows get the same versions: stochastic rounding then draws by seed, id and version.
    tables = [new_table(cluster, n, optimizer=kvemb.optim.adam(lr=0.1), dtype=dtype, seed=4) for n in (N, None)]
    rng = np.random.default_rng(0)
    for _ in range(6):
        ids = rng.zipf(1.2, 4000) % N
        grads = rng.standard_normal((4000, 4)).astype(np.float32)
        cluster.push({table.name: (ids, grads) for table in tables})
        cluster.flush()
    ids = rng.permutation(N)[:500]
    rows = rng.standard_normal((500, 4)).astype(np.float32)
    for table in tables:
        table.assign(ids, rows)
    erased = [table.erase(np.arange(0, N, 3)) for table in tables]
    assert erased[0] == erased[1] > 100
    cluster.push({table.name: (ids, rows) for table in tables}).wait_applied()
    dense, other = (table.pull(np.arange(N), return_versions=True) for table in tables)
    np.testing.assert_array_equal(dense[1] == 0, other[1] == 0)
    np.testing.assert_array_equal(dense[0].view(np.uint32), other[0].view(np.uint32))
    assert 0 < len(tables[0]) == len(tables[1]) == (dense[1] != 0).sum() < N
    exported = [dict(zip(got[0].tolist(), got[1].tolist(), strict=True)) for got in (table.export() for table in tables)]
    assert exported[0] == exported[1]


def test_ids_outside_are_refused_by_every_verb_and_nothing_is_sent(cluster: Cluster) -> None:
    table = new_table(cluster)
    for ids, named in (([5, N], f"id {N} at position 1"), ([-1], "id -1 at position 0")):
        zeros = np.zeros((len(ids), 4), np.float32)
        for verb in (
            lambda ids=ids: table.pull(ids),
            lambda ids=ids, zeros=zeros: table.push(ids, zeros),
            lambda ids=ids, zeros=zeros: table.assign(ids, zeros),
            lambda ids=ids: table.erase(ids),
            lambda ids=ids: cluster.pull({table.name: ids}),
        ):
            with pytest.raises(InvalidInputError, match=rf"table '{table.name}': {named} is outside 0 to {N} - 1"):
                verb()
    table.flush()
    assert len(table) == 0


def test_a_shard_refuses_what_a_client_did_not(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    table = new_table(cluster)
    with monkeypatch.context() as patch:
        patch.setattr("kvemb.arrays.ids.first_outside", lambda ids, num_ids: None)
        with pytest.raises(PushRejectedError, match=rf"id {N} is outside 0 to {N} - 1"):
            table.push([N], np.ones((1, 4))).wait()
    assert len(table) == 0


def test_num_ids_is_part_of_a_tables_identity_and_every_client_knows_it(local_cluster: LocalCluster, cluster: Cluster) -> None:
    table = new_table(cluster)
    for num_ids in (None, N + 1):
        with pytest.raises(TableMismatchError, match="num_ids"):
            cluster.create_table(
                table.name, dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros(), num_ids=num_ids, exist_ok=True
            )
    table.push([3, N - 1], np.ones((2, 4)))
    table.flush()
    for read_only in (False, True):
        with kvemb.connect(local_cluster.url, read_only=read_only) as other:
            opened = other.table(table.name)
            assert opened.definition.num_ids == N
            assert opened.pull([N - 1, 4, 3])[:, 0].tolist() == [-1, 0, -1]
            with pytest.raises(InvalidInputError, match="num_ids"):
                opened.pull([N])


def test_rows_share_keys_where_storage_has_pages_and_pages_are_whole(local_cluster: LocalCluster, cluster: Cluster) -> None:
    table = new_table(cluster, optimizer=kvemb.optim.adam())
    before = n_keys(cluster)
    assert table.erase(np.arange(N)) == 0
    assert n_keys(cluster) == before  # erasing rows that do not exist makes no page
    ids = np.random.default_rng(0).permutation(N)
    for part in np.split(ids, 8):  # pages are met again and again, by both shards
        table.push(part, np.ones((len(part), 4)))
        table.flush()
    with open_store(cluster.config.storage, role="trainer") as store:
        store.open(within())
        pages = store.capabilities.pages
    layout = table.definition.pages
    assert layout is not None
    assert n_keys(cluster) - before == (-(-N // layout.rows_per_page) if pages else N)
    assert pages == (local_cluster.servers[0].kind != "memcached")
    if pages:
        keys = {bytes(key) for key in table.definition.keys(np.arange(N, dtype=np.uint64), pages=True).encode()}
        n_seen = 0
        for server in local_cluster.servers:
            with redis_client(server) as client:
                mine = [key for key in client.scan_iter(count=10_000) if key in keys]
                n_seen += len(mine)
                assert {client.strlen(key) for key in mine} == {layout.page_bytes}
                assert all(client.memory_usage(key) <= 1.15 * layout.rows_per_page * layout.record_bytes for key in mine[:20])
        assert n_seen == len(keys)


def n_pages(cluster: Cluster, table: Table, ids: np.ndarray) -> int:
    """The keys that rows have: pages, or on memcached one each."""
    return len(np.unique(table.definition.containers(ids.astype(np.uint64)))) if cluster.store.capabilities.pages else len(ids)


def test_erased_rows_give_their_pages_back_and_pages_with_a_row_stay(cluster: Cluster) -> None:
    table = new_table(cluster)
    ids, before = np.arange(N), n_keys(cluster)
    table.push(ids, np.ones((N, 4))).wait_applied()
    assert n_keys(cluster) - before == n_pages(cluster, table, ids)
    first = table.definition.pages.rows_per_page * 100 + 1  # a page is cut in two, and batches cut others
    assert table.erase(ids[:first]) == first
    ids = ids[first:]
    assert n_keys(cluster) - before == n_pages(cluster, table, ids)
    assert table.erase(ids[::2]) == len(ids[::2])
    ids = ids[1::2]
    rows = table.pull(ids)
    assert n_keys(cluster) - before == n_pages(cluster, table, ids)
    assert (rows < 0).all()
    assert (table.pull(np.arange(N), return_versions=True)[1] != 0).sum() == len(ids) == len(table)
    assert table.erase(np.arange(N)) == len(ids)
    assert n_keys(cluster) == before
    table.push(np.arange(N), np.ones((N, 4))).wait_applied()
    np.testing.assert_array_equal(table.pull(ids), rows)
    assert n_keys(cluster) - before == n_pages(cluster, table, np.arange(N))


def test_status_counts_a_dense_tables_rows_and_what_its_pages_hold_beside_them(local_cluster: LocalCluster, cluster: Cluster) -> None:
    table = new_table(cluster)
    table.push(np.arange(N), np.ones((N, 4))).wait_applied()
    table.erase(np.arange(1, N, 4))
    held = dict(survey(load(local_cluster.config_path, {})).held)[table.name]
    if not cluster.store.capabilities.pages:
        assert held == (None,) * len(held)
        return
    layout = table.definition.pages
    n_rows, n_bytes = sum(one.n_rows for one in held), n_pages(cluster, table, np.arange(N)) * layout.page_bytes
    assert abs(n_rows - len(table)) < 0.02 * N
    assert sum(one.idle_bytes for one in held) == n_bytes - n_rows * layout.record_bytes


def test_a_dropped_dense_table_leaves_nothing_in_storage(cluster: Cluster) -> None:
    before = n_keys(cluster)
    for _ in range(3):
        table = new_table(cluster)
        table.push(np.arange(N), np.ones((N, 4))).wait_applied()
        table.erase(np.arange(0, N, 2))
        cluster.drop_table(table.name)
        assert n_keys(cluster) < before + 10  # a few are the shards' notes of how far they are


def test_a_load_gives_back_the_pages_of_rows_that_it_does_not_bring(cluster: Cluster, tmp_path: Path) -> None:
    table = new_table(cluster)
    table.push(np.arange(100), np.ones((100, 4))).wait_applied()
    cluster.save(tmp_path / "saved")
    before = n_keys(cluster)
    table.push(np.arange(N), np.ones((N, 4))).wait_applied()
    cluster.load(tmp_path / "saved")
    assert n_keys(cluster) < before + 10
    rows, versions = table.pull(np.arange(N), return_versions=True)
    np.testing.assert_array_equal(versions != 0, np.arange(N) < 100)
    np.testing.assert_array_equal(rows[:, 0], np.where(np.arange(N) < 100, -1, 0))


def test_a_replayed_erase_takes_no_page_away_that_has_a_row_since(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with warm("redis", 1, shards=1) as local, kvemb.connect(local.url) as cluster, redis_client(local.servers[0]) as client:
        table = new_table(cluster)
        n = table.definition.pages.rows_per_page
        table.push(np.arange(2 * n), np.ones((2 * n, 4))).wait_applied()
        assert table.erase(np.arange(2 * n)) == 2 * n
        table.push([1], np.ones((1, 4))).wait_applied()
        kept = table.pull([1])
        before = client.info("commandstats")["cmdstat_unlink"]["calls"]
        local.shards[0].kill()
        local.start_shard(0)
        table.push([n - 1], np.ones((1, 4))).wait_applied(60)
        assert client.info("commandstats")["cmdstat_unlink"]["calls"] == before, "its page went, and came back"
        np.testing.assert_array_equal(table.pull([1]), kept)
        assert (table.pull(np.arange(2 * n), return_versions=True)[1] != 0).nonzero()[0].tolist() == [1, n - 1]


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_the_pages_of_a_flushed_node_come_back(require_server: Callable[[str], str], kind: str) -> None:
    require_server("redis-server")
    with warm(kind, 2, shards=1) as local, kvemb.connect(local.url) as cluster:
        table = new_table(cluster)
        table.push(np.arange(1000), np.ones((1000, 4)))
        table.flush()
        with redis_client(local.servers[0]) as client:
            client.flushall()
        assert (table.pull(np.arange(1000), timeout_s=60) == -1).all()  # waits until the shard has written the node's rows again
        table.push(np.arange(2000), np.ones((2000, 4)))
        table.flush()
        assert table.pull(np.arange(2000))[:, 0].tolist() == [-2] * 1000 + [-1] * 1000
