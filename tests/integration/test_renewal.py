"""Certificates and passwords, renewed under a trainer that pushes as docs/security.md says: nothing fails, and the old ones end."""

import shutil
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvemb
from kvemb.errors import ConfigError, KvembError, StorageError
from kvemb.local_cluster.storage_servers import StorageServer, start_servers
from kvemb.net.certificate_authority import Authority, Issued
from kvemb.net.deadline import Deadline
from tests.fuzz.honest import Honest
from tests.integration.shard_processes import PATIENCE_S, until
from tests.integration.tls_clusters import NAME, TlsCluster, running
from tests.integration.tls_storage import TlsServer, start_tls_servers
from tests.real_servers import memcached_client, redis_client

pytestmark = pytest.mark.full  # users, passwords and certificates that change while a cluster works

LOOKED_AT_S = 1.5  # files go unlooked at for a second
OLD, NEW = "the-old-password", "the-new-password"


def pushes_go_on(trainer: Honest, more: int = 5) -> None:
    """Wait until it has pushed and pulled some more times; for as long as files may go unlooked at in any case."""
    wanted, least_s, deadline = trainer.n_pushes + more, time.monotonic() + LOOKED_AT_S, Deadline.after(PATIENCE_S)
    while trainer.n_pushes < wanted or time.monotonic() < least_s:
        trainer.check()
        assert not deadline.expired, f"{trainer.n_pushes} of {wanted} pushes"
        time.sleep(0.05)


def shown_by(address: str) -> str:
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=PATIENCE_S).strip()


def new_user(made: TlsCluster, name: str) -> dict[str, Any]:
    return made.as_seen_by(made.issue(f"trainer/{name}", name=name))


def push_as_newcomer(source: Any, n: int) -> None:
    with kvemb.connect(source) as cluster:
        table = cluster.create_table("newcomers", dim=2, optimizer=kvemb.optim.sgd(1.0), initializer=kvemb.init.zeros(), exist_ok=True)
        table.push([1], np.ones((1, 2), np.float32)).wait_applied(timeout_s=PATIENCE_S)
        assert table.pull([1])[0, 0] == -n


def test_shards_and_trainers_certificates_are_renewed_again_and_again_under_load(
    tmp_path: Path, require_server: Callable[[str], str]
) -> None:
    require_server("redis-server")
    with running(TlsCluster(tmp_path, n_shards=2)) as made, Honest(new_user(made, "honest")) as trainer:
        pushes_go_on(trainer)
        for _ in range(3):
            for shard, address in enumerate(made.tree["parameter_servers"]["shards"]):
                issued = made.authority.issue(f"shard-{shard}", f"kvemb://{NAME}/shard/{shard}", purposes=("server",))
                pushes_go_on(trainer)
                assert shown_by(address) == issued.cert.read_text().strip()
            made.issue("trainer/honest", name="honest")
            pushes_go_on(trainer)
        for number, process in enumerate(made.shards):
            assert process.text().count("the certificate was renewed") >= 3, f"shard {number}"


