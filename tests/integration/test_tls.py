"""TLS between trainers and shards, against real shards: which callers get in, for which verbs; certificates and tokens that change."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvemb
from kvemb import cli
from kvemb.client.all_shards import AllShards
from kvemb.config import load
from kvemb.errors import AccessDeniedError, ConfigError, ShardUnavailableError
from kvemb.net.certificate_authority import Authority, Issued
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import TableRows, digest_tables
from kvemb.protocol.messages import BYE, HELLO, ByeRequest, HelloRequest, PushPart, PushReply
from tests.integration.shard_processes import PATIENCE_S, until
from tests.integration.tls_clusters import NAME, TlsCluster, running
from tests.integration.tls_storage import start_tls_servers

OPTIONS = {"dim": 4, "optimizer": kvemb.optim.sgd(1.0), "initializer": kvemb.init.zeros()}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, require_server: Callable[[str], str]) -> Iterator[TlsCluster]:
    require_server("redis-server")
    with running(TlsCluster(tmp_path_factory.mktemp("tls"), n_shards=2)) as made:
        yield made


def push_one(source: Any, table: str, trainer: str | None = None) -> None:
    """Connect, train one step, and see it."""
    with kvemb.connect(source, trainer=trainer) as cluster:
        opened = cluster.create_table(table, exist_ok=True, **OPTIONS)
        before = opened.pull([1, 2, 3])
        opened.push([1, 2, 3], np.ones((3, 4), np.float32)).wait_applied()
        np.testing.assert_array_equal(opened.pull([1, 2, 3]), before - 1)


def test_a_trainer_with_its_certificate_trains_under_its_name_and_below_it(secured: TlsCluster) -> None:
    seen = secured.as_seen_by(secured.issue("trainer/host-3", name="host-3"))
    push_one(seen, "own", "host-3")
    push_one(seen, "own", "host-3/rank-0")
    push_one(seen, "own")  # a drawn name begins with the certificate's
    push_one(secured.as_seen_by(secured.issue("trainer/*", name="any")), "own", "host-4")


def test_a_trainer_cannot_take_anothers_place(secured: TlsCluster) -> None:
    with pytest.raises(AccessDeniedError, match=r"trainer/mallory.*not trainer 'alice'"):
        push_one(secured.as_seen_by(secured.issue("trainer/mallory", name="mallory")), "seats", "alice")


def test_a_part_in_anothers_name_is_refused_whatever_the_hello_said(secured: TlsCluster) -> None:
    alice = secured.as_seen_by(secured.issue("trainer/alice", name="alice"))
    push_one(alice, "parts", "alice")
    config = load(secured.as_seen_by(secured.issue("trainer/mallory", name="mallory")), os.environ)
    with kvemb.connect(alice, trainer="alice") as cluster:
        table = cluster.table("parts")
        table.push([1], np.ones((1, 4), np.float32)).wait_applied()
        servers = AllShards.of(config.servers)
        try:
            deadline = Deadline.after(PATIENCE_S)
            about = servers.describe(config, deadline)
            hello = servers.call(0, HELLO, HelloRequest("mallory", 0, about.cluster_id, 1), deadline)
            definition = next(table for table in about.tables if table["name"] == "parts")
            with pytest.raises(AccessDeniedError, match="alice"):
                servers.call(0, BYE, ByeRequest("alice", hello.incarnation - 1), deadline)
            schema = kvemb.schema.table_def.TableDef.from_dict(definition).schema
            rows = [TableRows("parts", schema, np.array([2], np.uint64), np.ones((1, 4), np.float32))]
            part = PushPart("alice", hello.incarnation - 1, 2, 2, False, rows, digest_tables(rows))
            replies = [PushReply.decode(data) for data in servers.channels[0].push_stream(iter([part.encode()]))]
            assert [reply.state for reply in replies] == ["failed"]
            assert replies[0].error["type"] == "AccessDeniedError"
        finally:
            servers.close()
        table.push([1], np.ones((1, 4), np.float32)).wait_applied()  # she goes on as if nothing had been


def test_what_a_role_does_not_include_is_refused_by_name_and_changes_nothing(secured: TlsCluster, tmp_path: Path) -> None:
    seen = secured.as_seen_by(secured.issue("trainer/t", name="t"))
    with kvemb.connect(seen, trainer="t") as cluster:
        table = cluster.create_table("roles", exist_ok=True, **OPTIONS)
        table.push([5], np.ones((1, 4), np.float32)).wait_applied()
        cluster.save(str(tmp_path / "checkpoint"))
        for verb in (lambda: table.erase([5]), lambda: cluster.drop_table("roles"), lambda: cluster.load(str(tmp_path / "checkpoint"))):
            with pytest.raises(AccessDeniedError, match=r"trainer/t.*role admin"):
                verb()
        assert len(table) == 1
    reader = secured.as_seen_by(secured.issue("reader/r", name="r"))
    with kvemb.connect(reader) as cluster:
        assert len(cluster.table("roles")) == 1
        with pytest.raises(AccessDeniedError, match="role trainer"):
            cluster.table("roles").push([5], np.ones((1, 4), np.float32)).wait()
    with kvemb.connect(secured.as_seen_by(secured.issue("admin/a", name="a"))) as cluster:
        assert cluster.table("roles").erase([5]) == 1
        cluster.drop_table("roles")
        with pytest.raises(AccessDeniedError, match="role trainer"):
            cluster.create_table("pushed", **OPTIONS).push([5], np.ones((1, 4), np.float32)).wait()


def test_a_certificate_of_another_cluster_or_of_a_shard_is_nobodys(secured: TlsCluster) -> None:
    other = secured.authority.issue("other", "kvemb://other/admin/a", purposes=("client",))
    with pytest.raises(AccessDeniedError, match="kvemb://other/admin/a"):
        kvemb.connect(secured.as_seen_by(other))
    with pytest.raises(AccessDeniedError, match="shard/0"):
        kvemb.connect(secured.as_seen_by(secured.issue("shard/0", name="as-shard")))


@pytest.mark.parametrize(
    ("issue", "named"),
    [
        (lambda secured: None, "needs a certificate and its key"),
        (lambda secured: Authority(secured.folder / "wrong", "wrong").issue("stranger", purposes=("client",)), "issuer"),
        (lambda secured: secured.issue("trainer/t", name="old", days=-1), "expired"),
        (lambda secured: secured.authority.issue("serves", f"kvemb://{NAME}/trainer/t", purposes=("server",)), "purpose"),
    ],
    ids=["none", "of another authority", "expired", "for servers"],
)
def test_a_certificate_that_is_not_good_is_refused_by_name(secured: TlsCluster, issue: Callable[[TlsCluster], Any], named: str) -> None:
    with pytest.raises((ConfigError, ShardUnavailableError), match=rf"parameter_servers\.tls.*{named}"):
        kvemb.connect(secured.as_seen_by(issue(secured)))


def test_a_shard_refuses_by_itself_whom_no_client_of_ours_would_let_through(secured: TlsCluster) -> None:
    """Clients of another make: the shard's own refusal, seen as an end of the connection."""
    import socket
    import ssl

    host, _, port = secured.tree["parameter_servers"]["shards"][0].rpartition(":")
    wrong = Authority(secured.folder / "wrong", "wrong")
    strangers = {
        "none": None,
        "of another authority": wrong.issue("stranger", purposes=("client",)),
        "expired": secured.issue("trainer/t", name="old", days=-1),
        "for servers": secured.authority.issue("serves", f"kvemb://{NAME}/trainer/t", purposes=("server",)),
        "good": secured.issue("trainer/t", name="t"),
    }
    let_in = {}
    for who, issued in strangers.items():
        context = ssl.create_default_context(cafile=str(secured.authority.ca))
        context.set_alpn_protocols(["h2"])
        if issued is not None:
            context.load_cert_chain(issued.cert, issued.key)
        with socket.create_connection((host, int(port)), PATIENCE_S) as plain, context.wrap_socket(plain, server_hostname=host) as sock:
            let_in[who] = sock.recv(1) != b""
    assert let_in == {**dict.fromkeys(strangers, False), "good": True}


