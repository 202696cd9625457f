"""`kvemb nodes`, `kvemb moves` and `kvemb config` against real clusters."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest
import yaml
from matrix import one_of
from moving_load import further_node
from moving_slots import Mover

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.errors import InvalidInputError, StorageError
from kvemb.local_cluster import LocalCluster, storage_servers
from kvemb.local_cluster.processes import free_ports
from kvemb.local_cluster.storage_servers import StorageServer
from kvemb.schema.slots import N_SLOTS
from tests.integration.scraped import ports_side_by_side, until, value
from tests.real_servers import memcached_client, redis_client

pytestmark = pytest.mark.full  # commands and pages for operators, on clusters that something is wrong with

IDS = np.arange(5000)
PATIENCE_S = 90.0
LESS = ["-I", "512k"]


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvemb.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL)


def fill(local: LocalCluster) -> np.ndarray:
    with kvemb.connect(local.url) as cluster:
        table = cluster.create_table("t", dim=4, optimizer=kvemb.optim.adam(lr=0.1))
        table.push(IDS, np.ones((len(IDS), 4), np.float32)).wait_applied(PATIENCE_S)
        rows: np.ndarray = table.pull(IDS)
        return rows


def require_rows(local: LocalCluster, rows: np.ndarray) -> None:
    with kvemb.connect(local.url, read_only=True) as cluster:
        np.testing.assert_array_equal(cluster.table("t").pull(IDS, timeout_s=PATIENCE_S), rows)


def test_a_node_joins_and_is_replaced_when_dead_and_what_is_asked_for_is_said_before(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    with LocalCluster("redis", 2, shards=2, memory_mb=64) as local, further_node(local) as third, further_node(local) as fourth:
        rows, path = fill(local), str(local.config_path)
        dry = run("nodes", "add", path, third.address, "--dry-run")
        assert dry.returncode == 0
        assert f"joins: {third.address}" in dry.stdout
        unasked = run("nodes", "add", path, third.address)
        assert (unasked.returncode, third.address in run("nodes", path).stdout) == (1, False)
        assert "say --yes" in unasked.stderr
        no_port = run("nodes", "add", path, "localhost", "--dry-run")
        assert (no_port.returncode, no_port.stderr) == (2, "kvemb nodes: add: got 'localhost', expected host:port\n")
        nobody = run("nodes", "add", path, f"127.0.0.1:{free_ports(1)[0]}", "--yes")
        assert nobody.returncode == 1
        assert nobody.stderr.endswith("Nothing was changed.\n")

        done = run("nodes", "add", path, third.address, "--yes")
        assert done.returncode == 0, done.stderr
        assert third.address in run("nodes", "show", path).stdout
        now = yaml.safe_load(run("config", "show", path).stdout)
        assert now["storage"]["nodes"] == [*(server.address for server in local.servers), third.address]
        assert "nothing moves" in run("moves", path).stdout
        assert run("nodes", "rebalance", path).stdout.strip() == "nothing has to move"
        require_rows(local, rows)

        third.process.kill()
        replaced = run("nodes", "replace", path, third.address, fourth.address, "--yes")
        assert replaced.returncode == 0, replaced.stderr
        require_rows(local, rows)
        assert fourth.address in run("status", path).stdout


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (("nodes", "remove", "PATH", "127.0.0.1:1", "--yes"), "is none of the cluster's", 1),
        (("nodes", "add", "PATH", "NODE", "--yes"), "is one of the cluster's already", 1),
        (("nodes", "add", "PATH"), "give host:port of the node", 2),
        (("nodes", "grow", "PATH"), "'grow' is none of show, add", 2),
        (("nodes", "rebalance", "PATH", "--weights", "NODE"), "give shares as ADDR=2", 2),
        (("moves", "abort", "PATH"), "no move is under way", 1),
        (("moves", "show", "PATH", "more"), "takes nothing but the path", 2),
    ],
)
def test_what_cannot_be_done_is_one_line_and_changes_nothing(words: tuple[str, ...], says: str, code: int, cluster: LocalCluster) -> None:
    found = {"PATH": str(cluster.config_path), "NODE": cluster.servers[0].address}
    done = run(*(found.get(word, word) for word in words))
    assert done.returncode == code
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "map is of version 1" in run("moves", str(cluster.config_path)).stdout


def test_a_memcached_that_takes_smaller_items_gets_no_table_that_it_cannot_hold_and_does_not_join_one(
    require_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_server("memcached")
    small, command = set[int](), StorageServer._command
    monkeypatch.setattr(StorageServer, "_command", lambda self: [*command(self), *(LESS if self.port in small else [])])
    with LocalCluster("memcached", 3, shards=2, memory_mb=64) as local, kvemb.connect(local.url) as cluster:
        table = cluster.create_table("t", dim=4, optimizer=kvemb.optim.sgd(lr=1.0))

        def restart(server: StorageServer, *less: int) -> None:
            small.clear()
            small.update(less)
            server.restart()
            table.push(IDS, np.ones((len(IDS), 4)), timeout_s=PATIENCE_S).wait_applied(PATIENCE_S)

        for server in local.servers[:2]:
            restart(server, server.port)
            with pytest.raises(InvalidInputError, match=f"node {server.address}: takes records of at most .*'wide' have"):
                cluster.create_table("wide", dim=60_000, optimizer=kvemb.optim.adam(lr=0.1))
            restart(server)
        wide = cluster.create_table("wide", dim=60_000, optimizer=kvemb.optim.adam(lr=0.1))
        wide.push(IDS[:9], np.ones((9, 60_000)), timeout_s=PATIENCE_S).wait_applied(PATIENCE_S)
        small.add(port := free_ports(1)[0])
        monkeypatch.setattr(storage_servers, "free_ports", lambda n: [port])
        with further_node(local) as fourth:
            for words in (("add", fourth.address), ("replace", local.servers[2].address, fourth.address)):
                done = run("nodes", words[0], str(local.config_path), *words[1:], "--yes")
                assert done.returncode == 1
                assert f"node {fourth.address}: takes records of at most" in done.stderr
                assert "map is of version 1" in run("moves", str(local.config_path)).stdout
        wide.push(IDS[:9], np.ones((9, 60_000)), timeout_s=PATIENCE_S).wait_applied(PATIENCE_S)


@pytest.mark.parametrize("kind", one_of("redis", "redis-cluster", "memcached"))
def test_each_nodes_share_of_the_traffic_is_what_its_own_counters_gained(kind: str, require_server: Callable[[str], str]) -> None:
    require_server("memcached" if kind == "memcached" else "redis-server")
    with LocalCluster(kind, 3, shards=1, memory_mb=64) as local:
        busy, ended = local.servers[1], threading.Event()

        def load() -> None:
            if kind == "memcached":
                with closing(memcached_client(busy)) as client:
                    while not ended.is_set():
                        client.set("junk", bytes(500_000), noreply=False)
            else:
                with redis_client(busy) as client:
                    while not ended.is_set():
                        client.echo(bytes(500_000))

        thread = threading.Thread(target=load)
        thread.start()
        try:
            told = run("nodes", str(local.config_path))
        finally:
            ended.set()
            thread.join()
        assert told.returncode == 0, told.stderr
        (line,) = [line for line in told.stdout.splitlines() if busy.address in line]
        share = re.search(r"(\d+)%, [\d.,]+ MB/s", line)
        assert share is not None, told.stdout
        assert int(share[1]) > 80


@pytest.fixture(scope="module")
def cluster(require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    require_server("redis-server")
    with LocalCluster("redis", 2, shards=1, memory_mb=64) as running:
        yield running


def test_of_a_redis_cluster_the_commands_of_redis_cli_are_printed_and_slots_that_stand_open_are_told(
    require_server: Callable[[str], str],
) -> None:
    require_server("redis-server")
    port = ports_side_by_side(1)
    with LocalCluster("redis-cluster", 3, shards=1, memory_mb=64, metrics_port=port) as local, ExitStack() as stack:
        rows, path, mover = fill(local), str(local.config_path), Mover(local, stack)
        there, leaving = (server.address for server in local.servers[:2])
        name = mover.names[1]
        printed = {words[0]: run("nodes", words[0], path, *words[1:]).stdout.splitlines()[1:] for words in (
            ("add", "127.0.0.1:1"), ("remove", leaving), ("replace", leaving, "127.0.0.1:1"), ("rebalance", "--weights", f"{leaving}=2"))
        }  # fmt: skip
        start = "redis-cli --cluster"
        joins = [f"{start} add-node 127.0.0.1:1 {there}", "sleep 15", f"{start} rebalance {there} --cluster-use-empty-masters"]
        assert printed["add"] == joins
        leaves = [f"{start} rebalance {there} --cluster-weight {name}=0", f"{start} del-node {there} {name}"]
        assert printed["remove"] == leaves
        assert printed["replace"] == [*joins[:2], f"{joins[2]} --cluster-weight {name}=0", leaves[1]]
        assert printed["rebalance"] == [f"{start} rebalance {there} --cluster-weight {name}=2"]
        refused = run("nodes", "remove", path, "127.0.0.1:1")
        assert refused.returncode != 0
        assert "is no primary that has slots" in refused.stderr
        assert leaving in run("nodes", path).stdout

        slot = 5 + N_SLOTS // 3
        mover.begin(slot, 0)
        told = run("doctor", path).stdout
        assert f"stand open between two nodes, which serve them together ({slot})" in " ".join(told.split())
        assert f"({slot})" in run("status", path).stdout
        until(lambda: value(port, "kvemb_nodes_open_slots") == 1)
        require_rows(local, rows)
        fix = re.search(r"redis-cli --cluster fix \S+ --cluster-replace", told)
        assert fix is not None, told
        subprocess.run([*fix[0].split(), "--cluster-yes"], check=True, capture_output=True, timeout=PATIENCE_S)
        assert "stand open" not in run("doctor", path).stdout
        require_rows(local, rows)


@pytest.mark.parametrize("kind", one_of("redis-cluster", "redis", "memcached"))
def test_shards_and_trainers_go_on_where_no_node_is_left_that_the_file_names(kind: str, require_server: Callable[[str], str]) -> None:
    require_server("memcached" if kind == "memcached" else "redis-server")
    with LocalCluster(kind, 3, shards=1, memory_mb=64) as local:
        named, path = local.servers[0], local.config_path
        config = yaml.safe_load(path.read_text())
        config["storage"]["nodes"] = [named.address]
        path.write_text(yaml.safe_dump(config))
        with kvemb.connect(local.url) as cluster:
            table = cluster.create_table("t", dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())

            def push(n_before: int) -> None:
                table.push(IDS, np.ones((len(IDS), 4), np.float32)).wait_applied(PATIENCE_S)
                np.testing.assert_array_equal(table.pull(IDS, timeout_s=PATIENCE_S), np.full((len(IDS), 4), -n_before - 1, np.float32))

            push(0)
            removed = run("nodes", "remove", str(path), named.address, "--yes")
            assert removed.returncode == 0, removed.stderr
            for command in removed.stdout.splitlines()[1:] if kind == "redis-cluster" else ():
                subprocess.run(command.split(), check=True, capture_output=True, timeout=900)
            named.process.kill()
            push(1)
            for server in local.servers[1:]:  # every connection has an error
                server.process.signal(signal.SIGSTOP)
                with pytest.raises(StorageError):
                    table.pull(IDS, timeout_s=1.0)
                server.process.signal(signal.SIGCONT)
            push(2)
            local.shards[0].kill()
            local.start_shard(0)
            push(3)