class SecureStorage:
    """One storage server that asks for certificates, and a cluster over it.

    Args:
        kind, folder: of the server.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.authority = kind, Authority(folder / "storage")
        self.client = self.authority.issue("client", purposes=("client",))
        self.node = self.authority.issue("node", purposes=("server",))
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)  # memcached gives up root for nobody, and tests have no secrets
        (server,) = start_tls_servers(kind, 1, folder, 64, authority=self.authority, issued=self.node)
        assert isinstance(server, TlsServer)
        self.server: TlsServer = server

    @property
    def section(self) -> dict[str, Any]:
        tls = {"ca": str(self.authority.ca), "cert": str(self.client.cert), "key": str(self.client.key)}
        return {"kind": self.kind, "nodes": [self.server.tls_address], "timeout_s": 5, "tls": tls}

    def reread(self) -> None:
        """Have the server read its files again, as docs/security.md says."""
        for path in self.authority.folder.iterdir():
            path.chmod(0o755)
        if self.kind == "memcached":
            client = memcached_client(self.server)
            assert client.raw_command(b"refresh_certs", b"\r\n").startswith(b"OK")
            client.close()
        else:
            with redis_client(self.server) as client:
                files = {"tls-cert-file": self.node.cert, "tls-key-file": self.node.key, "tls-ca-cert-file": self.authority.ca}
                client.execute_command("CONFIG", "SET", *[str(word) for pair in files.items() for word in pair])

    def end_connections(self) -> None:
        """Have kvemb open all connections again, where the server can be told so."""
        if self.kind == "redis":
            with redis_client(self.server) as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


@pytest.mark.parametrize("kind", ["redis", "memcached"])
def test_the_authority_of_storage_is_renewed_under_load(kind: str, tmp_path: Path, require_server: Callable[[str], str]) -> None:
    require_server({"redis": "redis-server"}.get(kind, kind))
    folder = Path(tempfile.mkdtemp())  # memcached reads its files again as the user that it runs as, which cannot read tmp_path
    storage = SecureStorage(kind, folder)
    try:
        with running(TlsCluster(tmp_path, storage=storage.section)) as made, Honest(new_user(made, "honest")) as trainer:
            pushes_go_on(trainer)
            old, new = storage.authority, Authority(storage.authority.folder, "next")
            left_over = old.issue("left-over", purposes=("client",))
            old.ca.write_bytes(old.ca.read_bytes() + new.ca.read_bytes())  # both are trusted, on both sides
            storage.reread()
            pushes_go_on(trainer)
            node = new.issue("node", purposes=("server",))
            new.issue("client", purposes=("client",))
            storage.reread()
            pushes_go_on(trainer)
            push_as_newcomer(new_user(made, "second"), 1)
            assert shown_by(storage.server.tls_address) == node.cert.read_text().strip()
            old.ca.write_bytes(new.ca.read_bytes())  # the old one is trusted no more
            storage.reread()
            storage.end_connections()
            pushes_go_on(trainer)
            push_as_newcomer(new_user(made, "third"), 2)
            if kind == "redis":
                with pytest.raises(KvembError, match="certificate"):
                    kvemb.connect(outdated(made, left_over), timeout_s=3)
            else:  # memcached only adds authorities; docs/security.md says so
                kvemb.connect(outdated(made, left_over)).close()
    finally:
        storage.server.process.kill()
        shutil.rmtree(folder)


def outdated(made: TlsCluster, issued: Issued) -> dict[str, Any]:
    """kvemb.yaml of a client that shows nodes a certificate of the old authority."""
    seen = new_user(made, "outdated")
    tls = {**seen["storage"]["tls"], "cert": str(issued.cert), "key": str(issued.key)}
    return {**seen, "storage": {**seen["storage"], "tls": tls}}


@contextmanager
def redis_with_password(folder: Path) -> Iterator[StorageServer]:
    (server,) = start_servers("redis", 1, folder, 64)
    try:
        with redis_client(server) as client:
            client.execute_command("ACL", "SETUSER", "kvemb", "on", f">{OLD}", "~*", "&*", "+@all")
        yield server
    finally:
        server.process.kill()


def test_a_storage_password_is_renewed_by_restarts_one_after_the_other_and_the_old_one_ends(
    tmp_path: Path, require_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passwords are good at once; shards restart one by one under a trainer that pushes, then trainers; then the old one goes."""
    require_server("redis-server")
    monkeypatch.setenv("REDIS_USER", "kvemb")
    monkeypatch.setenv("REDIS_PASSWORD", OLD)
    with redis_with_password(tmp_path) as server, redis_client(server) as admin:
        section = {
            "kind": "redis",
            "nodes": [server.address],
            "timeout_s": 5,
            "username_env": "REDIS_USER",
            "password_env": "REDIS_PASSWORD",
        }
        made = TlsCluster(tmp_path, n_shards=2, storage=section, environ={"REDIS_PASSWORD": OLD})
        with running(made), Honest(new_user(made, "honest")) as trainer:
            pushes_go_on(trainer)
            admin.execute_command("ACL", "SETUSER", "kvemb", f">{NEW}")
            made.environ["REDIS_PASSWORD"] = NEW
            for shard in range(2):
                made.shards[shard].child.terminate()
                assert made.shards[shard].wait() == 0
                made.shards[shard] = made.launch(shard)
                until((tmp_path / f"ready-{shard}").exists, made.shards[shard])
                pushes_go_on(trainer)
            trainer.stop()
            trainer.check()
            monkeypatch.setenv("REDIS_PASSWORD", NEW)
            with Honest(new_user(made, "honest"), begun=trainer.n_pushes) as restarted:
                pushes_go_on(restarted)
                admin.execute_command("ACL", "SETUSER", "kvemb", f"<{OLD}")
                admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")  # a client with the old one would stop here
                pushes_go_on(restarted)
            monkeypatch.setenv("REDIS_PASSWORD", OLD)
            with pytest.raises((ConfigError, StorageError), match=server.address) as caught:
                kvemb.connect(new_user(made, "outdated"), timeout_s=3)
            assert OLD not in str(caught.value)
            assert NEW not in "".join(process.text() for process in made.shards)