def test_a_trainer_refuses_a_shard_of_another_authority_and_plain_text_is_refused(secured: TlsCluster) -> None:
    wrong = Authority(secured.folder / "wrong", "wrong")
    mine = wrong.issue("mine", f"kvemb://{NAME}/trainer/t", purposes=("client",))
    seen = secured.as_seen_by(mine, ca=str(wrong.ca))
    with pytest.raises(ShardUnavailableError, match=r"its certificate is not good with parameter_servers\.tls\.ca"):
        kvemb.connect(seen)
    plain = {**secured.tree["parameter_servers"]}
    del plain["tls"]
    with pytest.raises(ShardUnavailableError, match=secured.tree["parameter_servers"]["shards"][0]):
        kvemb.connect({**secured.tree, "parameter_servers": plain})


def test_a_shard_does_not_start_with_a_certificate_that_is_not_a_shards(secured: TlsCluster) -> None:
    for issued, why in (
        (secured.issue("trainer/t", name="t"), "purpose"),
        (secured.authority.issue("t-serves", f"kvemb://{NAME}/trainer/t"), "not of a shard"),
        (secured.authority.issue("shard-old", f"kvemb://{NAME}/shard/0", days=-1), "expired"),
    ):
        process = secured.launch(0, issued)
        assert process.wait() == 2
        assert "parameter_servers.tls.cert" in process.text()
        assert why in process.text()


