"""Batches and pulls that take storage far longer than `storage.timeout_s`: they are done piece by piece, and hold up nothing for ever."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from chaos.cluster import FaultyCluster
from chaos.proxy import DOWN, UP, Flow
from jobs import PATIENCE_S
from matrix import one_of

import kvemb
import kvemb.errors
import kvemb.init
import kvemb.optim
from kvemb.local_cluster import LocalCluster
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import TableRows
from kvemb.protocol.messages import ASSIGN_ROWS, MAX_REQUEST_BYTES, RowsRequest

pytestmark = pytest.mark.full  # faults at further points of a way; tests/models searches the steps

N_ROWS, DIM = 24_000, 4
SLOW = Flow(bytes_per_s=512 << 10)  # to read the rows of one batch takes several seconds, the timeout is one
LONG_S = 4 * PATIENCE_S
SERVERS = {"redis": "redis-server", "memcached": "memcached"}


@pytest.fixture(scope="module", params=one_of(*SERVERS))
def slow(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[FaultyCluster]:
    """One node, which gets and sends little in a second, and one shard."""
    require_server(SERVERS[request.param])
    with FaultyCluster(request.param, 1, shards=1, storage={"timeout_s": 1}, memory_mb=512) as cluster:
        yield cluster


@pytest.fixture
def table(slow: FaultyCluster, request: pytest.FixtureRequest) -> Iterator[kvemb.Table]:
    """A new table of the slow cluster whose rows begin at 0; with SGD at lr 1 they say what was applied to them."""
    with kvemb.connect(slow.url, timeout_s=20) as cluster:
        name = request.node.originalname[:60]
        made = cluster.create_table(name, dim=DIM, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        slow.node_proxies[0].set(SLOW, UP)
        yield made
        slow.heal()


IDS = np.arange(N_ROWS) * 7919
ONES = np.full((N_ROWS, DIM), -1, np.float32)


def check(slow: FaultyCluster, table: kvemb.Table, ids: np.ndarray, value: float) -> None:
    slow.heal()
    np.testing.assert_array_equal(table.pull(ids, timeout_s=LONG_S), np.full((len(ids), DIM), value, np.float32))


def test_a_push_that_takes_longer_than_the_timeout_is_applied_and_so_is_what_is_behind_it(slow: FaultyCluster, table: kvemb.Table) -> None:
    large = table.push(IDS, ONES)
    small = table.push(IDS[:10], ONES[:10])
    large.wait_applied(LONG_S)
    small.wait_applied(LONG_S)
    check(slow, table, IDS[10:], 1)
    check(slow, table, IDS[:10], 2)


def test_a_shard_killed_in_the_middle_of_it_goes_on_where_it_stood(slow: FaultyCluster, table: kvemb.Table) -> None:
    ack = table.push(IDS, ONES)
    ack.wait(LONG_S)
    slow.shards[0].kill()
    slow.start_shard(0)
    ack.wait_applied(LONG_S)
    table.push(IDS[:10], ONES[:10]).wait_applied(LONG_S)
    check(slow, table, IDS[10:], 1)
    check(slow, table, IDS[:10], 2)


def test_so_are_large_assigns_and_erases(slow: FaultyCluster, table: kvemb.Table) -> None:
    table.assign(IDS, -3 * ONES, timeout_s=LONG_S)
    assert table.erase(IDS[::2], timeout_s=LONG_S) == N_ROWS // 2
    check(slow, table, IDS[::2], 0)
    check(slow, table, IDS[1::2], 3)


def test_a_pull_that_takes_longer_than_the_timeout_is_read_in_pieces(
    slow: FaultyCluster, table: kvemb.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow.heal()
    table.assign(IDS, -5 * ONES, timeout_s=LONG_S)
    slow.node_proxies[0].set(SLOW, DOWN)
    monkeypatch.setattr("kvemb.datapath.pull.PIECE_BYTES", 1 << 18)
    np.testing.assert_array_equal(table.pull(IDS), -5 * ONES)
    with pytest.raises(kvemb.errors.DeadlineExceededError, match="rows of this pull had been read"):
        table.pull(IDS, timeout_s=1)


def train(cluster: kvemb.Cluster, name: str, number: int) -> list[dict[str, int]]:
    """Three sync steps of Adam, each about most rows; return how many of the rows held each one changed."""
    fresh = []
    for step in range(3):
        ids = IDS[number * 1000 : N_ROWS - (1 - number) * 1000 - step]
        grads = np.random.default_rng([number, step]).standard_normal((len(ids), DIM)).astype(np.float32)
        ack = cluster.push({name: (ids, grads)}, prefetched={name: (IDS[:100], np.zeros(100, np.uint64))}, timeout_s=LONG_S)
        ack.wait_applied(LONG_S)
        assert ack.changed_rows is not None
        fresh.append({table: len(rows.ids) for table, rows in ack.changed_rows.items()})
    return fresh


def test_large_sync_steps_end_with_the_bits_of_quick_ones(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    rows = {}
    storage, servers = {"timeout_s": 1}, {"barrier_timeout_s": 300}
    with FaultyCluster("redis", 1, shards=2, mode="sync", trainers=2, storage=storage, servers=servers, memory_mb=512) as local:
        both = [kvemb.connect(local.url, trainer=name, timeout_s=20) for name in "ab"]
        for name in ("quick", "slow"):
            table = both[0].create_table(name, dim=DIM, optimizer=kvemb.optim.adam(), initializer=kvemb.init.zeros(), reduce="mean")
            if name == "slow":
                local.node_proxies[0].set(SLOW, UP)
            with ThreadPoolExecutor(2) as trainers:
                fresh = list(trainers.map(train, both, [name] * 2, range(2)))
            assert fresh == [[{name: 100}] * 3] * 2
            local.heal()
            rows[name] = table.pull(IDS, timeout_s=LONG_S)
        for cluster in both:
            cluster.close()
    np.testing.assert_array_equal(rows["slow"], rows["quick"])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("n_rows", "dim"), [(10_000_000, 4), (100_000, 1024)])
@pytest.mark.parametrize("kind", SERVERS)
def test_so_it_is_at_full_size(kind: str, n_rows: int, dim: int, require_server: Callable[[str], str]) -> None:
    require_server(SERVERS[kind])
    ids, ones = np.arange(n_rows) * 7919, np.full((n_rows, dim), -1, np.float32)
    with LocalCluster(kind, memory_mb=4096) as local, kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster:
        table = cluster.create_table("full", dim=dim, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        large = table.push(ids, ones)
        large.wait(LONG_S)
        local.shards[0].kill()
        local.start_shard(0)
        small = table.push(ids[:10], ones[:10])
        for ack in (large, small):
            ack.wait_applied(10 * LONG_S)
        rows = table.pull(ids, timeout_s=PATIENCE_S)
        assert np.unique(rows[:10]).tolist() == [2]
        assert np.unique(rows[10:]).tolist() == [1]
        table.assign(ids, -5 * ones)
        assert len(table) == len(table.export()[0]) == n_rows
        assert table.erase(ids) == n_rows


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_largest_message_is_applied_on_the_slowest_storage(slow: FaultyCluster, table: kvemb.Table) -> None:
    slow.node_proxies[0].set(Flow(bytes_per_s=1 << 20), UP)
    n_rows = (MAX_REQUEST_BYTES - (1 << 10)) // (8 + 4 * DIM)
    ids = np.arange(n_rows, dtype=np.uint64)
    rows = TableRows(table.name, table.definition.schema, ids, np.full((n_rows, DIM), 3, np.float32))
    shards = table.cluster._connection.require_shards("assign")
    shards.servers.call(0, ASSIGN_ROWS, RowsRequest(rows, 1000.0), Deadline.after(1000))
    check(slow, table, ids.astype(np.int64), 3)
