"""Rows that storage has lost come back exactly, by themselves or by `kvemb repair`: single rows, whole nodes, nodes with older rows."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import redis
from matrix import one_of
from moving_load import further_node
from pymemcache.client.base import Client

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.client.shard_channel import SAY_AFTER_S
from kvemb.commands import status_command
from kvemb.commands.status_command import repair
from kvemb.config import load
from kvemb.coordination.registry_format import META_NAME
from kvemb.errors import InvalidInputError, ShardUnavailableError
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.storage_servers import StorageServer
from kvemb.net.deadline import Deadline
from kvemb.schema.buckets import BucketKeys
from kvemb.stores.row_io import ReadPart
from kvemb.stores.storage_kinds import open_store
from tests.real_servers import memcached_client, redis_client

PATIENCE_S = 60.0
ROOT = Path(__file__).parents[2]
N, DIM = 3000, 4
IDS = np.arange(N)
KINDS = {"redis": "redis-server", "memcached": "memcached"}


@pytest.fixture(params=one_of("memcached", "redis"))
def kind(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> str:
    require_server(KINDS[request.param])
    return str(request.param)


@contextmanager
def running(kind: str, *, cache_mb: int = 0, durability: str = "os") -> Iterator[tuple[LocalCluster, "kvemb.Cluster", "kvemb.Table"]]:
    """A cluster of two nodes and two shards with a table that was trained for some steps; without a cache, records are reconstructed."""
    with (
        LocalCluster(kind, 2, shards=2, memory_mb=64, cache_mb=cache_mb, durability=durability) as local,
        kvemb.connect(local.url) as cluster,
    ):
        table = cluster.create_table("t", dim=DIM, optimizer=kvemb.optim.adam(lr=0.1), initializer=kvemb.init.normal())
        for step in range(4):
            table.push(IDS, gradients(step), timeout_s=PATIENCE_S)
        table.flush()
        yield local, cluster, table


def gradients(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(N, DIM)).astype(np.float32)


def records(local: LocalCluster, table: "kvemb.Table", ids: np.ndarray = IDS) -> tuple[np.ndarray, np.ndarray]:
    """The bytes in storage, and which rows are there; waits while nodes are in repair."""
    with open_store(load(local.config_path, {}).storage, role="trainer") as store:
        store.open(Deadline.after(PATIENCE_S))
        definition = table.definition
        keys = definition.keys(ids.astype(np.uint64), pages=store.capabilities.pages)
        size = definition.record.size_bytes
        got = store.rows.read([ReadPart(keys, size, size)], Deadline.after(PATIENCE_S))[0].in_key_order()
        return got.records, got.found


def require_same(local: LocalCluster, table: "kvemb.Table", before: np.ndarray) -> None:
    after, found = records(local, table)
    assert found.all()
    np.testing.assert_array_equal(after, before)


def delete_rows(server: StorageServer, table: "kvemb.Table", ids: np.ndarray) -> None:
    keys = table.definition.keys(ids.astype(np.uint64), pages=server.kind != "memcached")
    names = [bytes(key) for key in keys.encode()]
    if not isinstance(keys, BucketKeys):
        with closing(Client(("127.0.0.1", server.port))) as client:
            client.delete_many(names, noreply=False)
        return
    with redis.Redis(port=server.port) as client, client.pipeline() as pipeline:
        for name, field in zip(names, keys.fields(), strict=True):
            pipeline.hdel(name, bytes(field))
        pipeline.execute()


def flush(server: StorageServer) -> None:
    if server.kind == "memcached":
        with closing(Client(("127.0.0.1", server.port))) as client:
            client.flush_all(noreply=False)
        return
    with redis.Redis(port=server.port) as client:
        client.flushall()


def registry_on(server: StorageServer) -> bytes:
    """A node's copy of the registry of tables."""
    with closing(memcached_client(server) if server.kind == "memcached" else redis_client(server)) as client:
        return client.get(META_NAME) or b""


