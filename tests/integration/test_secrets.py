"""Passwords, tokens and keys of a cluster that uses them all are in nothing that it writes or shows: logs, checkpoints, status, errors."""

import logging
import os
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import kvemb
from kvemb.cli import main
from kvemb.config import load
from kvemb.errors import KvembError
from kvemb.local_cluster.processes import free_ports
from kvemb.local_cluster.storage_servers import start_servers
from tests.integration.tls_clusters import TlsCluster, running
from tests.real_servers import redis_client

PASSWORD, TOKEN = "Xq-storage-password-7731", "Zk-token-of-the-shards-9942"
VERBS = (
    ["status"],
    ["status", "--json"],
    ["tables", "--config"],
    ["show", "user", "1", "--config"],
    ["doctor"],
    ["doctor", "--json"],
    ["bench", "--seconds", "1"],
    ["acl", "--check", "shard"],
    ["ls", "CHECKPOINTS"],
    ["verify", "CHECKPOINT"],
    ["repair", "--all"],
)


@pytest.fixture
def secured(tmp_path: Path, require_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Iterator[TlsCluster]:
    """A cluster with a Redis password and a token in the environment, and keys in files; its shards say all that they ever say."""
    require_server("redis-server")
    (server,) = start_servers("redis", 1, tmp_path, 64)
    with redis_client(server) as admin:
        admin.execute_command("ACL", "SETUSER", "kvemb", "on", f">{PASSWORD}", "~*", "&*", "+@all")
    secrets = {"REDIS_USER": "kvemb", "REDIS_PASSWORD": PASSWORD, "SHARDS_TOKEN": TOKEN}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    who = {"username_env": "REDIS_USER", "password_env": "REDIS_PASSWORD"}
    storage = {"kind": "redis", "nodes": [server.address], "timeout_s": 5, **who}
    made = TlsCluster(tmp_path, storage=storage, tls={"token_env": "SHARDS_TOKEN"})
    made.tree["parameter_servers"]["metrics_port"] = free_ports(1)[0]
    made.write()
    made.options = ["--log-level", "debug", "--log-format", "json"]
    mine = made.issue("trainer/t", name="mine")
    monkeypatch.setenv("TLS_CERT", str(mine.cert))
    monkeypatch.setenv("TLS_KEY", str(mine.key))
    with running(made):
        yield made
    server.process.kill()


def secrets_of(made: TlsCluster) -> list[bytes]:
    """Password, token, and a line of each private key."""
    keys = [path.read_bytes().splitlines()[1] for path in made.authority.folder.glob("*.key")]
    assert len(keys) >= 2
    return [PASSWORD.encode(), TOKEN.encode(), *keys]


def files_below(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".key":
            yield path, path.read_bytes()


def test_secrets_are_in_nothing_that_a_cluster_writes_or_shows(
    secured: TlsCluster,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    shown: dict[str, bytes] = {}
    checkpoint = str(tmp_path / "checkpoints" / "one")
    with kvemb.connect(secured.path.as_uri()) as cluster:
        table = cluster.create_table("user", dim=4, optimizer=kvemb.optim.sgd(1.0), initializer=kvemb.init.zeros())
        table.push([1, 2], np.ones((2, 4), np.float32)).wait_applied()
        cluster.save(checkpoint, extra={"note": "x"})
        shown["reprs"] = repr([cluster, table, cluster.config, vars(cluster.config), cluster.status(), secured.path.read_text()]).encode()
    port = secured.tree["parameter_servers"]["metrics_port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=200) as answer:
        shown["metrics"] = answer.read()
    for verb in VERBS:
        words = [word.replace("CHECKPOINTS", str(tmp_path / "checkpoints")).replace("CHECKPOINT", checkpoint) for word in verb]
        main(words if verb[0] in ("ls", "verify") else [*words, str(secured.path)])
    for pid in (secured.shards[0].child.pid, os.getpid()):
        shown[f"arguments of {pid}"] = Path(f"/proc/{pid}/cmdline").read_bytes()
    for name, value in (("REDIS_PASSWORD", PASSWORD + "-no"), ("SHARDS_TOKEN", TOKEN + "-no")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(KvembError) as wrong:
                kvemb.connect(secured.path.as_uri(), timeout_s=3)
            shown[f"wrong {name}"] = "".join(traceback.format_exception(wrong.value)).encode()
            main(["doctor", str(secured.path)])
    shown["log"] = caplog.text.encode()
    shown["printed"] = "".join(capfd.readouterr()).encode()
    assert b"user" in shown["printed"]
    shown |= {str(path): data for path, data in files_below(tmp_path)}
    assert any("manifest" in name for name in shown)
    assert any(name.endswith(".log") and b'"level"' in data for name, data in shown.items())
    leaks = [(name, secret[:12]) for name, data in shown.items() for secret in secrets_of(secured) if secret in data]
    assert not leaks


def test_secrets_are_in_no_repr_of_a_configuration(secured: TlsCluster) -> None:
    config = load(secured.path.as_uri(), os.environ)
    assert PASSWORD not in repr(config)
    assert TOKEN not in repr(config)
    assert PASSWORD not in str(config.storage)
