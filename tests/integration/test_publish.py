"""A projection is the cluster's rows, each once and no others, whatever is killed, flushed, moved, loaded or dropped meanwhile."""

import json
import random
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from shard_moves import HastyTrainer, ShardMoves

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.local_cluster import LocalCluster
from kvemb.schema.cluster_map import equal_runs
from kvemb.schema.slots import N_SLOTS
from tests.integration.counting_trainers import wait_for
from tests.integration.encrypted_cluster import EncryptedCluster
from tests.integration.published import DIM, N_IDS, PATIENCE_S, Churn, Published, Watch, published, user_table
from tests.warm_clusters import warm


@pytest.fixture
def local(require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    require_server("redis-server")
    with warm("valkey", shards=2) as made:
        yield made


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def push(table: kvemb.Table, ids: np.ndarray) -> None:
    table.push(ids, np.ones((len(ids), table.dim), np.float32), timeout_s=PATIENCE_S).wait_applied(PATIENCE_S)


@pytest.mark.parametrize(
    ("kind", "dtype", "target"),
    [("redis", "int8", "redis"), ("redis-cluster", "float16", "valkey"), ("memcached", "float32", "redis")],
)
def test_rows_are_published_from_the_row_log_and_then_as_they_change(
    require_server: Callable[[str], str], kind: str, dtype: str, target: str
) -> None:
    require_server("memcached" if kind == "memcached" else "redis-server")
    with (
        warm(kind, 3 if kind == "redis-cluster" else 1, shards=2) as local,
        kvemb.connect(local.url) as cluster,
        published(local, "--dtype", dtype, kind=target) as one,
    ):
        table = user_table(cluster)
        push(table, np.r_[-7, np.arange(N_IDS)])
        table.erase(np.arange(10))
        one.start()
        one.reach(cluster)
        one.check(cluster)
        push(table, np.arange(5, N_IDS + 100))
        table.erase(np.arange(20))
        table.assign(np.array([3]), np.full((1, DIM), 7.0, np.float32))
        one.reach(cluster)
        one.check(cluster)


def test_a_publisher_that_is_killed_at_any_point_goes_on_where_it_was(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster, published(local, "--dtype", "int8") as one:
        push(user_table(cluster), np.arange(N_IDS))
        with Churn(local.url) as churn:
            for _ in range(6):
                one.start()
                pause(random.uniform(0.5, 3.0))
                one.kill()
            one.start()
            n_steps = churn.n_steps
            wait_for(lambda: churn.n_steps > n_steps + 5)
        one.reach(cluster)
        one.check(cluster)


@pytest.mark.full
def test_a_target_that_comes_back_empty_or_older_is_brought_up_again(local: LocalCluster, tmp_path: Path) -> None:
    with kvemb.connect(local.url) as cluster, published(local) as one:
        table = user_table(cluster)
        push(table, np.arange(N_IDS))
        first = one.succeed()
        one.reach(cluster)
        with Churn(local.url):
            pause(1)
            one.client.flushall()
            pause(1)
            one.reach(cluster)
            one.client.save()
            snapshot = tmp_path / "older.rdb"
            snapshot.write_bytes(one.target.snapshot_path.read_bytes())
            first.kill()
            second = one.succeed()
            pause(1)
            one.target.restart(snapshot=snapshot)  # names the first publisher
            pause(1)
            one.reach(cluster)
            one.target.restart()
            pause(1)
        one.reach(cluster)
        one.check(cluster)
        assert second.poll() is None


def test_shards_are_killed_slots_move_and_a_checkpoint_is_loaded_meanwhile(local: LocalCluster, tmp_path: Path) -> None:
    with kvemb.connect(local.url) as cluster, published(local, "--dtype", "float16") as one:
        push(user_table(cluster), np.arange(0, N_IDS, 2))
        cluster.save(str(tmp_path / "saved"))
        one.start()
        with Churn(local.url):
            for shard in (0, 1):
                local.shards[shard].kill()
                local.start_shard(shard)
            moves = ShardMoves(local.url)
            for owners in (np.full(N_SLOTS, 1), equal_runs(32) % 2):
                moves.begin(owners)
                moves.wait()
            moves.close()
        one.reach(cluster)
        one.check(cluster)
        cluster.load(str(tmp_path / "saved"))
        with Churn(local.url, 2):
            pause(1)
        one.reach(cluster)
        one.check(cluster)


@pytest.mark.full
def test_rows_that_went_while_no_publisher_ran_go_also_where_nothing_is_known_of_them(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with (
        warm("valkey", journal_max_mb=1) as local,
        kvemb.connect(local.url) as cluster,
        published(local) as one,
    ):
        table = user_table(cluster)
        push(table, np.arange(N_IDS))
        one.start()
        one.reach(cluster)
        one.kill()
        table.erase(np.arange(100))
        for start in range(120):  # the journal is cut, and runs are merged
            push(table, np.arange(10_000) + 100_000 + 10_000 * (start % 2))
        one.start()
        one.reach(cluster)
        one.check(cluster)
        assert "tells every row again" in one.output.read_text()


def test_rows_of_the_target_that_are_looked_for_are_not_written_a_second_time(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster, published(local) as one:
        table = user_table(cluster)
        push(table, np.arange(N_IDS))
        one.start()
        one.reach(cluster)
        one.kill()
        table.erase(np.arange(100))
        record = json.loads(one.client.get("kvemb:projection:1/1"))
        one.client.set("kvemb:projection:1/1", json.dumps(record | {"position": None}))
        one.client.config_resetstat()
        one.start()
        one.reach(cluster)
        one.check(cluster)
        assert one.client.info("commandstats")["cmdstat_hset"]["calls"] < 1.5 * len(one.about()["keys"])  # one for each hash


def test_a_second_publisher_takes_over_and_the_first_ends(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster, published(local) as one:
        table = user_table(cluster)
        push(table, np.arange(100))
        first = one.start()
        said = one.output
        one.reach(cluster)
        one.start()
        assert first.wait(PATIENCE_S) in (1, 2)
        assert "another publisher has taken share 1/1 over" in said.read_text()
        push(table, np.arange(100))
        one.reach(cluster)
        one.check(cluster)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_no_row_goes_back_while_publishers_are_killed_paused_and_succeeded_and_slots_move(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster, published(local) as one:
        hasty = [HastyTrainer(local.url, "user", seed) for seed in (1, 2)]  # row i is as many times -1 as it was pushed
        moves = ShardMoves(local.url)
        try:
            paused = one.succeed()
            one.reach(cluster)
            with Watch(one) as watch:
                for turn in range(4):
                    said = one.output
                    pause(random.uniform(0.1, 1.0))
                    paused.send_signal(signal.SIGSTOP)
                    second = one.succeed()
                    n_pushed, n_looks = hasty[0].n_pushed, watch.n_looks
                    wait_for(lambda n=n_looks: watch.n_looks > n + 2 or watch.error)  # type: ignore[misc]
                    wait_for(lambda n=n_pushed: hasty[0].n_pushed > n + 20)  # type: ignore[misc]
                    paused.send_signal(signal.SIGCONT)
                    moves.begin(equal_runs(32) % 2 if turn % 2 else np.full(N_SLOTS, turn // 2))
                    moves.wait()
                    assert paused.wait(PATIENCE_S) == 1
                    assert "has taken share 1/1 over" in said.read_text()
                    second.kill()
                    paused = one.succeed()
        finally:
            moves.close()
            counts = sum(trainer.stop() for trainer in hasty)
        one.reach(cluster)
        one.check(cluster)
    assert watch.n_looks > 10
    assert counts.any()


@pytest.mark.full
def test_publishers_share_the_slots(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster, published(local) as one:
        table = user_table(cluster)
        push(table, np.arange(N_IDS))
        for part in ("1/3", "2/3", "3/3"):
            one.start("--part", part)
        with Churn(local.url):
            pause(2)
        one.reach(cluster, "1/3", "2/3", "3/3")
        one.check(cluster)
        one.kill()
        one.client.flushall()
        one.start("--part", "2/3")
        one.reach(cluster, "2/3")
        assert N_IDS / 4 < len(one.rows()) < N_IDS / 2.4


def test_a_table_that_is_dropped_goes_and_comes_again_in_its_new_form(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster, published(local) as one:
        push(user_table(cluster), np.arange(N_IDS))
        one.start()
        one.reach(cluster)
        cluster.drop_table("user")
        wait_for(lambda: not one.about())
        assert [key for key in one.client.keys("*") if b"{" in key] == []
        table = cluster.create_table("user", dim=2, optimizer=kvemb.optim.sgd(lr=0.1), expected_rows=100)
        push(table, np.arange(50, 100))
        wait_for(lambda: one.about().get("dim") == 2)
        one.reach(cluster)
        one.check(cluster)


def test_a_table_that_is_altered_again_while_its_rows_are_told_anew_is_published_as_it_is_then(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster, published(local) as one:
        push(user_table(cluster), np.arange(N_IDS))
        publisher = one.start()
        one.reach(cluster)
        for dim in (5, 6, 7, 5, 6, 7):
            cluster.alter_table("user", dim=dim, timeout_s=PATIENCE_S)
            pause(random.uniform(0, 1.5))
        wait_for(lambda: one.about().get("dim") == 7 or publisher.poll() is not None)
        one.reach(cluster)
        one.check(cluster)
        assert publisher.poll() is None


def test_a_full_target_is_waited_for_and_named_as_such(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster, published(local) as one:
        table = user_table(cluster)
        push(table, np.arange(N_IDS))
        one.client.config_set("maxmemory", 1)
        publisher = one.start()
        for _ in range(2):  # at its start, and later
            wait_for(lambda: f"target {one.target.address}: is out of memory" in one.output.read_text() or publisher.poll() is not None)
            assert publisher.poll() is None
            assert "journals" not in one.output.read_text()
            one.client.config_set("maxmemory", 0)
            one.reach(cluster)
            one.check(cluster)
            one.output.write_bytes(b"")
            one.client.config_set("maxmemory", 1)
            push(table, np.arange(N_IDS))
        one.client.config_set("maxmemory", 0)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_layout_nve_is_the_one_hash_that_nvidias_embedding_cache_reads(local: LocalCluster, dtype: str) -> None:
    """HGET of the key's 8 raw bytes in `nv_nve_table{id/partition}` gives the value, int8 with its float32 scale behind it.

    Source: github.com/NVIDIA/nv-embedding-cache, plugins/redis/src/redis_cluster_table.cpp (HKey, find_) and docs/c_api.md.
    """
    with kvemb.connect(local.url) as cluster, published(local, "--layout", "nve", "--dtype", dtype) as one:
        table = user_table(cluster)
        table.assign(np.array([-3, 258]), np.array([[1.0, -0.25, 0.0, 0.5], [2.0, 0.0, 0.0, -2.0]], np.float32))
        one.start()
        one.reach(cluster)
        one.check(cluster)
        fields = one.client.hgetall(b"nv_nve_table{0/0}")
        assert one.client.keys("nv_*") == [b"nv_nve_table{0/0}"]
    assert set(fields) == {b"\xfd" + 7 * b"\xff", b"\x02\x01" + 6 * b"\x00"}
    if dtype == "float32":
        assert fields[struct.pack("<q", -3)] == struct.pack("<4f", 1.0, -0.25, 0.0, 0.5)
    else:
        assert fields[struct.pack("<q", 258)] == struct.pack("<4bf", 127, 0, 0, -127, 2 / 127)


def test_the_record_says_until_when_all_that_was_applied_is_there(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster, published(local) as one:
        table = user_table(cluster)
        push(table, np.arange(N_IDS))
        one.start()

        def until() -> float:
            return float(json.loads(one.client.get("kvemb:projection:1/1") or b"{}").get("until", 0))

        wait_for(lambda: until() > 0)
        one.check(cluster)
        for _ in range(3):
            before_s = time.time()
            push(table, np.arange(0, N_IDS, 7))
            one.client.flushall()
            wait_for(lambda: until() != 0)
            one.check(cluster)
        assert until() > before_s


def refused(one: Published, *options: str) -> str:
    assert one.start(*options).wait(PATIENCE_S) in (1, 2)
    return one.output.read_text()


def test_a_target_that_cannot_be_one_is_refused_by_name(local: LocalCluster) -> None:
    with kvemb.connect(local.url) as cluster, published(local) as one:
        push(user_table(cluster), np.arange(10))
        assert "no table 'usr'" in refused(one, "--tables", "usr")
        assert "one hash, which one publisher writes" in refused(one, "--layout", "nve", "--part", "1/2")
        assert "is a storage node" in refused(one, "--to", f"redis://{local.servers[0].address}")
        assert "--password-env names" in refused(one, "--to", f"redis://u:secret@{one.target.address}")
        one.client.config_set("maxmemory-policy", "allkeys-lru")
        assert "maxmemory-policy is allkeys-lru" in refused(one)
        one.client.config_set("maxmemory-policy", "noeviction")
        assert one.client.dbsize() == 0
        one.start()
        one.reach(cluster)
        one.kill()
        assert "dtype 'float32', and this one has 'int8'" in refused(one, "--dtype", "int8")
        one.start()
        one.reach(cluster)
        one.check(cluster)


@pytest.mark.parametrize("away", ["target", "storage", "shards"])
def test_a_publisher_waits_at_its_start_for_what_is_away_and_says_so(away: str) -> None:
    with LocalCluster("valkey", shards=2) as local, kvemb.connect(local.url) as cluster, published(local) as one:
        push(user_table(cluster), np.arange(N_IDS))
        hung = {"target": [one.target.process], "storage": [node.process for node in local.servers], "shards": local.shards}[away]
        for process in hung:
            process.signal(signal.SIGSTOP)
        publisher = one.start()
        said = "is waited for" if away == "storage" else "the publisher waits: "  # the connection itself waits for storage
        wait_for(lambda: said in one.output.read_text())
        assert publisher.poll() is None
        for process in hung:
            process.signal(signal.SIGCONT)
        one.reach(cluster)
        one.check(cluster)


def test_a_target_is_reached_over_tls_as_a_user_that_may_do_what_is_documented(
    require_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_server("redis-server")
    with EncryptedCluster("redis", shards=1, memory_mb=64) as local, kvemb.connect(local.url) as cluster:
        table = user_table(cluster)
        push(table, np.arange(N_IDS))
        server = local.further_server()
        one = Published(local, server, "--to", f"rediss://writer@{server.tls_address}", "--password-env", "TARGET_PASSWORD")
        try:
            allowed = "+client +info +dbsize +get +set +exists +unlink +hset +hdel +hlen +hkeys +hscan"
            one.client.execute_command("ACL", "SETUSER", "writer", "on", ">secret", "~*", "&*", *allowed.split())
            monkeypatch.setenv("TARGET_PASSWORD", "wrong")
            assert "or --password-env of a projection's target: node" in refused(one)
            monkeypatch.setenv("TARGET_PASSWORD", "secret")
            one.start()
            one.reach(cluster)
            one.kill()
            table.erase(np.arange(10))
            one.client.delete("kvemb:projection:1/1")
            one.start()
            one.reach(cluster)
            one.check(cluster)
        finally:
            one.kill()
            server.process.kill()