def await_state(is_so: Callable[[], bool]) -> None:
    deadline = Deadline.after(PATIENCE_S)
    while not is_so():
        assert not deadline.expired
        time.sleep(0.02)


def kvemb_command(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvemb.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT, check=False)


def train_on(table: "kvemb.Table") -> None:
    before = table.pull(IDS, timeout_s=PATIENCE_S)
    table.push(IDS, gradients(9), timeout_s=PATIENCE_S).wait_applied(PATIENCE_S)
    assert (table.pull(IDS, timeout_s=PATIENCE_S) != before).any(axis=1).all()


@pytest.mark.parametrize("cache_mb", [0, 64])
def test_rows_deleted_behind_our_back_are_restored_on_request(kind: str, cache_mb: int) -> None:
    with running(kind, cache_mb=cache_mb) as (local, _, table):
        before = records(local, table)[0]
        gone = IDS[::100]
        for server in local.servers:
            delete_rows(server, table, gone)
        assert int(records(local, table)[1].sum()) == N - len(gone)
        done = kvemb_command("repair", str(local.config_path))
        assert (done.returncode, done.stdout) == (0, "no node has lost its rows; give --node or --all to compare nodes row by row\n"), done
        done = kvemb_command("repair", str(local.config_path), "--all")
        assert done.returncode == 0, done.stderr
        assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["shard 0", "shard 1", "in all"]
        assert f"in all: {len(gone)} rows in" in done.stdout
        require_same(local, table, before)
        assert sum(reply.rows for reply in repair(load(local.config_path, {}), all_nodes=True, timeout_s=PATIENCE_S).values()) == 0
        train_on(table)


def test_only_the_named_node_is_compared(kind: str) -> None:
    with running(kind) as (local, _, table):
        before = records(local, table)[0]
        config = load(local.config_path, {})
        for server in local.servers:
            delete_rows(server, table, IDS[:200])
        first, second = (server.address for server in local.servers)
        n_first = sum(reply.rows for reply in repair(config, [first], timeout_s=PATIENCE_S).values())
        assert 0 < n_first < 200
        assert int((~records(local, table)[1]).sum()) == 200 - n_first
        assert sum(reply.rows for reply in repair(config, [second], timeout_s=PATIENCE_S).values()) == 200 - n_first
        require_same(local, table, before)
        with pytest.raises(InvalidInputError, match=r"no storage node 127.0.0.1:1; there are 127"):
            repair(config, ["127.0.0.1:1"], timeout_s=PATIENCE_S)
        assert kvemb_command("repair", str(local.config_path), "--node", "127.0.0.1:1").returncode == 1


