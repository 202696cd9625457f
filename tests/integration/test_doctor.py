"""`kvemb doctor` on real clusters, each with one thing wrong that a person may well do."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import yaml
from matrix import one_of
from shard_moves import ShardMoves
from test_cli import run

import kvemb
from kvemb.config import load
from kvemb.coordination.map_copies import MAP_NAME
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.processes import free_ports
from kvemb.local_cluster.storage_servers import start_servers
from kvemb.operate import cluster_status
from kvemb.operate.examination import examine
from kvemb.operate.findings import Finding
from kvemb.protocol.message_format import installed_version
from kvemb.schema.slots import N_SLOTS
from kvemb.stores.storage_kinds import KINDS
from tests.integration.tls_clusters import TlsCluster, running

pytestmark = pytest.mark.full  # commands and pages for operators, on clusters that something is wrong with

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def cluster(require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    require_server("redis-server")
    with LocalCluster("redis", 2, shards=2) as running:
        push(running)
        yield running


def push(cluster: LocalCluster) -> None:
    with kvemb.connect(cluster.url) as client:
        table = client.create_table("t", dim=2, optimizer=kvemb.optim.sgd(), exist_ok=True)
        table.push(np.arange(100), np.ones((100, 2)))
        table.flush()


def findings(config: Path, level: str = "error") -> dict[str, Finding]:
    """What the doctor found, by name."""
    found = examine(load(config, {}), installed_version()).findings
    assert all(one.mend and one.what for one in found)
    return {one.name: one for one in found if one.level == level}


def changed(cluster: LocalCluster, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The cluster's kvemb.yaml with something else in it."""
    tree = yaml.safe_load(cluster.config_path.read_text())
    change(tree)
    path = folder / "kvemb.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@contextmanager
def setting(cluster: LocalCluster, name: str, value: str) -> Iterator[str]:
    """One node with another setting."""
    with redis.Redis(port=cluster.servers[1].port) as node:
        before = node.config_get(name)[name]
        node.config_set(name, value)
        try:
            yield cluster.servers[1].address
        finally:
            node.config_set(name, before)


def test_a_cluster_that_is_well_needs_nothing(cluster: LocalCluster) -> None:
    done = run("doctor", str(cluster.config_path))
    assert (done.returncode, done.stdout) == (0, "2 nodes and 2 shards: nothing to mend\n"), done.stderr


def test_the_nodes_that_were_looked_at_are_counted_not_the_entries_of_the_file(cluster: LocalCluster, tmp_path: Path) -> None:
    def shorten(tree: dict[str, Any]) -> None:
        del tree["storage"]["nodes"][1:]

    done = run("doctor", str(changed(cluster, tmp_path, shorten)))
    assert done.stdout.splitlines()[-1].startswith("2 nodes and 2 shards: "), done.stdout


def test_scripts_learn_from_the_exit_code_and_from_json_what_is_wrong(cluster: LocalCluster, tmp_path: Path) -> None:
    path = str(changed(cluster, tmp_path, lambda tree: tree.update(cluster="other")))
    text, coded = run("doctor", path), run("doctor", "--json", path)
    assert (text.returncode, coded.returncode) == (1, 1)
    assert {(one["name"], one["level"]) for one in json.loads(coded.stdout)} == {("cluster-name", "error")}
    assert text.stdout.startswith("error: shard 0 (")
    assert "    Use the kvemb.yaml of that cluster" in text.stdout
    assert text.stdout.endswith("2 nodes and 2 shards: 2 errors, 0 warnings\n")
    with setting(cluster, "maxmemory", "0"):
        assert run("doctor", str(cluster.config_path)).returncode == 0


