"""`kvemb doctor` on keys and certificates: what ends soon, has ended, is of another name, authority or purpose, or lies open."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chaos.proxy import FaultProxy

from kvemb.client.shard_channel import ShardChannel
from kvemb.config import Config, StorageConfig, load
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.processes import free_ports
from kvemb.net.certificate_authority import Authority, Issued
from kvemb.net.deadline import Deadline
from kvemb.net.tls_config import TlsConfig, parse_tls
from kvemb.net.tls_probe import HANGS_UP, look_at_port
from kvemb.operate.cluster_status import survey
from kvemb.operate.examination import examine, judge_certificates
from kvemb.operate.findings import Finding
from kvemb.protocol.message_format import installed_version
from tests.integration.scraped import ports_side_by_side, value
from tests.integration.tls_clusters import TlsCluster, running
from tests.integration.tls_storage import start_tls_servers

pytestmark = pytest.mark.full  # commands and pages for operators, on clusters that something is wrong with

DAY_S = 86_400


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, require_server: Callable[[str], str]) -> Iterator[TlsCluster]:
    """A shard and a node that both speak TLS."""
    require_server("redis-server")
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority(folder / "nodes")
    client = authority.issue("client", purposes=("client",))
    (server,) = start_tls_servers("redis", 1, folder, 64, authority=authority, issued=authority.issue("node", purposes=("server",)))
    tls = {"ca": str(authority.ca), "cert": str(client.cert), "key": str(client.key)}
    storage = {"kind": "redis", "nodes": [server.tls_address], "timeout_s": 3, "tls": tls}
    made = TlsCluster(folder, storage=storage)
    made.tree["parameter_servers"]["metrics_port"] = ports_side_by_side(1)
    made.write()
    with running(made):
        made.nodes = authority  # type: ignore[attr-defined]
        yield made
    server.process.kill()


def config_of(secured: TlsCluster, issued: Issued | None = None) -> Config:
    return load(secured.as_seen_by(issued or secured.issue("reader/oncall", name="oncall")), {})


def found(config: Config) -> dict[str, Finding]:
    """Findings by name, but for those of the storage server's settings."""
    made = examine(config, installed_version()).findings
    assert all(one.mend and one.what and one.where for one in made)
    return {one.name: one for one in made}