def test_a_node_that_comes_back_with_an_older_content_is_brought_up_to_date(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with running("redis") as (local, _, table):
        server = local.servers[0]
        with redis.Redis(port=server.port) as client:
            client.save()
        older = local.folder / "older.rdb"
        shutil.copyfile(server.snapshot_path, older)
        table.push(IDS[::2], gradients(7)[::2])
        assert table.erase(IDS[:300]) == 300
        table.push(np.arange(N, N + 100), gradients(8)[:100])
        table.flush()
        alive = np.arange(300, N + 100)
        before = records(local, table, alive)[0]
        server.restart(snapshot=older)
        after, found = records(local, table, alive)
        assert found.all()
        np.testing.assert_array_equal(after, before)
        assert not records(local, table, IDS[:300])[1].any()
        train_on(table)


def test_a_node_that_goes_back_in_the_same_process_to_before_its_repair_shows_no_older_rows(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with running("redis") as (local, _, table):
        with redis.Redis(port=local.servers[0].port) as client:
            for turn in range(2):
                client.execute_command("SWAPDB", 0, 1)
                table.push(IDS, gradients(turn), timeout_s=PATIENCE_S)
                table.flush()
                before = table.pull(IDS, timeout_s=PATIENCE_S)
                client.execute_command("SWAPDB", 0, 1)
                np.testing.assert_array_equal(table.pull(IDS, timeout_s=PATIENCE_S), before)
        train_on(table)


@pytest.mark.full
def test_a_node_restarted_from_a_snapshot_older_than_the_last_move_is_compared_and_keeps_no_row_that_left(
    require_server: Callable[[str], str],
) -> None:
    require_server("redis-server")
    with running("redis") as (local, cluster, table), further_node(local) as third:
        server, definition = local.servers[0], table.definition
        with redis.Redis(port=server.port) as client:
            client.save()
        older = local.folder / "older.rdb"
        shutil.copyfile(server.snapshot_path, older)
        cluster.nodes.begin(cluster.nodes.add(third.address))
        cluster_map = cluster.nodes.wait(timeout_s=PATIENCE_S).map
        table.push(IDS[::2], gradients(7)[::2])
        table.flush()
        before = table.pull(IDS)
        server.restart(snapshot=older)
        np.testing.assert_array_equal(table.pull(IDS, timeout_s=PATIENCE_S), before)
        train_on(table)
        left = IDS[cluster_map.slot_nodes[definition.placement.slots(IDS.astype(np.uint64))] == 2]
        keys = definition.keys(left.astype(np.uint64), pages=True)
        assert isinstance(keys, BucketKeys)
        with redis.Redis(port=server.port) as client:
            assert not any(client.hexists(bytes(key), bytes(field)) for key, field in zip(keys.encode(), keys.fields(), strict=True))


def test_a_push_to_the_first_table_waits_where_nodes_are_lost_before_its_shard_has_read_of_it(kind: str) -> None:
    with LocalCluster(kind, 2, shards=2, memory_mb=64) as local, kvemb.connect(local.url) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        for server in local.servers:
            server.restart()
        table.push(IDS, np.ones((N, DIM)), timeout_s=PATIENCE_S).wait_applied(PATIENCE_S)
        np.testing.assert_array_equal(table.pull(IDS), np.full((N, DIM), -1.0))


def test_a_table_that_one_shard_had_not_heard_of_when_all_nodes_lost_their_rows_is_there_afterwards(kind: str) -> None:
    with running(kind) as (local, cluster, table):
        local.shards[1].signal(signal.SIGSTOP)
        late = cluster.create_table("late", dim=DIM, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        for server in local.servers:
            flush(server)
        await_state(lambda: all(b"late" in registry_on(server) for server in local.servers))  # shard 0 has put it back
        local.shards[1].signal(signal.SIGCONT)
        with kvemb.connect(local.url) as other:
            for one in (other.table("late"), late):
                one.push(IDS, np.ones((N, DIM)), timeout_s=PATIENCE_S).wait_applied(PATIENCE_S)
            np.testing.assert_array_equal(other.table("late").pull(IDS), np.full((N, DIM), -2.0))
        train_on(table)


def test_a_shard_and_a_node_that_are_lost_together_come_back_from_the_data_folder(kind: str) -> None:
    with running(kind) as (local, _, table):
        before = records(local, table)[0]
        local.shards[0].kill()
        local.servers[0].restart()
        local.start_shard(0)
        require_same(local, table, before)
        train_on(table)


@pytest.mark.full
def test_a_repair_names_every_shard_that_is_away_and_does_not_wait_for_its_whole_time(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_command, "_PRESENT_S", SAY_AFTER_S + 2)
    with LocalCluster(kind, 1, shards=3, memory_mb=64) as local:
        config = load(local.config_path, {})
        for shard in local.shards[:2]:
            shard.kill()
        with pytest.raises(
            ShardUnavailableError, match=r"(?s)away: 2 of 3 shards. Nothing was begun: shard 0 .*No process.*shard 1 .*No process"
        ):
            repair(config, all_nodes=True, timeout_s=2 * PATIENCE_S)
    said = [record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()]
    assert [f"shard {shard} (" in text for shard, text in enumerate(said)] == [True, True]
