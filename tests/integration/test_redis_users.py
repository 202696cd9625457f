"""`kvemb acl`: the two users that it prints, on a real Redis: whole clusters work with them, and with nothing less or more."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import yaml

import kvemb
from kvemb.cli import main
from kvemb.errors import CheckpointError, ConfigError, StorageError
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.processes import free_ports
from kvemb.local_cluster.storage_servers import StorageServer, start_servers
from kvemb.stores.redis_server.acl_users import ACL_USERS
from tests.integration.scraped import ports_side_by_side, until, value
from tests.integration.tls_clusters import TlsCluster, running
from tests.matrix import one_of

pytestmark = pytest.mark.full  # users, passwords and certificates that change while a cluster works

PASSWORDS = {"trainer": "read-only-secret", "shard": "write-secret"}


def printed_users(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What `kvemb acl` prints: rules by user."""
    assert main(["acl"]) == 0
    lines = [line.split(" ", 2) for line in capsys.readouterr().out.splitlines() if line.startswith("user ")]
    return {name: rules for _, name, rules in lines}


@pytest.fixture
def servers(tmp_path: Path, require_server: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> Iterator[list[StorageServer]]:
    require_server("redis-server")
    made = start_servers("redis", 2, tmp_path, 64)
    users = printed_users(capsys)
    for server in made:
        with redis.Redis(port=server.port, protocol=2) as client:
            for role, password in PASSWORDS.items():
                name = ACL_USERS[role].name
                digest = hashlib.sha256(password.encode()).hexdigest()
                client.execute_command("ACL", "SETUSER", name, *users[name].replace("HASH", digest).split())
    yield made
    for server in made:
        server.process.kill()


def denials(servers: list[StorageServer]) -> list[Any]:
    """What any server has denied to anybody."""
    found = []
    for server in servers:
        with redis.Redis(port=server.port, protocol=2) as client:
            found += client.acl_log()
    return found


def as_user(servers: list[StorageServer], role: str) -> dict[str, Any]:
    nodes = [server.address for server in servers]
    return {"kind": "redis", "nodes": nodes, "timeout_s": 5, "username_env": "REDIS_USER", "password_env": "REDIS_PASSWORD"}


def test_a_cluster_trains_saves_loads_and_repairs_with_the_two_users_alone(
    tmp_path: Path, servers: list[StorageServer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDIS_USER", "kvemb-trainer")
    monkeypatch.setenv("REDIS_PASSWORD", PASSWORDS["trainer"])
    of_shards = {"REDIS_USER": "kvemb-shard", "REDIS_PASSWORD": PASSWORDS["shard"]}
    with running(TlsCluster(tmp_path, n_shards=2, environ=of_shards, storage=as_user(servers, "trainer"))) as made:
        mine = made.issue("trainer/t", "admin/t", name="t")
        monkeypatch.setenv("TLS_CERT", str(mine.cert))
        monkeypatch.setenv("TLS_KEY", str(mine.key))
        with kvemb.connect(made.as_seen_by(mine), trainer="t") as cluster:
            options = {"optimizer": kvemb.optim.sgd(1.0), "initializer": kvemb.init.zeros()}
            bucketed = cluster.create_table("bucketed", dim=4, **options)
            paged = cluster.create_table("paged", dim=4, num_ids=500, **options)
            ids = np.arange(500)
            for table in (bucketed, paged):
                table.push(ids, np.ones((500, 4), np.float32)).wait_applied()
            cluster.save(str(tmp_path / "checkpoint"))
            bucketed.erase(ids[:10])
            with redis.Redis(port=servers[0].port, protocol=2) as client:
                client.flushall()
            assert main(["repair", str(made.path), "--all"]) == 0
            np.testing.assert_array_equal(paged.pull(ids, timeout_s=30), np.full((500, 4), -1, np.float32))
            np.testing.assert_array_equal(bucketed.pull(ids, timeout_s=30)[10:], np.full((490, 4), -1, np.float32))
            with pytest.raises(CheckpointError, match="kvemb acl"):
                cluster.load(str(tmp_path / "checkpoint"))
            assert main(["status", str(made.path)]) == 0
            assert main(["acl", str(made.path), "--check", "trainer"]) == 0
            cluster.drop_table("paged")
        for name, value in of_shards.items():  # to decide on a load is to write
            monkeypatch.setenv(name, value)
        with kvemb.connect(made.as_seen_by(mine), trainer="t") as cluster:
            cluster.load(str(tmp_path / "checkpoint"))
            np.testing.assert_array_equal(cluster.table("paged").pull(ids, timeout_s=30), np.full((500, 4), -1, np.float32))
        # A trainer whose connection ended in the middle would end it for certain, could it have written.
        assert {one["object"] for one in denials(servers)} <= {"set", "client|kill"}
        assert {one["username"] for one in denials(servers)} == {"kvemb-trainer"}
        logs = capsys.readouterr().out + "".join(process.text() for process in made.shards) + made.path.read_text()
        assert not any(password in logs for password in PASSWORDS.values())


@pytest.mark.parametrize("kind", one_of("redis", "redis-cluster"))
def test_a_node_that_refuses_a_shards_user_is_waited_for_loudly(kind: str, require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    ids, port = np.arange(200), ports_side_by_side(1)
    with LocalCluster(kind, 3 if kind == "redis-cluster" else 1, shards=1, metrics_port=port) as local, kvemb.connect(local.url) as cluster:
        table = cluster.create_table("t", dim=4, optimizer=kvemb.optim.sgd(1.0), initializer=kvemb.init.zeros())
        with redis.Redis(port=local.servers[0].port, protocol=2) as node:
            node.execute_command("ACL", "SETUSER", "default", "-@write")
            ack = table.push(ids, np.ones((200, 4), np.float32))
            ack.wait(timeout_s=30)
            until(lambda: value(port, "kvemb_shard_refused") == 1)
            assert (value(port, "kvemb_shard_failed"), value(port, "kvemb_shard_retrying")) == (0, 1)
            (shard,) = cluster.status().shards
            assert shard.reply is not None
            assert local.servers[0].address in shard.reply.failure
            assert "NOPERM" in shard.reply.failure
            node.execute_command("ACL", "SETUSER", "default", "+@all", "resetpass", ">later")  # new connections are refused as well
            node.execute_command("AUTH", "default", "later")
            node.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            until(lambda: "NOAUTH" in str(cluster.status().shards[0].reply.failure))  # type: ignore[union-attr]
            node.execute_command("ACL", "SETUSER", "default", "nopass")
        ack.wait_applied(timeout_s=60)
        np.testing.assert_array_equal(table.pull(ids), np.full((200, 4), -1, np.float32))
        until(lambda: value(port, "kvemb_shard_refused") == 0)


def test_the_check_names_what_a_user_lacks_and_what_it_has_too_much(
    tmp_path: Path, servers: list[StorageServer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kvemb.yaml"
    path.write_text(yaml.safe_dump({"cluster": "c", "storage": as_user(servers, ""), "parameter_servers": {"shards": ["127.0.0.1:1"]}}))
    monkeypatch.setenv("REDIS_USER", "kvemb-trainer")
    monkeypatch.setenv("REDIS_PASSWORD", PASSWORDS["trainer"])
    assert main(["acl", str(path), "--check", "shard"]) == 1
    assert "user kvemb-trainer may not run what it needs: hset" in capsys.readouterr().err
    monkeypatch.setenv("REDIS_USER", "kvemb-shard")
    monkeypatch.setenv("REDIS_PASSWORD", PASSWORDS["shard"])
    assert main(["acl", str(path), "--check", "shard"]) == 0
    assert main(["acl", str(path), "--check", "trainer"]) == 1
    assert "user kvemb-shard may run what it should not: set" in capsys.readouterr().err


def test_a_wrong_user_or_password_is_refused_by_name(servers: list[StorageServer], monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"cluster": "c", "storage": as_user(servers, ""), "parameter_servers": {"shards": [f"127.0.0.1:{free_ports(1)[0]}"]}}
    for user, password in (("stranger", "x"), ("kvemb-trainer", "wrong-password")):
        monkeypatch.setenv("REDIS_USER", user)
        monkeypatch.setenv("REDIS_PASSWORD", password)
        with pytest.raises((ConfigError, StorageError), match=servers[0].address) as caught:
            kvemb.connect(tree, read_only=True)
        assert password == "x" or password not in str(caught.value)
