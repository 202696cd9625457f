"""A storage node that is lost and replaced at another address, as docs/operations.md says: programs that run find it by kvemb.yaml."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matrix import one_of

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.config import load
from kvemb.errors import NodeSuspectError, NodeUnavailableError, StorageError, WrongNodeError
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.processes import LocalProcess, python_env
from kvemb.local_cluster.storage_servers import start_servers
from kvemb.net.deadline import Deadline
from kvemb.stores.row_io import ReadPart
from kvemb.stores.standalone.node_store import NodeStore
from kvemb.stores.storage_kinds import open_store
from kvemb.testing.store_contract import CLUSTER, GENERATION, SIZE, records_of, row_keys, within, write
from tests.real_servers import ServerNodes

PATIENCE_S = 60.0
ROOT = Path(__file__).parents[2]
IDS, DIM = np.arange(3000), 4
KINDS = {"redis": "redis-server", "memcached": "memcached"}


@pytest.fixture(params=one_of("memcached", "redis"))
def kind(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> str:
    require_server(KINDS[request.param])
    return str(request.param)


def edit(local: LocalCluster, nodes: list[str]) -> None:
    tree = yaml.safe_load(local.config_path.read_text(encoding="utf-8"))
    tree["storage"]["nodes"] = nodes
    local.config_path.write_text(yaml.safe_dump(tree), encoding="utf-8")


def replace_node(local: LocalCluster, number: int) -> None:
    """What an operator does, in that order."""
    local.servers[number].process.kill()
    (local.servers[number],) = start_servers(local.store, 1, local.folder, 64)
    edit(local, [server.address for server in local.servers])
    for shard, process in enumerate(local.shards):
        process.stop(grace_s=60.0)
        local.launch_shard(shard)


def new_table(cluster: "kvemb.Cluster") -> "kvemb.Table":
    return cluster.create_table("t", dim=DIM, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.normal())


def n_steps(folder: Path) -> int:
    return int((folder / "steps").read_text(encoding="utf-8")) if (folder / "steps").exists() else 0


def test_a_running_trainer_finds_a_node_that_was_replaced_at_a_new_address(kind: str, tmp_path: Path) -> None:
    with LocalCluster(kind, 2, shards=2, memory_mb=64) as local, kvemb.connect(local.url) as cluster:
        new_table(cluster).push(IDS, np.ones((len(IDS), DIM), np.float32)).wait_applied(PATIENCE_S)
        command = [sys.executable, str(Path(__file__).with_name("following_trainer.py")), str(local.config_path), str(tmp_path)]
        trainer = LocalProcess("trainer", command, tmp_path / "log", {**python_env(), "PYTHONPATH": str(ROOT)})
        try:
            trainer.wait_until(lambda: n_steps(tmp_path) >= 3, Deadline.after(PATIENCE_S))
            replace_node(local, 1)
            replaced_at = n_steps(tmp_path)
            trainer.wait_until(lambda: n_steps(tmp_path) >= replaced_at + 3, Deadline.after(2 * PATIENCE_S))
            (tmp_path / "end").touch()
            deadline = Deadline.after(PATIENCE_S)
            while trainer.poll() is None:
                assert deadline.remaining_s() > 0, trainer.log_tail()
                time.sleep(0.05)
            assert trainer.poll() == 0, trainer.log_tail()
        finally:
            trainer.kill()
        # A program that slept through all of it goes on, too.
        np.testing.assert_array_equal(cluster.table("t").pull(IDS, timeout_s=PATIENCE_S), np.load(tmp_path / "expected.npy"))


@pytest.mark.full
def test_a_client_that_fails_at_once_follows_with_its_next_pull(kind: str) -> None:
    with LocalCluster(kind, 2, memory_mb=64) as local:
        tree = yaml.safe_load(local.config_path.read_text(encoding="utf-8"))
        tree["storage"]["on_lost_node"] = "fail"
        local.config_path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        with kvemb.connect(local.url) as cluster, kvemb.connect(local.url, read_only=True) as reader:
            new_table(cluster).push(IDS, np.ones((len(IDS), DIM), np.float32)).wait_applied(PATIENCE_S)
            before = reader.table("t").pull(IDS)
            replace_node(local, 1)
            deadline = Deadline.after(PATIENCE_S)
            while (got := pulled(reader)) is None:
                assert deadline.remaining_s() > 0
                time.sleep(0.1)
            np.testing.assert_array_equal(got, before)


def pulled(cluster: "kvemb.Cluster") -> np.ndarray | None:
    try:
        return cluster.table("t").pull(IDS)
    except StorageError:
        return None


@pytest.mark.full
def test_addresses_that_lead_elsewhere_are_refused_until_they_are_right(kind: str) -> None:
    with LocalCluster(kind, 2, memory_mb=64) as local, kvemb.connect(local.url) as cluster:
        table = new_table(cluster)
        table.push(IDS, np.ones((len(IDS), DIM), np.float32)).wait_applied(PATIENCE_S)
        before = table.pull(IDS)
        first, second = load(local.config_path, {}).storage.nodes
        with LocalCluster(kind, 2, memory_mb=64) as other:
            edit(local, [first, other.servers[1].address])
            local.servers[1].process.kill()
            with pytest.raises(WrongNodeError, match="belongs to cluster"):
                table.pull(IDS, timeout_s=4.0)
            edit(local, [second, first])  # the lost node's address in the wrong place
            with pytest.raises((WrongNodeError, NodeUnavailableError)):
                table.pull(IDS, timeout_s=4.0)
            edit(local, [first, second, other.servers[0].address])
            with pytest.raises((WrongNodeError, NodeUnavailableError)):  # one more is no harm, and no help
                table.pull(IDS, timeout_s=4.0)
        edit(local, [first, second])
        local.servers[1].restart()
        np.testing.assert_array_equal(table.pull(IDS, timeout_s=PATIENCE_S), before)


def test_a_file_that_cannot_be_read_is_told_beside_what_happened(kind: str) -> None:
    with LocalCluster(kind, 2, memory_mb=64) as local, kvemb.connect(local.url) as cluster:
        table = new_table(cluster)
        table.push(IDS, np.ones((len(IDS), DIM), np.float32)).wait_applied(PATIENCE_S)
        before, text = table.pull(IDS), local.config_path.read_text(encoding="utf-8")
        local.config_path.write_text(text[: len(text) // 2], encoding="utf-8")
        local.servers[1].process.kill()
        with pytest.raises(NodeUnavailableError, match=r"kvemb.yaml was read again .* cannot be used"):
            table.pull(IDS, timeout_s=2.0)
        local.config_path.write_text(text, encoding="utf-8")
        local.servers[1].restart()
        np.testing.assert_array_equal(table.pull(IDS, timeout_s=PATIENCE_S), before)


def test_a_batch_that_was_begun_before_nodes_moved_is_not_answered_by_others(
    require_server: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_server("memcached")
    nodes = ServerNodes("memcached", 2, tmp_path)
    try:
        with nodes.store() as writer:
            writer.provision(CLUSTER, GENERATION, within())
            markers = writer.open(within())
            write(writer, row_keys(100), records_of(row_keys(100)))
        first, second = nodes.config.nodes
        with open_store(nodes.config, role="trainer") as store:
            assert isinstance(store, NodeStore)
            store.open(within())
            store.nodes.follow(lambda: (second, first))
            nodes.put_markers([marker.encode() for marker in markers[::-1]])
            run = store.rows._batches._run

            def moving(*args: Any) -> None:
                assert store.nodes.follow_error(NodeUnavailableError("met by another thread"))
                run(*args)

            monkeypatch.setattr(store.rows._batches, "_run", moving)
            with pytest.raises((NodeSuspectError, WrongNodeError)):
                store.rows._batches.read([ReadPart(row_keys(100), SIZE, SIZE)], within(), None)
    finally:
        nodes.close()
