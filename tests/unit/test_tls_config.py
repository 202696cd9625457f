"""The sections `tls` of kvemb.yaml, and the caller that a certificate names: nothing is opened here."""

from pathlib import Path
from typing import Any

import pytest

from kvemb.api.plaintext import require_encrypted
from kvemb.config import load, parse
from kvemb.errors import AccessDeniedError, ConfigError
from kvemb.net.tls_config import TlsConfig
from kvemb.protocol.roles import ROLES, caller_of
from paramserver.capabilities import VERBS


def tree(tls: Any, at: str = "parameter_servers") -> dict[str, Any]:
    made: dict[str, Any] = {
        "cluster": "c",
        "storage": {"kind": "redis", "nodes": ["127.0.0.1:1"]},
        "parameter_servers": {"shards": ["127.0.0.1:2"]},
    }
    made[at]["tls"] = tls
    return made


def test_a_token_of_the_environment_is_taken_and_never_shown() -> None:
    config = parse(tree({"ca": "ca.pem", "token_env": "TOKEN"}), {"TOKEN": "hush-hush"})
    assert config.servers.tls is not None
    assert config.servers.tls.token == "hush-hush"
    assert "hush-hush" not in repr(config)


def test_paths_start_at_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "kvemb.yaml").write_text(
        "cluster: c\nstorage: {kind: redis, nodes: ['127.0.0.1:1'], tls: {ca: a/ca.pem, cert: /b/x.crt, key: /b/x.key}}\n"
        "parameter_servers: {shards: ['127.0.0.1:2'], tls: {ca: ca.pem, cert_env: CERT, key_env: KEY, token_file: token}}\n"
    )
    config = load(tmp_path / "kvemb.yaml", {"CERT": "me.crt", "KEY": "/secret/me.key"})
    assert config.storage.tls == TlsConfig(str(tmp_path / "a/ca.pem"), "/b/x.crt", "/b/x.key")
    own = str(tmp_path / "me.crt"), "/secret/me.key"
    assert config.servers.tls == TlsConfig(str(tmp_path / "ca.pem"), *own, token_file=str(tmp_path / "token"))


@pytest.mark.parametrize(
    ("tls", "named"),
    [
        ([], r"parameter_servers\.tls: got list"),
        ({"ca": "x", "colour": "red"}, r"tls\.colour: unknown key"),
        ({"ca": 1}, r"tls\.ca: got int"),
        ({"cert": "x", "key": "y"}, r"tls\.ca: missing"),
        ({"ca": "x", "cert": "y"}, "go together; got cert alone"),
        ({"ca": "x", "cert": "y", "cert_env": "CERT", "key": "z"}, r"tls\.cert_env: give the one or the other"),
        ({"ca": "x", "token_env": "TOKEN", "token_file": "y"}, "give the one or the other"),
        ({"ca": "x", "token_env": "TOKEN"}, "environment variable TOKEN is not set"),
    ],
)
def test_a_wrong_section_is_refused_by_its_key(tls: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(tree(tls), {})


def test_storage_takes_no_token_and_trusts_the_systems_authorities() -> None:
    assert parse(tree({}, "storage"), {}).storage.tls == TlsConfig()
    with pytest.raises(ConfigError, match=r"storage\.tls\.token_file: unknown key"):
        parse(tree({"token_file": "x"}, "storage"), {})


def test_every_verb_of_the_service_has_its_roles() -> None:
    assert len(VERBS) >= 40
    assert [name for name, verb in VERBS.items() if not verb.roles or not verb.roles <= set(ROLES)] == []


@pytest.mark.parametrize(
    ("uri", "trainer", "let_in"),
    [
        ("kvemb://c/trainer/a", "a", True),
        ("kvemb://c/trainer/a", "a/rank-0", True),
        ("kvemb://c/trainer/a", "ab", False),
        ("kvemb://c/trainer/a", "b", False),
        ("kvemb://c/trainer/*", "whoever", True),
        ("kvemb://c/trainer/host%201", "host 1", True),
        ("kvemb://d/trainer/a", "a", False),
        ("kvemb://c/trainers/a", "a", False),
        ("kvemb://c/trainer/", "", False),
        ("kvemb://c/admin/a", "a", False),
        ("https://c/trainer/a", "a", False),
    ],
)
def test_a_name_in_a_certificate_is_a_seat_and_what_is_below_it(uri: str, trainer: str, let_in: bool) -> None:
    caller = caller_of([uri], "c")
    if let_in:
        caller.require_seat(trainer)
    else:
        with pytest.raises(AccessDeniedError, match=repr(trainer)):
            caller.require_seat(trainer)


@pytest.mark.parametrize("path", sorted((Path(__file__).resolve().parents[2] / "deploy").glob("kvemb*.yaml")), ids=lambda path: path.name)
def test_the_composed_clusters_files_say_that_their_network_is_not_encrypted(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    require_encrypted(load(path, {"KVEMB_STORAGE_PASSWORD": "x"}), "0.0.0.0:7070")
    assert [record.message.split(":")[0] for record in caplog.records] == ["INSECURE", "INSECURE"]