@pytest.mark.full
def test_a_token_opens_everything_and_no_other_word_does(tmp_path: Path, require_server: Callable[[str], str], caplog: Any) -> None:
    require_server("redis-server")
    tokens = tmp_path / "tokens"
    tokens.write_text("first-token\n")
    with running(TlsCluster(tmp_path, tls={"token_file": str(tokens)})) as made:
        mine = tmp_path / "mine"
        mine.write_text("first-token\n")
        seen = made.as_seen_by(None, token_file=str(mine))
        push_one(seen, "user")
        for wrong, why in (("another", "is not one of this shard"), ("first-toke", "is not one of this shard")):
            (tmp_path / "wrong").write_text(wrong)
            with pytest.raises(AccessDeniedError, match=f"token {why}"):
                kvemb.connect(made.as_seen_by(None, token_file=str(tmp_path / "wrong")))
        with pytest.raises(AccessDeniedError, match="token is missing"):
            kvemb.connect(made.as_seen_by(made.issue("admin/a", name="a")))
        with kvemb.connect(seen) as cluster:  # the token changes without a stop: both are good, then the new one alone
            table = cluster.table("user")
            for of_shards, shown in (("first-token\nsecond-token\n", "first-token"), ("second-token\n", "second-token")):
                tokens.write_text(of_shards) if shown == "first-token" else mine.write_text("second-token\n")
                until_pushed(table)
                tokens.write_text(of_shards)
                until_pushed(table)
            table.erase([1])
        assert "first-token" not in made.shards[0].text()
        assert "first-token" not in caplog.text


def until_pushed(table: kvemb.Table) -> None:
    """Push for a little longer than files go unlooked at; every push is applied."""
    before, deadline, n = table.pull([9])[0, 0], Deadline.after(1.5), 0
    while not deadline.expired:
        table.push([9], np.ones((1, 4), np.float32)).wait_applied()
        n += 1
    assert table.pull([9])[0, 0] == before - n


@pytest.mark.full
def test_certificates_are_renewed_without_a_stop(tmp_path: Path, require_server: Callable[[str], str]) -> None:
    """The authority changes, too: at first both are trusted, then every certificate is of the new one, then only the new one is trusted."""
    require_server("redis-server")
    with running(TlsCluster(tmp_path)) as made:
        old = made.authority
        mine = made.issue("trainer/t", "admin/t", name="t")
        seen = made.as_seen_by(mine)
        shard = f"kvemb://{NAME}/shard/0"
        with kvemb.connect(seen, trainer="t") as cluster:
            table = cluster.create_table("user", **OPTIONS)
            until_pushed(table)
            new = Authority(old.folder, "next")
            old_ca = old.ca.read_bytes()
            old.ca.write_bytes(old_ca + new.ca.read_bytes())
            until_pushed(table)
            new.issue("shard-0", shard, purposes=("server",))
            new.issue("t", f"kvemb://{NAME}/trainer/t", f"kvemb://{NAME}/admin/t", purposes=("client",))
            until_pushed(table)
            old.ca.write_bytes(new.ca.read_bytes())
            until_pushed(table)
            made.authority = new
            new.issue("late", f"kvemb://{NAME}/trainer/late", purposes=("client",))
            with pytest.raises(ConfigError, match="issuer"):
                kvemb.connect(made.as_seen_by(old.issue("outdated", f"kvemb://{NAME}/trainer/x", purposes=("client",)), ca=str(old.ca)))
        push_one(made.as_seen_by(new.issue("late", f"kvemb://{NAME}/trainer/late", purposes=("client",)), ca=str(new.ca)), "user", "late")
        assert "the certificate was renewed" in made.shards[0].text()


