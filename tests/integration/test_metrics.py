"""What Prometheus scrapes from real shards and trainers on real servers."""

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import redis
from prometheus_client import CollectorRegistry, generate_latest
from scraped import ports_side_by_side, program, text, until, value

import kvemb
from kvemb.errors import ConfigError
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.storage_servers import start_servers

pytestmark = pytest.mark.full  # commands and pages for operators, on clusters that something is wrong with


@pytest.fixture(scope="module")
def port() -> int:
    return ports_side_by_side(2)


@pytest.fixture(scope="module")
def running(port: int) -> Iterator[LocalCluster]:
    with LocalCluster("valkey", 2, shards=2, metrics_port=port) as started:
        yield started


def push(client: kvemb.Cluster, n: int = 1000, table: str = "t") -> None:
    opened = client.create_table(table, dim=4, optimizer=kvemb.optim.sgd(lr=1.0), exist_ok=True)
    _, versions = opened.pull(np.arange(n), return_versions=True)
    opened.push(np.arange(n), np.ones((n, 4)), versions=versions)
    opened.flush()


def test_every_shard_serves_its_figures_on_a_port_of_its_own(running: LocalCluster, port: int) -> None:
    with kvemb.connect(running.url, trainer="anna") as client:
        push(client)
        assert value(port, "kvemb_shard_trainer_connected", trainer="anna") == 1
        name = client.config.cluster
    rows = [value(port + shard, "kvemb_shard_rows", cluster=name, shard=str(shard), table="t") for shard in range(2)]
    assert sum(rows) == 1000
    for at, n_rows in zip((port, port + 1), rows, strict=True):
        assert value(at, "kvemb_shard_rows_applied_total") == n_rows
        assert value(at, "kvemb_shard_apply_seconds_count") >= 1
        assert value(at, "kvemb_push_staleness_batches_bucket", le="0.0") == 1
        assert value(at, "kvemb_shard_ready") == 1
        assert value(at, "kvemb_shard_journal_bytes") > 0
        for server in running.servers:
            assert value(at, "kvemb_node_up", node=server.address) == 1
            assert (
                0 < value(at, "kvemb_node_headroom_bytes", node=server.address) < value(at, "kvemb_node_limit_bytes", node=server.address)
            )
            assert value(at, "kvemb_node_marker_state", node=server.address, state="whole") == 1


def test_the_names_are_as_prometheus_wants_them(running: LocalCluster, port: int) -> None:
    with kvemb.connect(running.url) as client:
        push(client)
    checked = subprocess.run([program("promtool"), "check", "metrics"], input=text(port), capture_output=True, text=True, check=False)
    ours = [line for line in (checked.stdout + checked.stderr).splitlines() if "kvemb" in line]
    assert not ours
    assert checked.returncode == 0, checked.stderr


def test_a_trainer_serves_the_times_of_its_pulls_by_table_until_it_is_closed(running: LocalCluster) -> None:
    own = ports_side_by_side(1)
    with kvemb.connect(running.url, trainer="berta", metrics_port=own) as client:
        push(client, 10, "u")
        push(client, 10, "v")
        client.pull({"u": np.arange(5), "v": np.arange(3)})
        with pytest.raises(ConfigError, match="served already"):
            client.serve_metrics(own + 1)
        with pytest.raises(ConfigError, match=f"{own} cannot be listened on: .* a port of its own"):
            kvemb.connect(running.url, trainer="carla", metrics_port=own)
        for table in "uv":
            assert value(own, "kvemb_pull_seconds_count", trainer="berta", table=table) == 2
        assert value(own, "kvemb_trainer_undelivered_pushes") == 0
    with pytest.raises(OSError, match="refused"):
        text(own)


def test_a_registry_of_the_users_own_takes_the_collector_and_a_reader_has_one_too(running: LocalCluster) -> None:
    with kvemb.connect(running.url) as client:
        push(client, 10)
    with kvemb.connect(running.url, read_only=True) as client:
        registry = CollectorRegistry()
        registry.register(client.metrics_collector())
        client.table("t").pull(np.arange(5))
        name = client.config.cluster
        assert registry.get_sample_value("kvemb_pull_seconds_count", {"cluster": name, "trainer": "", "table": "t"}) == 1
        assert b"kvemb_pull_seconds_bucket" in generate_latest(registry)