@pytest.mark.parametrize(
    ("name", "value", "found", "level", "mend"),
    [
        ("maxmemory-policy", "allkeys-lru", "node-eviction", "error", "CONFIG SET maxmemory-policy noeviction"),
        ("maxmemory", "0", "node-no-limit", "warning", "CONFIG SET maxmemory"),
        ("appendonly", "yes", "node-persistence", "warning", "appendonly no"),
        ("save", "3600 1000000", "node-persistence", "warning", 'CONFIG SET save ""'),
        ("maxclients", "100", "node-connections", "warning", "maxclients 10000"),
        ("client-output-buffer-limit", "normal 4194304 1048576 60", "node-client-limit", "warning", 'client-output-buffer-limit "normal 0'),
        ("maxmemory-clients", "8mb", "node-client-limit", "warning", "maxmemory-clients 0"),
    ],
)
def test_a_nodes_setting_is_named_with_its_mend(cluster: LocalCluster, name: str, value: str, found: str, level: str, mend: str) -> None:
    with setting(cluster, name, value) as address:
        seen = findings(cluster.config_path, level)
    assert seen.keys() == {found}
    assert seen[found].where == f"node {address}"
    assert mend in seen[found].mend


def test_limits_of_hashes_that_do_not_suit_a_table_are_named_with_what_to_type(cluster: LocalCluster) -> None:
    with kvemb.connect(cluster.url) as client:
        optimizer = kvemb.optim.sgd()
        client.create_table("small", dim=2, optimizer=optimizer, layout="compact", expected_rows=10_000, exist_ok=True)  # sets limits
    assert not findings(cluster.config_path, "warning")
    with setting(cluster, "hash-max-listpack-entries", "64") as address:
        seen = findings(cluster.config_path, "warning")
    assert seen.keys() == {"node-hash-limits"}
    assert seen["node-hash-limits"].where == f"node {address}"
    assert "table 'small'" in seen["node-hash-limits"].what
    assert "CONFIG SET hash-max-listpack-entries 128" in seen["node-hash-limits"].what


def test_a_node_that_is_nearly_full_is_named(cluster: LocalCluster) -> None:
    with redis.Redis(port=cluster.servers[1].port) as node:
        used = int(node.info("memory")["used_memory"])
    with setting(cluster, "maxmemory", str(int(used * 1.05))):
        assert findings(cluster.config_path).keys() == {"node-headroom"}


def test_a_table_that_grows_towards_a_full_node_is_named_unless_a_policy_bounds_it(cluster: LocalCluster) -> None:
    optimizer = kvemb.optim.sgd()
    with redis.Redis(port=cluster.servers[1].port) as node:
        used = int(node.info("memory")["used_memory"])
    with kvemb.connect(cluster.url) as client, setting(cluster, "maxmemory", str(int(used * 1.25))):
        for table in client.tables():
            if client.table(table).definition.num_ids is None:
                client.table(table).set_policies(eviction=kvemb.evict.keep(10**6))
        assert not findings(cluster.config_path, "warning")
        grows = client.create_table("grows", dim=2, optimizer=optimizer)
        client.create_table("dense", dim=2, optimizer=optimizer, num_ids=10)
        seen = findings(cluster.config_path, "warning")
        assert seen.keys() == {"table-grows"}
        assert seen["table-grows"].where == "table grows"
        grows.set_policies(eviction=kvemb.evict.older_than(days=30))
        assert not findings(cluster.config_path, "warning")


@pytest.mark.parametrize(
    ("section", "change", "found", "says"),
    [
        ("parameter_servers", lambda s: s["shards"].reverse(), "shard-swapped", "into their order. Where they are, end it"),
        ("parameter_servers", lambda s: s["shards"].pop(), "shard-count", "were started with"),
        ("parameter_servers", lambda s: s.update(mode="sync", trainers=2), "shard-mode", "same kvemb.yaml"),
        ("storage", lambda s: s.update(nodes=[s["nodes"][0], "no-such-host.invalid:6379"], insecure=True), "node-name", "or DNS"),
    ],
)
def test_a_file_that_is_not_the_clusters_is_told(
    cluster: LocalCluster, tmp_path: Path, section: str, change: Callable[[Any], object], found: str, says: str
) -> None:
    seen = findings(changed(cluster, tmp_path, lambda tree: change(tree[section])))
    assert seen.keys() == {found}
    assert says in seen[found].mend