@contextmanager
def serving(issued: Issued) -> Iterator[str]:
    """A server that shows a certificate, and says nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.cert, issued.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    plain, _ = listener.accept()
                    with suppress(OSError), context.wrap_socket(plain, server_side=True) as sock:
                        sock.recv(1)

        threading.Thread(target=serve, name="shows-a-certificate", daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def test_nothing_is_said_of_certificates_that_are_good(secured: TlsCluster) -> None:
    assert found(config_of(secured)).keys() == set()


def test_what_ends_within_fourteen_days_is_named_on_every_side(secured: TlsCluster) -> None:
    config = config_of(secured)
    seen = list(judge_certificates(config, 3, now_s=time.time() + 17 * DAY_S))
    assert {one.name for one in seen} == {"certificate-ends"}
    mine, shard = str(secured.authority.folder / "oncall.crt"), f"shard 0 ({config.servers.shards[0]})"
    nodes = secured.nodes.folder  # type: ignore[attr-defined]
    assert [one.where for one in seen] == [mine, shard, str(nodes / "client.crt"), f"node {config.storage.nodes[0]}"]
    assert all("ends in 13.0 days" in one.what or "ends in 12.9 days" in one.what for one in seen)
    assert all("replace the file in one step" in one.mend and one.level == "warning" for one in seen)
    assert not list(judge_certificates(config, 3, now_s=time.time() + 15 * DAY_S))


def test_prometheus_is_told_when_the_certificates_of_a_shard_end(secured: TlsCluster) -> None:
    """KvembCertificateEnds"""
    port = secured.tree["parameter_servers"]["metrics_port"]
    for of in ("parameter_servers", "storage"):
        ends_s = value(port, "kvemb_shard_certificate_end_timestamp_seconds", of=of)
        assert ends_s is not None
        assert 29 * DAY_S < ends_s - time.time() <= 30 * DAY_S


def test_a_certificate_that_has_ended_is_named_on_every_side(secured: TlsCluster, tmp_path: Path) -> None:
    ended = found(config_of(secured, secured.issue("reader/oncall", name="ended", days=-1)))
    assert ended.keys() == {"certificate-expired"}
    assert ended["certificate-expired"].where.endswith("ended.crt")
    config = config_of(secured)
    with serving(secured.authority.issue("old-shard", "kvemb://ads/shard/0", purposes=("server",), days=-1)) as address:
        of_shard = found(replace(config, servers=replace(config.servers, shards=(address,))))
    assert of_shard["certificate-expired"].where == f"shard 0 ({address})"
    assert "shard-unreachable" not in of_shard
    assert "shard-refuses" not in of_shard
    nodes: Authority = secured.nodes  # type: ignore[attr-defined]
    with serving(nodes.issue("old-node", purposes=("server",), days=-1)) as address:
        of_node = found(replace(config, storage=replace(config.storage, nodes=(address,))))
    assert of_node["certificate-expired"].where == f"node {address}"
    assert "node-unreachable" not in of_node
    assert "Issue another" in of_node["certificate-expired"].mend


@pytest.mark.parametrize(
    ("made", "name", "mend"),
    [
        (
            lambda authority, _: authority.issue("elsewhere", hosts=("ps-9",), purposes=("server",)),
            "certificate-name",
            "host name or address",
        ),
        (lambda ours, _: ours.issue("caller", purposes=("client",)), "certificate-purpose", "serverAuth"),
        (lambda _, wrong: wrong.issue("foreign", purposes=("server",)), "certificate-untrusted", r"tls.ca"),
    ],
    ids=["of another name", "for another purpose", "of another authority"],
)
def test_what_a_shard_or_node_shows_and_may_not_is_named(
    secured: TlsCluster, tmp_path: Path, made: Callable[[Authority, Authority], Issued], name: str, mend: str
) -> None:
    config, wrong = config_of(secured), Authority(tmp_path / "wrong", "wrong")
    with serving(made(secured.authority, wrong)) as address:
        shard = found(replace(config, servers=replace(config.servers, shards=(address,))))
    with serving(made(secured.nodes, wrong)) as address:  # type: ignore[attr-defined]
        node = found(replace(config, storage=replace(config.storage, nodes=(address,))))
    assert mend in shard[name].mend
    assert mend in node[name].mend
    assert (shard[name].level, shard[name].where[:7], node[name].where[:4]) == ("error", "shard 0", "node")
    assert not {"shard-unreachable", "shard-refuses", "node-unreachable"} & (shard.keys() | node.keys())


def test_a_certificate_of_ours_that_shards_would_refuse_is_named(secured: TlsCluster, tmp_path: Path) -> None:
    wrong = Authority(tmp_path / "wrong", "wrong").issue("foreign", "kvemb://ads/reader/x", purposes=("client",))
    assert found(config_of(secured, wrong)).keys() == {"certificate-untrusted"}
    nobody = secured.authority.issue("nobody", "kvemb://other/reader/x", purposes=("client",))
    seen = found(config_of(secured, nobody))
    assert seen.keys() == {"certificate-name", "shard-refuses"}
    assert "expected kvemb://ads/" in seen["certificate-name"].what
    serves = secured.authority.issue("serves", "kvemb://ads/reader/x", purposes=("server",))
    assert found(config_of(secured, serves)).keys() == {"certificate-purpose"}


def test_a_key_or_token_that_others_may_read_is_named(secured: TlsCluster, tmp_path: Path) -> None:
    config = config_of(secured)
    assert config.servers.tls is not None
    Path(str(config.servers.tls.key)).chmod(0o644)
    seen = found(config)
    assert seen.keys() == {"key-readable"}
    assert seen["key-readable"].mend.startswith(f"chmod 600 {config.servers.tls.key}")
    token = tmp_path / "token"
    token.write_text("secret-token")
    token.chmod(0o604)
    with_token = replace(config, servers=replace(config.servers, tls=TlsConfig(config.servers.tls.ca, token_file=str(token))))
    of_token = found(with_token)
    assert "token_file" in of_token["key-readable"].what
    assert "secret-token" not in str(of_token)


@pytest.mark.parametrize("key", ["another's", "none", "no key"])
def test_files_that_cannot_be_used_are_named_and_nothing_else_is(secured: TlsCluster, tmp_path: Path, key: str) -> None:
    config, other = config_of(secured), tmp_path / "other.key"
    if key != "none":
        other.write_bytes((secured.authority.folder / "shard-0.key").read_bytes() if key == "another's" else b"x")
        other.chmod(0o600)
    assert config.servers.tls is not None
    assert config.storage.tls is not None
    bad = replace(config, servers=replace(config.servers, tls=replace(config.servers.tls, key=str(other))))
    assert found(bad).keys() == {"tls-files"}
    storage: StorageConfig = replace(config.storage, tls=replace(config.storage.tls, key=str(other)))
    assert "tls-files" in found(replace(config, storage=storage))


def test_a_variable_that_is_not_set_is_named_where_a_certificate_is_asked_for(secured: TlsCluster) -> None:
    config = config_of(secured)
    assert config.storage.tls is not None
    assert config.servers.tls is not None
    section = {"ca": config.storage.tls.ca, "cert_env": "OF_STORAGE", "key_env": "KEY_OF_STORAGE"}
    storage = parse_tls(section, "storage.tls", {}, tokens=False)
    of_node = found(replace(config, storage=replace(config.storage, tls=storage)))
    assert of_node.keys() == {"tls-files"}
    assert of_node["tls-files"].where == f"node {config.storage.nodes[0]}"
    assert of_node["tls-files"].mend.startswith("Set OF_STORAGE, KEY_OF_STORAGE for this process")
    servers = parse_tls({**section, "cert_env": "OF_SHARDS", "ca": config.servers.tls.ca}, "parameter_servers.tls", {}, tokens=True)
    of_shard = found(replace(config, servers=replace(config.servers, tls=servers)))
    assert of_shard.keys() == {"tls-files"}
    assert of_shard["tls-files"].mend.startswith("Set OF_SHARDS, KEY_OF_STORAGE")


def test_who_does_not_know_that_a_shard_speaks_tls_is_told(secured: TlsCluster) -> None:
    plain = config_of(secured)
    seen = [shard.error for shard in survey(replace(plain, servers=replace(plain.servers, tls=None))).shards]
    assert all("It speaks TLS there" in error for error in seen)


def test_a_proxy_whose_shard_is_gone_is_not_taken_for_tls() -> None:
    with FaultProxy(f"127.0.0.1:{free_ports(1)[0]}") as proxy:
        told = str(ShardChannel(0, proxy.address).unavailable("Push", "no answer"))
    assert "Connections are taken and ended there, as by a proxy with no shard: start the shard" in told


def test_a_connection_that_is_reset_before_it_is_seen_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by such a proxy on a busy machine: the reset is there before `connect` has returned."""

    def reset(*args: object, **options: object) -> socket.socket:
        raise ConnectionResetError

    monkeypatch.setattr(socket, "create_connection", reset)
    assert look_at_port("127.0.0.1:1", Deadline.after(1)) == HANGS_UP