def test_a_connection_times_no_pull_unless_somebody_wants_to_know(running: LocalCluster) -> None:
    with kvemb.connect(running.url) as client:
        push(client, 10)
        registry = CollectorRegistry()
        registry.register(client.metrics_collector())
        assert registry.get_sample_value("kvemb_pull_seconds_count", {"cluster": client.config.cluster}) is None


def test_a_flushed_node_is_seen_until_it_is_whole_again_and_the_repair_is_counted(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    port = ports_side_by_side(1)
    with LocalCluster("redis", 2, shards=1, metrics_port=port) as cluster, kvemb.connect(cluster.url) as client:
        push(client)
        lost = cluster.servers[1]
        host, _, at = lost.address.rpartition(":")
        redis.Redis(host, int(at)).flushall()
        until(lambda: value(port, "kvemb_shard_repaired_nodes_total") == 1)
        until(lambda: value(port, "kvemb_node_marker_state", node=lost.address, state="whole") == 1)
        assert value(port, "kvemb_shard_repaired_rows_total") > 0
        lost.process.kill()
        until(lambda: value(port, "kvemb_node_up", node=lost.address) == 0)
        assert value(port, "kvemb_node_marker_state", node=lost.address, state="unknown") == 1
        assert value(port, "kvemb_node_keys", node=lost.address) is None
        assert value(port, "kvemb_node_keys", node=cluster.servers[0].address) > 0


def test_a_node_that_joins_is_watched_and_what_was_moved_there_is_counted(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    port = ports_side_by_side(1)
    with LocalCluster("redis", 2, shards=1, metrics_port=port) as cluster, kvemb.connect(cluster.url) as client:
        push(client)
        (third,) = start_servers("redis", 1, cluster.folder, 64)
        try:
            version = value(port, "kvemb_shard_map_version")
            assert value(port, "kvemb_shard_moving", phase="moving") == 0
            plan = client.nodes.add(third.address)
            client.nodes.begin(plan)
            client.nodes.wait(timeout_s=60.0)
            until(lambda: value(port, "kvemb_shard_map_version") > version)
            assert value(port, "kvemb_shard_moved_rows_total", what="copied") == plan.n_rows
            until(lambda: value(port, "kvemb_node_up", node=third.address) == 1)
        finally:
            third.process.kill()


def test_strangers_who_hold_the_port_cost_a_few_threads_and_no_more(running: LocalCluster) -> None:
    own = ports_side_by_side(1)
    with kvemb.connect(running.url, metrics_port=own), ExitStack() as stack:
        before = threading.active_count()
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", own), 30)) for _ in range(40)]
        for one in silent[8:]:
            assert one.recv(1) == b""  # hung up on
        until(lambda: threading.active_count() <= before + 8)  # one that was hung up on may take a moment to end
        for one in silent[:8]:
            one.close()
        until(lambda: "kvemb_trainer_undelivered_pushes" in answer(own))


def answer(port: int) -> str:
    try:
        return text(port)
    except OSError:
        return ""


def test_a_save_is_counted_and_dated(running: LocalCluster, port: int, tmp_path: Path) -> None:
    with kvemb.connect(running.url) as client:
        push(client)
        assert value(port, "kvemb_shard_last_save_timestamp_seconds") is None
        assert value(port, "kvemb_shard_created_timestamp_seconds") > 1.6e9
        client.save(str(tmp_path / "saved"))
    assert value(port, "kvemb_shard_saves_total", outcome="done") == 1
    assert value(port, "kvemb_shard_saves_total", outcome="failed") == 0
    assert value(port, "kvemb_shard_last_save_timestamp_seconds") > 1.6e9


def test_a_sync_step_that_waits_for_a_trainer_is_seen() -> None:
    port = ports_side_by_side(1)
    with LocalCluster("valkey", 1, shards=1, mode="sync", trainers=2, metrics_port=port) as cluster, ExitStack() as stack:
        first, second = (stack.enter_context(kvemb.connect(cluster.url, trainer=trainer)) for trainer in "ab")
        tables = [one.create_table("t", dim=4, optimizer=kvemb.optim.sgd(lr=1.0), exist_ok=True) for one in (first, second)]
        for table in tables:
            table.push(np.arange(9), np.ones((9, 4)))
        first.flush()
        tables[0].push(np.arange(9), np.ones((9, 4)))
        until(lambda: value(port, "kvemb_shard_step_wait_seconds") > 0.2)
        tables[1].push(np.arange(9), np.ones((9, 4)))
        first.flush()
        assert value(port, "kvemb_shard_step_wait_seconds") == 0