def test_the_address_of_another_clusters_node_is_told(cluster: LocalCluster, tmp_path: Path) -> None:
    with LocalCluster("redis", 1, shards=1) as other:
        address = other.servers[0].address
        seen = findings(changed(cluster, tmp_path, lambda tree: tree["storage"]["nodes"].__setitem__(1, address)))
    assert seen.keys() == {"node-marker"}
    assert address in seen["node-marker"].what
    assert "not of this cluster" in seen["node-marker"].mend


def test_another_clusters_name_is_told(cluster: LocalCluster, tmp_path: Path) -> None:
    assert findings(changed(cluster, tmp_path, lambda tree: tree.update(cluster="other"))).keys() == {"cluster-name"}


def test_a_shard_that_was_started_with_another_file_is_told(cluster: LocalCluster, tmp_path: Path) -> None:
    port = cluster.servers[1].port
    path = changed(cluster, tmp_path, lambda tree: tree["storage"]["nodes"].__setitem__(1, f"localhost:{port}"))
    seen = findings(path, "warning")
    assert seen.keys() == {"other-file"}
    assert f"localhost:{port}" in seen["other-file"].what
    assert not findings(path)
    far = changed(cluster, tmp_path, lambda tree: tree["storage"]["nodes"].append("127.0.0.1:1"))
    assert findings(far, "warning")["other-file"].what.endswith("; none of the cluster's: 127.0.0.1:1")


def test_where_no_node_of_the_file_lives_nothing_is_said_of_the_clusters_own_addresses(cluster: LocalCluster, tmp_path: Path) -> None:
    dead = changed(cluster, tmp_path, lambda tree: tree["storage"].update(nodes=["127.0.0.1:1"]))
    assert "none of the cluster's" not in findings(dead, "warning")["other-file"].what


def test_the_order_of_nodes_is_free(cluster: LocalCluster, tmp_path: Path) -> None:
    assert run("doctor", str(changed(cluster, tmp_path, lambda tree: tree["storage"]["nodes"].reverse()))).returncode == 0
    assert not findings(tmp_path / "kvemb.yaml", "warning")


