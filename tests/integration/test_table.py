"""The public API on real clusters: storage servers and shards are processes of their own, on every kind of storage."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from matrix import one_of

import kvemb
from kvemb.api import Cluster
from kvemb.errors import (
    ClosedError,
    InvalidInputError,
    ReadOnlyError,
    TableMismatchError,
    UnknownTableError,
)
from kvemb.local_cluster import LocalCluster
from kvemb.schema.buckets import BucketKeys
from tests.integration.table_clusters import ids_of, names, new_table, start

NAN = float("nan")


@pytest.fixture(scope="module", params=["memcached", *one_of("valkey", "redis-cluster")])
def local_cluster(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    with start(request.param, require_server) as local:
        yield local


@pytest.fixture
def cluster(local_cluster: LocalCluster) -> Iterator[Cluster]:
    with kvemb.connect(local_cluster.url) as cluster:
        yield cluster


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_pull_of_unseen_ids_is_the_initializer_and_creates_nothing(cluster: Cluster, dtype: str) -> None:
    table = new_table(cluster, initializer=kvemb.init.normal(std=0.1), seed=5, dtype=dtype)
    ids = ids_of(5000).reshape(50, 100)
    keys_before = sum(node.n_keys for node in cluster.status().nodes)
    rows = table.pull(ids)
    assert rows.shape == (50, 100, 4)
    drawn = kvemb.init.normal(std=0.1).rows(ids.reshape(-1).view(np.uint64), 4, table=table.name, seed=5)
    np.testing.assert_allclose(rows.reshape(-1, 4), drawn, rtol=0 if dtype == "float32" else 2**-8, atol=2**-24)
    assert np.array_equal(rows, table.pull(ids))
    assert (sum(node.n_keys for node in cluster.status().nodes), len(table)) == (keys_before, 0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_first_push_begins_from_what_a_pull_showed(cluster: Cluster, dtype: str) -> None:
    table = new_table(cluster, initializer=kvemb.init.uniform(), dtype=dtype)
    ids = ids_of(1000)
    shown = table.pull(ids)
    table.push(ids, np.zeros((1000, 4)))
    table.flush()
    assert len(table) == 1000
    assert np.array_equal(table.pull(ids), shown)


@pytest.mark.parametrize("num_ids", [None, 2000])
def test_parts_of_rows_begin_alike_at_trainers_and_shards(local_cluster: LocalCluster, cluster: Cluster, num_ids: int | None) -> None:
    first = kvemb.init.columns((1, kvemb.init.zeros()), (3, kvemb.init.normal(std=0.1)))
    table = new_table(cluster, initializer=first, seed=5, num_ids=num_ids)
    ids, gradients = np.arange(2000), np.full((1000, 4), 0.5, np.float32)
    drawn = kvemb.init.normal(std=0.1).rows(ids.view(np.uint64), 4, table=table.name, seed=5)
    drawn[:, 0] = 0
    with kvemb.connect(local_cluster.url) as other:
        opened = other.create_table(
            table.name, dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=first, seed=5, num_ids=num_ids, exist_ok=True
        )
        assert np.array_equal(opened.pull(ids), drawn)
        assert len(table) == 0
        table.push(ids[::2], gradients)  # the shards draw these rows, and take the gradient off
        table.flush()
        drawn[::2] -= gradients
        assert np.array_equal(opened.pull(ids), drawn)
        assert np.array_equal(table.pull(ids), drawn)
        with pytest.raises(TableMismatchError, match="initializer: exists with"):
            other.create_table(
                table.name, dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros(), seed=5, num_ids=num_ids, exist_ok=True
            )


def test_parts_of_rows_that_are_not_dim_columns_create_no_table(cluster: Cluster) -> None:
    name = next(names)
    with pytest.raises(InvalidInputError, match=f"table '{name}': initializer.parts: .*17 columns together, dim is 16"):
        cluster.create_table(
            name,
            dim=16,
            optimizer=kvemb.optim.sgd(),
            initializer=kvemb.init.columns((1, kvemb.init.zeros()), (16, kvemb.init.normal())),
        )
    assert name not in cluster.tables()


def test_a_flushed_push_is_visible_to_every_client(local_cluster: LocalCluster, cluster: Cluster) -> None:
    table = new_table(cluster)
    ids = ids_of(3000)
    table.push(ids, np.ones((3000, 4))).wait()
    table.flush()
    for read_only in (False, True):
        with kvemb.connect(local_cluster.url, read_only=read_only) as other:
            assert (other.table(table.name).pull(ids) == -1).all()


def test_sums_of_many_pushes_with_duplicates_are_exact(local_cluster: LocalCluster, cluster: Cluster) -> None:
    table = new_table(cluster)
    rng = np.random.default_rng(1)
    expected = np.zeros((200, 4))
    with kvemb.connect(local_cluster.url) as second:
        for step in range(20):
            ids = rng.zipf(1.3, 500) % 200
            grads = rng.integers(-8, 8, (500, 4)).astype(np.float32)
            np.subtract.at(expected, ids, grads)
            (table if step % 2 else second.table(table.name)).push(ids, grads)
        second.flush()
    table.flush()
    assert np.array_equal(table.pull(np.arange(200)), expected)


def test_versions_tell_how_stale_a_push_was(cluster: Cluster) -> None:
    table = new_table(cluster)
    ids = np.arange(10)
    rows, missing = table.pull(ids, return_versions=True)
    assert (missing == 0).all()
    first = table.push(ids, rows, versions=missing)
    first.wait_applied()
    assert first.staleness is not None
    assert first.staleness.changed_fraction == 0
    _, versions = table.pull(ids, return_versions=True)
    assert (versions > 0).all()
    table.push(ids[:5], np.ones((5, 4))).wait_applied()
    late = table.push(ids, rows, versions=versions)
    late.wait_applied()
    assert late.staleness is not None
    assert (late.staleness.changed_fraction, late.staleness.batches_elapsed >= 1) == (0.5, True)
    unversioned = table.push(ids, rows)
    unversioned.wait_applied()
    assert unversioned.staleness is None


def test_several_tables_travel_together(cluster: Cluster) -> None:
    user, item = new_table(cluster, dim=3), new_table(cluster, dim=5, id_dtype="uint64", dtype="float16")
    ids = {user.name: ids_of(100), item.name: np.array([[2**64 - 2, 0]], np.uint64)}
    ack = cluster.push({user.name: (ids[user.name], np.ones((100, 3))), item.name: (ids[item.name], np.ones((1, 2, 5)))})
    ack.wait_applied()
    rows = cluster.pull(ids)
    assert {name: (row.shape, row.tolist()) for name, row in rows.items()} == {
        user.name: ((100, 3), [[-1.0] * 3] * 100),
        item.name: ((1, 2, 5), [[[-1.0] * 5] * 2]),
    }


def test_run_time_values_hold_for_later_pushes(cluster: Cluster) -> None:
    table = new_table(cluster)
    table.set_hyper(lr=0.25)
    assert table.hyper["lr"] == 0.25
    table.push([1], np.ones((1, 4)))
    cluster.push({table.name: ([2], np.ones((1, 4)))}, hyper={table.name: {"lr": 4}})
    table.flush()
    assert table.pull([1, 2])[:, 0].tolist() == [-0.25, -4.0]
    with pytest.raises(InvalidInputError, match="beta1"):
        table.set_hyper(beta1=0.5)


def test_assign_erase_export_and_len(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvemb.api.table._EXPORTED_AT_ONCE", 700)
    table = new_table(cluster)
    ids, rows = ids_of(4000), np.random.default_rng(2).standard_normal((4000, 4), np.float32)
    table.assign(ids, rows)
    assert len(table) == 4000
    assert np.array_equal(table.pull(ids), rows)
    assert table.erase(np.concatenate([ids[:1500], ids[:10], [1, 2, 3]])) == 1500
    assert (table.pull(ids[:1500]) == 0).all()
    got_ids, got = table.export()
    assert got_ids.dtype == np.int64
    assert np.array_equal(np.sort(got_ids), np.sort(ids[1500:]))
    assert np.array_equal(got, table.pull(got_ids))
    assert len(table) == 2500
    empty = new_table(cluster)
    assert (len(empty), empty.export()[1].shape, bool(empty)) == (0, (0, 4), True)


def test_an_assignment_follows_the_pushes_before_it(cluster: Cluster) -> None:
    table = new_table(cluster)
    for value in range(5):
        table.push([7], np.ones((1, 4)))
        table.assign([7], np.full((1, 4), float(value)))
        assert table.pull([7]).tolist() == [[value] * 4]


WRONG_PUSHES: list[tuple[object, object, str]] = [
    ([1.5], np.ones((1, 4)), "expected integers"),
    ([1, 2], np.ones((1, 4)), "shape"),
    ([1], np.ones((1, 5)), "shape"),
    ([1, -3], [[1.0] * 4, [NAN] * 4], "id -3: NaN"),
    (np.array([2**63], np.uint64), np.ones((1, 4)), "9223372036854775808"),
]


@pytest.mark.parametrize(("ids", "grads", "message"), WRONG_PUSHES)
def test_wrong_input_changes_nothing(cluster: Cluster, ids: object, grads: object, message: str) -> None:
    table = new_table(cluster)
    for verb in (table.push, table.assign):
        with pytest.raises(InvalidInputError, match=message):
            verb(ids, grads)  # type: ignore[operator]
    table.push(np.arange(4)[::2], np.ones((4, 8))[::2, ::2])  # not contiguous: fine
    table.push([], [])
    table.flush()
    assert len(table) == 2
    assert table.pull([]).shape == (0, 4)


@pytest.mark.parametrize("name", ["", " a", "a\n", "a\x00b", "x" * 256, "é" * 128, "a\u202eb", "\ud800", 7])
def test_wrong_table_names_are_refused(cluster: Cluster, name: str) -> None:
    with pytest.raises(InvalidInputError, match="table name"):
        cluster.create_table(name, dim=4, optimizer=kvemb.optim.sgd())
    with pytest.raises(InvalidInputError, match="table name"):
        cluster.table(name)


def test_negative_ids_are_refused_where_the_dtype_forbids(cluster: Cluster) -> None:
    with pytest.raises(InvalidInputError, match="id -1"):
        new_table(cluster, id_dtype="uint64").pull([-1])


def test_minus_one_is_taken_for_padding_until_it_is_allowed(cluster: Cluster, local_cluster: LocalCluster) -> None:
    table = new_table(cluster)
    for verb in (
        lambda: table.pull([7, -1]),
        lambda: cluster.pull({table.name: [7, -1]}),
        lambda: table.push([7, -1], np.ones((2, 4))),
        lambda: cluster.push({table.name: ([7, -1], np.ones((2, 4)))}),
        lambda: table.assign([7, -1], np.ones((2, 4))),
    ):
        with pytest.raises(InvalidInputError, match=r"id -1 at position 1.*padding"):
            verb()
    table.allow_minus_one()
    table.push([-1, -2], np.ones((2, 4)))
    table.flush()
    assert len(table) == 2, "nothing of what was refused was sent"
    assert table.pull([-1, 7])[:, 0].tolist() == [-1.0, 0.0]
    assert cluster.pull({table.name: [-1]})[table.name].tolist() == [[-1.0] * 4]
    with kvemb.connect(local_cluster.url) as another:
        assert sorted(another.table(table.name).export()[0].tolist()) == [-2, -1], "rows that exist can be read, allowed or not"


def test_masked_gradients_and_rows_are_refused(cluster: Cluster) -> None:
    table = new_table(cluster)
    rows = np.ma.masked_equal(np.ones((2, 4)) * [[1], [3]], 3)
    for verb in (table.push, table.assign):
        with pytest.raises(InvalidInputError, match=r"(grads|rows): 4 elements of a numpy.ma array are masked"):
            verb([1, 2], rows)


def test_another_identity_is_refused_and_both_are_shown(cluster: Cluster) -> None:
    table = new_table(cluster)
    with pytest.raises(TableMismatchError, match=r"\n  dim: exists with 4, asked for 8\n"):
        cluster.create_table(table.name, dim=8, optimizer=kvemb.optim.sgd(), exist_ok=True)
    with pytest.raises(InvalidInputError, match="exists already; give exist_ok=True"):
        cluster.create_table(table.name, dim=4, optimizer=kvemb.optim.sgd(), initializer=kvemb.init.zeros())
    with pytest.raises(InvalidInputError, match=r"kvemb\.optim"):
        cluster.create_table(table.name, dim=8, optimizer="adam")  # type: ignore[arg-type]


def test_opening_with_another_learning_rate_uses_it(local_cluster: LocalCluster, cluster: Cluster) -> None:
    name = new_table(cluster).name
    with kvemb.connect(local_cluster.url) as other:
        options = {"optimizer": kvemb.optim.sgd(lr=0.5), "initializer": kvemb.init.zeros()}
        table = other.create_table(name, dim=4, exist_ok=True, **options)  # type: ignore[arg-type]
        table.push([1], np.ones((1, 4)))
        table.flush()
        assert table.pull([1]).tolist() == [[-0.5] * 4]


def test_an_unknown_table_lists_those_that_exist(local_cluster: LocalCluster, cluster: Cluster) -> None:
    known = new_table(cluster).name
    assert known in cluster.tables()
    for read_only in (False, True):
        with kvemb.connect(local_cluster.url, read_only=read_only) as other, pytest.raises(UnknownTableError, match=known):
            other.table("nobody")


def test_records_that_a_node_would_not_take_are_refused(local_cluster: LocalCluster, cluster: Cluster) -> None:
    options = {"dim": 65536, "optimizer": kvemb.optim.adam(amsgrad=True)}
    if local_cluster.store == "memcached":
        with pytest.raises(InvalidInputError, match=r"node 127.*takes records of at most .* have 1048588"):
            new_table(cluster, **options)  # type: ignore[arg-type]
    else:  # which take values far beyond any record
        assert new_table(cluster, **options).dim == 65536  # type: ignore[arg-type]


def test_a_table_of_many_expected_rows_has_as_many_buckets_for_its_life(local_cluster: LocalCluster, cluster: Cluster) -> None:
    before = sum(node.n_keys for node in cluster.status().nodes)
    table = new_table(cluster, expected_rows=10**9)
    ids = ids_of(2000)
    table.push(ids, np.ones((2000, 4), np.float32))
    table.flush()
    assert table.definition.n_buckets == 1 << 13
    n_keys = sum(node.n_keys for node in cluster.status().nodes) - before
    n_filled = len(np.unique(BucketKeys(b"tab", ids.view(np.uint64), 1 << 13).buckets))
    wanted = 2000 if cluster.store.capabilities.cas else n_filled
    assert wanted <= n_keys <= wanted + 4  # the registry, and the shards' notes of how far they are
    same = {"optimizer": kvemb.optim.sgd(lr=1.0), "initializer": kvemb.init.zeros()}
    again = cluster.create_table(table.name, dim=4, **same, expected_rows=5, exist_ok=True)  # type: ignore[arg-type]
    assert again.definition.n_buckets == 1 << 13
    with pytest.raises(InvalidInputError, match=r"give num_ids.*or expected_rows"):
        new_table(cluster, num_ids=10, expected_rows=10)


def test_read_only_pulls_and_refuses_the_rest(local_cluster: LocalCluster, cluster: Cluster) -> None:
    name = new_table(cluster).name
    with kvemb.connect(local_cluster.url, read_only=True) as reader:
        table = reader.table(name)
        assert table.pull([[1, 2]]).shape == (1, 2, 4)
        assert name in reader.tables()
        calls: list[Callable[[], object]] = [
            lambda: table.push([1], np.ones((1, 4))),
            lambda: table.assign([1], np.ones((1, 4))),
            lambda: table.erase([1]),
            table.flush,
            table.export,
            lambda: len(table),
            lambda: new_table(reader),
        ]
        for call in calls:
            with pytest.raises(ReadOnlyError, match="read_only=True"):
                call()


def test_a_closed_cluster_says_so(local_cluster: LocalCluster) -> None:
    cluster = kvemb.connect(local_cluster.url)
    table = new_table(cluster)
    cluster.close()
    cluster.close()
    for call in (lambda: table.pull([1]), lambda: table.push([1], np.ones((1, 4))), lambda: cluster.table("x")):
        with pytest.raises(ClosedError, match=rf"cluster '{cluster.config.cluster}' was closed; kvemb\.connect\(source\) opens another"):
            call()


def test_threads_share_a_table(cluster: Cluster) -> None:
    table = new_table(cluster)
    ids = ids_of(2000)

    def work(thread: int) -> None:
        for _ in range(5):
            table.push(ids, np.ones((2000, 4))).wait_applied()
            rows = table.pull(ids)
            assert (rows == np.round(rows)).all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert (table.pull(ids) == -20).all()


FORKS_UNDER_LOAD = """
import os, sys, threading, time, warnings
import numpy as np
import kvemb
from kvemb.errors import ClosedError