def test_plain_text_beyond_this_machine_takes_a_word_in_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = {"kind": "redis", "nodes": ["127.0.0.1:1"], "timeout_s": 1}
    plain = {"cluster": "c", "storage": storage, "parameter_servers": {"shards": ["ps-0.invalid:7070"]}}
    with pytest.raises(ConfigError, match=r"parameter_servers\.tls: missing, and ps-0\.invalid:7070.*parameter_servers\.insecure: true"):
        kvemb.connect(plain)
    far = {**plain, "storage": {**storage, "nodes": ["10.0.0.1:6379"]}}
    with pytest.raises(ConfigError, match=r"storage\.tls: missing, and 10\.0\.0\.1:6379.*storage\.insecure: true"):
        kvemb.connect(far)
    with pytest.raises(ShardUnavailableError):
        kvemb.connect({**plain, "parameter_servers": {"shards": ["ps-0.invalid:7070"], "insecure": True}})
    assert "INSECURE: parameter_servers.insecure is true" in caplog.text


def test_the_certificates_of_a_trial_serve_every_process_of_the_cluster(
    tmp_path: Path, require_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_server("redis-server")
    trial = tmp_path / "trial"
    assert cli.main(["init", str(tmp_path / "kvemb.yaml"), "--cluster", NAME]) == 0
    assert cli.main(["certificates", str(tmp_path / "kvemb.yaml"), "--out", "trial"]) == 0
    authority = Authority(trial)  # the same again
    (node,) = start_tls_servers("redis", 1, tmp_path, 64, authority=authority, issued=Issued(trial, "storage"))
    section = {"ca": "trial/ca.pem", "cert_env": "TLS_CERT", "key_env": "TLS_KEY"}
    storage = {"kind": "redis", "nodes": [node.tls_address], "tls": section}  # type: ignore[attr-defined]
    made = TlsCluster(tmp_path, tls={"ca": "trial/ca.pem"}, storage=storage)

    def own(name: str) -> None:
        monkeypatch.setenv("TLS_CERT", f"trial/{name}.crt")
        monkeypatch.setenv("TLS_KEY", f"trial/{name}.key")

    try:
        own("admin")
        assert cli.main(["certificates", "--config", str(made.path), "--out", "trial", "--days", "3"]) == 0  # renews, by the same authority
        shown, start = capsys.readouterr().out, f"kvemb shard --config {made.path} --shard 0: the one at 127.0.0.1:"
        assert f"KVEMB_TLS_CERT=trial/shard-0.crt KVEMB_TLS_KEY=trial/shard-0.key   # {start}" in shown
        assert (trial / "ca.key").stat().st_mode & 0o777 == 0o600
        made.shards.append(made.launch(0, Issued(trial, "shard-0")))
        until((tmp_path / "ready-0").exists, made.shards[0])
        own("trainer")
        push_one(str(made.path), "t", "any-name")
        with kvemb.connect(str(made.path)) as cluster, pytest.raises(AccessDeniedError, match="role admin"):
            cluster.drop_table("t")
        own("admin")
        assert cli.main(["drop", "t", "--config", str(made.path), "--yes"]) == 0
        assert cli.main(["doctor", str(made.path)]) == 0
    finally:
        made.close()
        node.process.kill()


def test_an_authority_whose_key_is_not_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", str(tmp_path / "kvemb.yaml")]) == 0
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls/ca.pem").write_text("somebody's")
    assert cli.main(["certificates", str(tmp_path / "kvemb.yaml")]) == 2
    assert "Nothing was changed" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "tls").iterdir()] == ["ca.pem"]