@pytest.mark.parametrize("kind", one_of("redis", "redis-cluster"))
def test_a_move_of_slots_between_shards_that_stands_is_told_with_what_to_run(kind: str, require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster(kind, KINDS[kind].least_nodes, shards=2) as cluster:
        push(cluster)
        cluster.shards[1].kill()
        with closing(ShardMoves(cluster.url)) as moves:
            moves.begin(np.zeros(N_SLOTS))
        held = findings(cluster.config_path, "warning")
        assert held.keys() == {"slots-move"}
        assert "8,192 slots move between shards: moving" in held["slots-move"].what
        assert "waits for shard 1" in held["slots-move"].what
        assert "kvemb moves abort" in held["slots-move"].mend
        cluster.shards[0].kill()
        assert "shard 0, which carries the move, does not answer" in findings(cluster.config_path, "warning")["slots-move"].what


def test_what_is_down_is_told_with_what_becomes_of_its_rows(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster("redis", 2, shards=2) as cluster:
        cluster.shards[1].kill()
        assert findings(cluster.config_path).keys() == {"shard-unreachable"}
        with redis.Redis(port=cluster.servers[0].port) as node:
            node.flushall()
        deadline = time.monotonic() + PATIENCE_S
        while "node-repair" not in findings(cluster.config_path, "warning"):
            assert time.monotonic() < deadline
        assert {"shard-unreachable", "node-lost"} <= findings(cluster.config_path).keys()
        cluster.start_shard(1)
        deadline = time.monotonic() + PATIENCE_S
        while findings(cluster.config_path):
            assert time.monotonic() < deadline
        cluster.servers[1].process.kill()
        seen = findings(cluster.config_path)
        assert seen["node-unreachable"].where == f"node {cluster.servers[1].address}"


def test_a_slow_node_is_called_slow_and_one_that_hangs_hides_no_other(cluster: LocalCluster, tmp_path: Path) -> None:
    path = changed(cluster, tmp_path, lambda tree: tree["storage"].update(timeout_s=1))
    slow = cluster.servers[0]
    wakes = threading.Timer(4.0, os.kill, (slow.process.pid, signal.SIGCONT))  # longer than a batch may take, shorter than the doctor waits
    os.kill(slow.process.pid, signal.SIGSTOP)
    wakes.start()
    found = examine(load(path, {}), installed_version()).findings
    wakes.join()
    of_nodes = {(one.name, one.where) for one in found if one.where.startswith(("node", "storage"))}
    assert of_nodes == {("node-slow", f"node {slow.address}")}
    os.kill(slow.process.pid, signal.SIGSTOP)
    try:
        seen = findings(path)
    finally:
        os.kill(slow.process.pid, signal.SIGCONT)
    assert {one.where for one in seen.values() if one.where.startswith("node")} == {f"node {slow.address}"}
    assert "takes connections" in seen["node-hangs"].what


def test_a_shard_that_hangs_is_told_from_one_that_is_gone(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster("redis", 1, shards=2) as cluster:
        os.kill(cluster.shards[0].pid, signal.SIGSTOP)
        cluster.shards[1].kill()
        try:
            seen = findings(cluster.config_path)
        finally:
            os.kill(cluster.shards[0].pid, signal.SIGCONT)
        (cluster.folder / "shards/shard-1.last-words").write_text("ConfigError: no room")
        ended = findings(cluster.config_path)["shard-unreachable"]
    assert f"(kill -9 {cluster.shards[0].pid} on {socket.gethostname()}), then start the shard as always" in seen["shard-hangs"].mend
    assert ended.what.endswith("ConfigError: no room")
    assert ended.mend.startswith("Mend what its last words name, then start it: kvemb shard --shard 1")
    assert seen["shard-unreachable"].mend.startswith("Start it: kvemb shard --shard 1")
    assert "No process listens there" in seen["shard-unreachable"].what
    assert seen["shard-unreachable"].where.startswith("shard 1 ")


def test_nodes_without_a_cluster_are_told_as_such(require_server: Callable[[str], str], tmp_path: Path) -> None:
    require_server("redis-server")
    servers = start_servers("redis", 2, tmp_path, 64)
    try:
        (shard,) = free_ports(1)
        path = tmp_path / "kvemb.yaml"
        storage = {"kind": "redis", "nodes": [server.address for server in servers], "timeout_s": 1}
        path.write_text(yaml.safe_dump({"cluster": "c", "storage": storage, "parameter_servers": {"shards": [f"127.0.0.1:{shard}"]}}))
        seen = findings(path)
    finally:
        for server in servers:
            server.process.kill()
    assert seen.keys() == {"not-provisioned", "shard-unreachable"}
    assert "shard 0 provisions empty nodes" in seen["not-provisioned"].mend


def test_a_node_that_was_restarted_from_a_snapshot_is_told(require_server: Callable[[str], str], tmp_path: Path) -> None:
    require_server("redis-server")
    with LocalCluster("redis", 2, shards=1) as cluster:
        push(cluster)
        cluster.shards[0].kill()  # it would find the node out, and mend it
        with redis.Redis(port=cluster.servers[1].port) as node:
            node.save()
        snapshot = shutil.copy(cluster.servers[1].snapshot_path, tmp_path)
        cluster.servers[1].restart(snapshot=Path(snapshot))
        seen = findings(cluster.config_path)
        assert seen.keys() == {"node-suspect", "shard-unreachable"}
        assert cluster.servers[1].address in seen["node-suspect"].what
        assert "they compare its rows" in seen["node-suspect"].mend


def test_what_has_no_name_of_its_own_is_told_with_its_message(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster("redis", 2, shards=1) as cluster:
        cluster.shards[0].kill()
        for server in cluster.servers:
            with redis.Redis(port=server.port) as node:
                node.set(MAP_NAME, b"another program's")
        seen = findings(cluster.config_path)
    assert seen.keys() == {"storage", "shard-unreachable"}
    assert MAP_NAME in seen["storage"].what


def test_a_node_that_follows_another_one_is_no_place_for_rows(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster("redis", 2, shards=1) as cluster, redis.Redis(port=cluster.servers[1].port) as node:
        node.replicaof("127.0.0.1", cluster.servers[0].port)
        seen = findings(cluster.config_path)
        node.replicaof("NO", "ONE")
    assert "REPLICAOF NO ONE" in seen["node-replica"].mend


def test_evictions_that_have_happened_are_told_though_the_setting_is_right_again(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster("redis", 1, shards=1) as cluster, redis.Redis(port=cluster.servers[0].port) as node:
        node.config_set("maxmemory-policy", "volatile-ttl")
        node.config_set("maxmemory", "3mb")
        for number in range(4000):
            node.set(f"stranger:{number}", b"x" * 1000, ex=1000)
        node.config_set("maxmemory", "1gb")
        node.config_set("maxmemory-policy", "noeviction")
        seen = findings(cluster.config_path)
    assert f"kvemb repair --node {cluster.servers[0].address}" in seen["node-evicted"].mend


def test_a_password_that_is_not_given_is_told(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster("redis", 1, shards=1) as cluster, redis.Redis(port=cluster.servers[0].port) as node:
        node.config_set("requirepass", "secret")
        seen = findings(cluster.config_path)
        node.config_set("requirepass", "")
    assert "password_env name" in seen["node-password"].mend


def test_a_memcached_that_may_lose_rows_is_told(require_server: Callable[[str], str], tmp_path: Path) -> None:
    node, shard = free_ports(2)
    path = tmp_path / "kvemb.yaml"
    path.write_text(
        f"cluster: c\nstorage: {{kind: memcached, nodes: ['127.0.0.1:{node}'], timeout_s: 1}}\n"
        f"parameter_servers: {{shards: ['127.0.0.1:{shard}'], data_dir: {tmp_path}/data}}\n"
    )
    words = [require_server("memcached"), "-u", "nobody", "-l", "127.0.0.1", "-p", str(node), "-c", "100"]
    with subprocess.Popen(words) as server:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while "node-unreachable" in (seen := findings(path)):
                assert time.monotonic() < deadline
            warnings = findings(path, "warning")
        finally:
            server.terminate()
    assert seen.keys() == {"node-eviction", "shard-unreachable"}
    assert "-M -o no_slab_reassign" in seen["node-eviction"].mend
    assert warnings.keys() == {"node-lru-maintainer", "node-connections"}


def test_a_shards_disk_files_and_durability_are_told() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))  # what the cluster's processes are started with
    try:
        with LocalCluster("valkey", 1, shards=1, durability="os", journal_max_mb=(1 << 24) - 1) as cluster:
            errors, warnings = findings(cluster.config_path), findings(cluster.config_path, "warning")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert errors.keys() == {"open-files", "disk-space"}
    assert "ulimit -n" in errors["open-files"].mend
    assert "journal_max_mb" in errors["disk-space"].mend
    assert "durability" in warnings


def test_a_reader_may_ask_shards_that_speak_tls(require_server: Callable[[str], str], tmp_path: Path) -> None:
    require_server("redis-server")
    with running(TlsCluster(tmp_path)) as secured:
        found = examine(load(secured.as_seen_by(secured.issue("reader/oncall", name="oncall")), {}), installed_version()).findings
    assert [one.name for one in found if one.level == "error"] == []


def test_a_look_at_the_cluster_names_silent_machines_soon_however_long_training_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_status, "LOOK_S", 0.5)
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
    ):  # they take connections, and answer nothing
        node, shard_address = (f"127.0.0.1:{silent.getsockname()[1]}" for silent in (first, second))
        (tmp_path / "kvemb.yaml").write_text(f"""
cluster: c
storage: {{kind: memcached, nodes: ["{node}"], timeout_s: 600, insecure: true}}
parameter_servers: {{shards: ["{shard_address}"], insecure: true}}
""")
        config = load(tmp_path / "kvemb.yaml", {})
        began = time.monotonic()
        (shard,) = cluster_status.survey(config).shards
        found = {finding.name for finding in examine(config, installed_version()).findings}
        assert time.monotonic() - began < 60
    assert "no answer" in shard.error
    assert {"shard-hangs", "node-hangs"} <= found