def of_child():
    assert np.array_equal(table.pull(ids), expected)
    try:
        table.push([1], np.ones((1, 4)))
    except ClosedError:
        cluster.close()
        return 0
    return 2

def pulls():
    while True:
        table.pull(ids)
        cluster.store.nodes.refresh_map(kvemb.net.deadline.Deadline.after(10))

def ended(child):
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "it hangs"

warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork beside threads
cluster = kvemb.connect(sys.argv[1])
table, ids = cluster.table(sys.argv[2]), np.arange(500)
cluster.metrics_collector()  # pulls are timed from here on
expected = table.pull(ids)
for _ in range(2):
    threading.Thread(target=pulls, daemon=True).start()
for at in range(int(sys.argv[3])):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = of_child()
        finally:
            os._exit(code)
    if code := ended(child):
        print(f"child {at}: {code}", flush=True)
        os._exit(1)
os._exit(0)
"""


def test_forked_children_pull_whatever_other_threads_of_the_parent_were_doing(local_cluster: LocalCluster, cluster: Cluster) -> None:
    table = new_table(cluster, initializer=kvemb.init.normal())
    command = [sys.executable, "-c", FORKS_UNDER_LOAD, local_cluster.url, table.name, "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


FORK = """
import os, sys, numpy as np, kvemb
from kvemb.errors import ClosedError
cluster = kvemb.connect(sys.argv[1])
table = cluster.table(sys.argv[2])
table.push([1], np.ones((1, 4))).wait_applied()
parent = table.pull([1, 2])
child = os.fork()
if child == 0:
    code = 1
    try:
        code = 0 if np.array_equal(table.pull([1, 2]), parent) else 2
        table.push([1], np.ones((1, 4)))
        code = 3
    except ClosedError as error:
        code = code or (0 if "kvemb.connect" in str(error) else 4)
        cluster.close()
    finally:
        os._exit(code)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
table.push([2], np.ones((1, 4))).wait_applied()
assert table.pull([1, 2]).tolist() == [[-1.0] * 4] * 2
cluster.close()
sys.exit(status)
"""


def test_a_forked_child_pulls_and_is_told_to_connect_before_it_pushes(local_cluster: LocalCluster, cluster: Cluster) -> None:
    command = [sys.executable, "-c", FORK, local_cluster.url, new_table(cluster).name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
