"""Errors when something is down, full or foreign name the cause, not only the part that waited for it."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import redis
import yaml

import kvemb
from kvemb.config import StorageConfig
from kvemb.coordination.markers import MARKER_KEY, Marker
from kvemb.errors import ConfigError, DeadlineExceededError, InvalidInputError, KvembError, ShardUnavailableError, WrongNodeError
from kvemb.local_cluster import LocalCluster, storage_servers
from kvemb.local_cluster.storage_servers import start_servers
from kvemb.net.deadline import Deadline
from kvemb.schema.buckets import BucketKeys
from kvemb.stores.row_io import WritePart
from kvemb.stores.storage_kinds import open_store


def new_table(cluster: kvemb.Cluster) -> kvemb.Table:
    return cluster.create_table("t", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())


@pytest.fixture(scope="module")
def calm() -> Iterator[tuple[str, kvemb.Cluster, kvemb.Table]]:
    """A cluster on which nothing fails."""
    with kvemb.local() as url, kvemb.connect(url) as cluster:
        yield url, cluster, new_table(cluster)


def test_writes_that_wait_for_a_hung_node_name_it() -> None:
    ids = np.arange(100)
    with LocalCluster("redis", 2, shards=1) as local, kvemb.connect(local.url) as cluster:
        table = new_table(cluster)
        hung = local.servers[1]
        hung.process.signal(signal.SIGSTOP)
        try:
            ack = table.push(ids, np.ones((100, 2)))
            with pytest.raises(ShardUnavailableError, match=hung.address):
                # The shard's own storage call takes storage.timeout_s, 5 s, before it knows that the node does not answer.
                ack.wait_applied(timeout_s=12)
            with pytest.raises(KvembError, match=hung.address):
                table.flush(timeout_s=2)
            with pytest.raises(DeadlineExceededError, match=hung.address):
                table.assign(ids, np.ones((100, 2)), timeout_s=2)
        finally:
            hung.process.signal(signal.SIGCONT)
        table.flush(timeout_s=30)
        assert (table.pull(ids) == 1).all()  # the push, then the assign, which stayed queued


def test_a_node_that_was_made_the_replica_of_another_is_mended_as_its_error_says(caplog: pytest.LogCaptureFixture) -> None:
    ids = np.arange(500)
    with LocalCluster("redis", 2, shards=1) as local, kvemb.connect(local.url) as cluster:
        table = new_table(cluster)
        table.push(ids, -np.ones((500, 2))).wait_applied(timeout_s=20)
        addresses = [one.address for one in local.servers]
        with (
            closing(redis.Redis.from_url(f"redis://{addresses[0]}")) as primary,
            closing(redis.Redis.from_url(f"redis://{addresses[1]}")) as node,
        ):
            primary.config_set("repl-diskless-sync-delay", 0)
            node.replicaof(*addresses[0].split(":"))
            copied = Deadline.after(60)
            while node.info("replication").get("master_link_status") != "up":
                assert not copied.expired
                threading.Event().wait(0.1)
            node.replicaof("NO", "ONE")
            for _ in range(2):
                with pytest.raises(WrongNodeError, match="FLUSHALL"):
                    table.pull(ids, timeout_s=1)
            node.flushall()
            assert (table.pull(ids, timeout_s=60) == 1).all()
    assert sum("not followed yet" in line for line in caplog.messages) <= 1


def test_what_differs_between_a_config_and_its_shards_is_named_and_nothing_else(calm: tuple[str, kvemb.Cluster, kvemb.Table]) -> None:
    config = calm[1].config
    storage = {"kind": config.storage.kind, "nodes": list(config.storage.nodes)}
    with pytest.raises(ConfigError, match=rf"answers as cluster '{config.cluster}', expected 'another'\. Start the shards"):
        kvemb.connect({"cluster": "another", "storage": storage, "parameter_servers": {"shards": list(config.servers.shards)}})


@pytest.mark.parametrize(("kind", "taken_for"), [("redis", "memcached"), ("memcached", "redis"), ("memcached", "redis-cluster")])
def test_a_server_of_another_kind_is_asked_about(kind: str, taken_for: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (server,) = start_servers(kind, 1, tmp_path, 64)
    try:
        with (
            open_store(StorageConfig(taken_for, (server.address,)), role="reader") as store,
            pytest.raises(KvembError, match=r"is this a server of the kind that storage\.kind says"),
        ):
            store.open(Deadline.after(60))
    finally:
        server.process.kill()


def test_a_memcached_of_the_binary_protocol_alone_is_named_with_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setattr(storage_servers, "MEMCACHED_OPTIONS", ("-M", "-o", "no_slab_reassign", "-B", "binary"))
    (server,) = start_servers("memcached", 1, tmp_path, 64)
    try:
        with (
            open_store(StorageConfig("memcached", (server.address,)), role="reader") as store,
            pytest.raises(KvembError, match=r"closed the connection.*started with -B binary ends so, too: use -B auto"),
        ):
            store.open(Deadline.after(60))
    finally:
        server.process.kill()


def test_an_empty_push_is_a_step_of_a_sync_job() -> None:
    started = LocalCluster("valkey", 1, shards=2, mode="sync", trainers=2)
    with started as local, kvemb.connect(local.url, trainer="a") as a, kvemb.connect(local.url, trainer="b") as b:
        table = new_table(a)
        for _ in range(2):
            acks = [a.push({}), b.push({"t": ([1, 2, 3], np.ones((3, 2)))})]
            for ack in acks:
                ack.wait_applied(timeout_s=20)
        assert (table.pull([1, 2, 3]) == -2).all()


def test_a_local_cluster_outlives_the_thread_that_started_it() -> None:
    cluster = LocalCluster("valkey", 1)
    thread = threading.Thread(target=cluster.__enter__)
    thread.start()
    thread.join()
    try:
        with kvemb.connect(cluster.url) as client:
            assert new_table(client).pull([1]).tolist() == [[0, 0]]
    finally:
        cluster.__exit__(None, None, None)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "1", True])
def test_a_timeout_without_an_end_is_refused(calm: tuple[str, kvemb.Cluster, kvemb.Table], timeout_s: object) -> None:
    url, _, table = calm
    calls = [
        lambda: table.pull([1], timeout_s=timeout_s),  # type: ignore[arg-type]
        lambda: table.flush(timeout_s=timeout_s),  # type: ignore[arg-type]
        lambda: table.push([1], np.ones((1, 2))).wait(timeout_s=timeout_s),  # type: ignore[arg-type]
        lambda: kvemb.connect(url, timeout_s=timeout_s),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(InvalidInputError, match="timeout_s"):
            call()


@pytest.mark.parametrize(
    "options", [{"nodes": "2"}, {"shards": 0}, {"mode": "foo"}, {"mode": "sync"}, {"memory_mb": 0}, {"store": "mongo"}, {"cache_mb": -1}]
)
def test_a_local_cluster_with_wrong_arguments_starts_nothing(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError), kvemb.local(**options):  # type: ignore[arg-type]
        pytest.fail("started")


@pytest.mark.parametrize("batch", [[1], 5, None, ([1], [[1.0, 1.0]], 3)])
def test_a_push_that_is_no_pair_is_refused(calm: tuple[str, kvemb.Cluster, kvemb.Table], batch: object) -> None:
    with pytest.raises(InvalidInputError, match="'t'"):
        calm[1].push({"t": batch})  # type: ignore[dict-item]


def test_a_new_connection_to_a_foreign_node_carries_no_row(tmp_path: Path) -> None:
    (server,) = start_servers("redis", 1, tmp_path, 64)
    config = StorageConfig("redis", (server.address,))
    mine, other = open_store(config, role="shard:0"), open_store(config, role="shard:1")
    try:
        mine.provision(b"m" * 16, b"g" * 8, Deadline.after(60))
        (marker,) = mine.open(Deadline.after(60))
        other.open(Deadline.after(60))
        foreign = Marker(b"f" * 16, 0, marker.generation, marker.map_digest, marker.map_serial, marker.run_id)
        other.values.put(MARKER_KEY.decode(), foreign.encode(), Deadline.after(60))
        pool = mine._links.pool  # type: ignore[attr-defined]
        pool.close()
        pool._closed = False  # the next batch opens a link of its own
        keys = BucketKeys(b"tab", np.arange(10, dtype=np.uint64), 1)
        with pytest.raises(WrongNodeError, match="belongs to cluster"):
            mine.rows.write([WritePart(keys, np.zeros((10, 12), np.uint8))], Deadline.after(60))
        assert other.nodes.stats(Deadline.after(60))[0].n_keys == 2  # marker and cluster map
    finally:
        mine.close()
        other.close()
        server.process.kill()


@pytest.mark.parametrize("kind", ["redis", "memcached"])
def test_two_names_of_one_server_are_refused_and_a_cluster_begins_once_they_are_corrected(
    kind: str, tmp_path: Path, require_server: Callable[[str], str]
) -> None:
    require_server("redis-server" if kind == "redis" else kind)
    servers = start_servers(kind, 2, tmp_path, 64)
    first, second = (server.address for server in servers)
    twice = StorageConfig(kind, (first, second, first.replace("127.0.0.1", "localhost")))
    same = rf"localhost:\d+ leads to the same server as {first} or {second}"
    with open_store(twice, role="shard:0") as store, pytest.raises(ConfigError, match=same):
        store.provision(b"c" * 16, b"g" * 8, Deadline.after(60))
    with open_store(StorageConfig(kind, (first, second)), role="shard:0") as store:
        store.provision(b"o" * 16, b"g" * 8, Deadline.after(60))
        assert len(store.open(Deadline.after(60))) == 2
    for server in servers:
        server.process.kill()


def test_a_look_at_the_nodes_blames_none_that_answers_for_one_that_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    servers = start_servers("redis", 2, tmp_path, 64)
    with open_store(StorageConfig("redis", tuple(server.address for server in servers)), role="shard:0") as store:
        store.provision(b"c" * 16, b"g" * 8, Deadline.after(60))
        store.open(Deadline.after(60))
        store.fence(0, 1, Deadline.after(60))
        servers[1].process.signal(signal.SIGSTOP)
        for _ in range(2):
            assert store.repair.lost_nodes(Deadline.after(3)) == []
    for server in servers:
        server.process.kill()
    assert "no complete answer" not in caplog.text  # of the first one; the other one is said elsewhere


def test_a_shard_that_was_started_in_another_mode_gets_no_push_and_the_job_goes_on_once_it_is_started_again() -> None:
    with LocalCluster("valkey", 1, shards=2) as local, kvemb.connect(local.url) as cluster:
        table, ids, ones = new_table(cluster), np.arange(100), np.ones((100, 2))
        table.push(ids, ones).wait_applied(timeout_s=30)
        right = local.config_path.read_text()
        tree = yaml.safe_load(right)
        tree["parameter_servers"] |= {"mode": "sync", "trainers": 1}
        local.shards[1].stop(30)
        local.config_path.write_text(yaml.safe_dump(tree))
        local.start_shard(1)
        ack = table.push(ids, ones)
        with pytest.raises(ShardUnavailableError, match=r"shard 1 .*was started in mode sync"):
            ack.wait(timeout_s=60)
        local.shards[1].stop(30)
        local.config_path.write_text(right)
        local.start_shard(1)
        ack.wait_applied(timeout_s=30)
        assert (table.pull(ids) == -2).all()