def test_of_a_shard_in_plain_text_nothing_else_is_said(secured: TlsCluster) -> None:
    config = config_of(secured)
    with LocalCluster("redis", 1, shards=1, memory_mb=64) as plain:
        seen = found(replace(config, servers=replace(config.servers, shards=load(plain.config_path, {}).servers.shards)))
    assert [name for name, one in seen.items() if one.where.startswith("shard")] == ["tls-refused"], seen


def test_plain_text_where_tls_is_expected_and_plain_text_on_purpose_are_named(secured: TlsCluster) -> None:
    config = config_of(secured)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            with suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    with suppress(OSError), sock:
                        sock.recv(1 << 12)
                        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=talk, name="talks-plain", daemon=True).start()
        seen = found(replace(config, servers=replace(config.servers, shards=(f"127.0.0.1:{listener.getsockname()[1]}",))))
        listener.shutdown(socket.SHUT_RDWR)
    assert "speaks TLS at this port" in seen["tls-refused"].mend
    tree: dict[str, Any] = {
        "cluster": "c",
        "storage": {"kind": "redis", "nodes": ["127.0.0.1:1"]},
        "parameter_servers": {"shards": ["ps-0:1"], "insecure": True},
    }
    (plain,) = judge_certificates(load(tree, {}), 1)
    assert (plain.name, plain.level) == ("not-encrypted", "warning")
    assert "parameter_servers.tls" in plain.mend
    del tree["parameter_servers"]["insecure"]
    (unsaid,) = judge_certificates(load(tree, {}), 1)
    assert (unsaid.name, unsaid.level) == ("not-encrypted", "error"), "shards refuse to start with it"
    assert "parameter_servers.insecure: true" in unsaid.mend
