"""kvemb.yaml: accepted values, and every wrong key is named with its path."""

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvemb import config, init
from kvemb.errors import ConfigError

TREE: dict[str, Any] = {
    "cluster": "demo",
    "storage": {"kind": "redis", "nodes": ["a:6379", "b:6379"]},
    "parameter_servers": {"shards": ["c:7000"]},
    "tables": {"user": {"dim": 8, "optimizer": {"kind": "sgd", "lr": 0.1}, "initializer": {"kind": "zeros"}}},
}
MISSING = object()


def tree(path: str = "", value: object = MISSING) -> dict[str, Any]:
    """The good tree with one value replaced, or taken out."""
    changed: Any = copy.deepcopy(TREE)
    if path:
        *parents, last = path.split(".")
        at = changed
        for parent in parents:
            at = at[parent]
        if value is MISSING:
            del at[last]
        else:
            at[last] = value
    return changed  # type: ignore[no-any-return]


def test_a_small_file_gives_the_defaults() -> None:
    loaded = config.parse(tree(), {})
    assert loaded.cluster == "demo"
    assert loaded.storage == config.StorageConfig("redis", ("a:6379", "b:6379"))
    assert loaded.servers == config.ServersConfig(("c:7000",))
    assert [(table.name, table.dim) for table in loaded.tables] == [("user", 8)]
    assert config.parse(tree("tables.user.num_ids", 1000), {}).tables[0].num_ids == 1000
    assert config.parse(tree("tables"), {}).tables == config.parse(tree("tables", None), {}).tables == ()


def test_a_mapping_is_read_as_a_file_would_be() -> None:
    servers = config.ServersConfig(("c:7000",), data_dir=os.path.abspath("kvemb-data"))
    assert config.load(tree(), {}) == replace(config.parse(tree(), {}), servers=servers)


@pytest.mark.parametrize("url", ["redis://me:secret@host:6379/0", "valkey://host", "memcached://host:1", "http://host/kvemb.yaml"])
def test_the_address_of_a_server_is_refused_with_what_to_give_instead(url: str) -> None:
    told = r"got the address of a server, expected a kvemb.yaml.*parameter_servers.shards.*kvemb.local"
    with pytest.raises(ConfigError, match=told) as refused:
        config.load(url, {})
    assert "secret" not in str(refused.value)


def test_every_option_has_an_effect() -> None:
    full = tree()
    full["storage"] |= {"timeout_s": 2, "username_env": "U", "password_env": "P", "allow_row_loss": True}
    full["parameter_servers"] |= {"mode": "sync", "trainers": 4, "data_dir": "/data", "barrier_timeout_s": 9.5}
    loaded = config.parse(full, {"U": "me", "P": "secret"})
    assert loaded.storage == config.StorageConfig("redis", ("a:6379", "b:6379"), 2.0, "me", "secret", True)
    assert loaded.servers == config.ServersConfig(("c:7000",), "sync", 4, "/data", 9.5)
    assert loaded.servers.on_lost_trainer == "abort"
    full["parameter_servers"]["on_lost_trainer"] = "drop"
    assert config.parse(full, {"U": "me", "P": "secret"}).servers.on_lost_trainer == "drop"
    loaded = config.parse(tree("parameter_servers", {"shards": ["c:7000"], "durability": "os", "journal_max_mb": 5}), {})
    assert (loaded.servers.durability, loaded.servers.journal_max_mb) == ("os", 5)


def test_shards_of_one_host_are_scraped_on_ports_side_by_side_and_never_on_another_servers() -> None:
    shards = ["c:7000", "d:7000", "c:7001"]
    servers = config.parse(tree("parameter_servers", {"shards": shards, "metrics_port": 9470}), {}).servers
    assert [servers.metrics_port_of(shard) for shard in range(3)] == [9470, 9470, 9471]
    assert config.parse(tree("parameter_servers", {"shards": shards}), {}).servers.metrics_port_of(2) == 0
    for port, why in ((6999, "another server has"), (65535, "does not exist")):
        with pytest.raises(ConfigError, match=rf"^parameter_servers.metrics_port: shard . would be scraped .* {why}"):
            config.parse(tree("parameter_servers", {"shards": shards, "metrics_port": port}), {})


def test_a_shard_without_a_journal_is_refused_with_what_to_set_instead() -> None:
    with pytest.raises(ConfigError, match=r"^parameter_servers.durability: got 'none', expected fsync \(.* or os \("):
        config.parse(tree("parameter_servers", {"shards": ["c:7000"], "durability": "none"}), {})


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("cluster", MISSING, "cluster"),
        ("cluster", "", "cluster: got .*not empty"),
        ("cluster", 5, "cluster"),
        ("clusters", "x", "clusters"),
        ("storage", MISSING, "storage"),
        ("storage", None, "storage: got nothing, expected a mapping"),
        ("storage", [], "storage"),
        ("storage.kind", MISSING, "storage.kind"),
        ("storage.kind", 7, "storage.kind"),
        ("storage.node", "x", "storage.node"),
        ("storage.nodes", MISSING, "storage.nodes"),
        ("storage.nodes", [], "storage.nodes"),
        ("storage.nodes", "a:1", "storage.nodes"),
        ("storage.nodes", ["a:1", "b"], r"storage.nodes\[1\]"),
        ("storage.nodes", ["a:0"], r"storage.nodes\[0\]"),
        ("storage.nodes", ["a:65536"], r"storage.nodes\[0\]"),
        ("storage.nodes", ["a:-1"], r"storage.nodes\[0\]"),
        ("storage.nodes", [":6379"], r"storage.nodes\[0\]"),
        ("storage.nodes", ["a:1 b:2"], r"storage.nodes\[0\]: got 'a:1 b:2', expected \"host:port\""),
        ("storage.nodes", ["redis://a:6379"], r"storage.nodes\[0\]: got 'redis://a:6379', expected \"host:port\""),
        ("storage.nodes", ["a:²"], r"storage.nodes\[0\]"),
        ("storage.nodes", [6379], r"storage.nodes\[0\]"),
        ("storage.nodes", ["a:1", "a:1"], "storage.nodes"),
        ("storage.timeout_s", 0, "storage.timeout_s"),
        ("storage.timeout_s", -1.5, "storage.timeout_s"),
        ("storage.timeout_s", True, "storage.timeout_s"),
        ("storage.timeout_s", "5", "storage.timeout_s"),
        ("storage.timeout_s", float("nan"), "storage.timeout_s"),
        ("storage.timeout_s", float("inf"), "storage.timeout_s"),
        ("storage.allow_row_loss", "yes", "storage.allow_row_loss"),
        ("storage.allow_row_loss", 1, "storage.allow_row_loss"),
        ("storage.password", "hunter2", "storage.password"),
        ("storage.password_env", "", "storage.password_env"),
        ("storage.password_env", "NOT_SET", "storage.password_env.*NOT_SET"),
        ("storage.username_env", "NOT_SET", "storage.username_env.*NOT_SET"),
        ("parameter_servers", MISSING, "parameter_servers"),
        ("parameter_servers.shards", MISSING, "parameter_servers.shards"),
        ("parameter_servers.shards", ["c"], r"parameter_servers.shards\[0\]"),
        ("parameter_servers.mode", "bsp", "parameter_servers.mode"),
        ("parameter_servers.mode", ["async"], "parameter_servers.mode"),
        ("parameter_servers.mode", "sync", "parameter_servers.trainers"),
        ("parameter_servers.trainers", 4, "parameter_servers.trainers"),
        ("parameter_servers.trainers", -1, "parameter_servers.trainers"),
        ("parameter_servers.trainers", True, "parameter_servers.trainers"),
        ("parameter_servers.trainers", 1.5, "parameter_servers.trainers"),
        ("parameter_servers.barrier_timeout_s", 5, "parameter_servers.barrier_timeout_s"),
        ("parameter_servers.on_lost_trainer", "drop", "parameter_servers.on_lost_trainer: has an effect in sync mode only"),
        ("parameter_servers.on_lost_trainer", "kill", "parameter_servers.on_lost_trainer.*abort, wait, drop"),
        ("parameter_servers.data_dir", None, "parameter_servers.data_dir"),
        ("parameter_servers.metrics_port", -1, "parameter_servers.metrics_port.*expected a port"),
        ("parameter_servers.metrics_port", True, "parameter_servers.metrics_port.*expected a port"),
        ("parameter_servers.metrics_port", 65536, "parameter_servers.metrics_port.*expected a port"),
        ("storage.node", ["n:1"], r"storage.node: unknown key; known here: .* Did you mean 'nodes'\?"),
        ("tables.user.dims", 4, r"tables.user.dims: unknown key. Did you mean 'dim'\?"),
        ("parameter_servers.write_behind_batches", 4, "parameter_servers.write_behind_batches: unknown key"),
        ("parameter_servers.durability", "disk", "parameter_servers.durability: got 'disk', expected fsync .* or os "),
        ("parameter_servers.durability", None, "parameter_servers.durability"),
        ("parameter_servers.journal_max_mb", 0, "parameter_servers.journal_max_mb"),
        ("parameter_servers.journal_max_mb", True, "parameter_servers.journal_max_mb"),
        ("parameter_servers.port", 1, "parameter_servers.port"),
        ("parameter_servers.shards", ["c:1", "b:6379"], r"parameter_servers.shards\[1\].*storage.nodes"),
        ("tables", ["user"], "tables"),
        ("tables.user", 8, "tables.user"),
        ("tables.user.dim", MISSING, "tables.user.*dim"),
        ("tables.user.dim", 0, "tables.user.*dim"),
        ("tables.user.dim", "8", "tables.user.*dim"),
        ("tables.user.layout", "compact", "tables.user: .*needs expected_rows"),
        ("tables.user.num_ids", 0, "tables.user.*num_ids"),
        ("tables.user.num_ids", "all", "tables.user.*num_ids"),
        ("tables.user.name", "item", "tables.user.*name"),
        ("tables.user.tag_attempt", 1, "tables.user.*tag_attempt"),
        ("tables.user.init_algorithm", 1, "tables.user.*init_algorithm"),
        ("tables.user.dtype", "float8", "tables.user.*float8"),
        ("tables.user.dtype", 5, "tables.user"),
        ("tables.user.dtype", ["float32"], "tables.user"),
        ("tables.user.reduce", "max", "tables.user.*reduce"),
        ("tables.user.seed", -1, "tables.user.*seed"),
        ("tables.user.id_dtype", "int32", "tables.user.*id_dtype"),
        ("tables.user.optimizer", "sgd", "tables.user"),
        ("tables.user.optimizer", None, "tables.user"),
        ("tables.user.optimizer", {"kind": "sdg"}, "tables.user.*sdg"),
        ("tables.user.optimizer", {"kind": "sgd", "rate": 1}, "tables.user.*rate"),
        ("tables.user.initializer", {"kind": "one"}, "tables.user.*one"),
        ("tables.user.initializer", [], "tables.user"),
        ("tables.user.initializer", {"kind": "columns"}, "tables.user: .*columns needs at least one part"),
        (
            "tables.user.initializer",
            {"kind": "columns", "parts": [{"width": 1, "kind": "zeros"}, {"width": 8, "kind": "normal"}]},
            r"tables.user: .*initializer\.parts: .*9 columns together, dim is 8",
        ),
        (
            "tables.user.initializer",
            {"kind": "columns", "parts": [{"width": 1, "kind": "zeros"}, {"width": 7, "kind": "norm"}]},
            r"tables.user: initializer\.parts\[1\]: unknown initializer kind 'norm'",
        ),
        ("tables.a\tb", {"dim": 8, "optimizer": {"kind": "sgd", "lr": 0.1}, "initializer": {"kind": "zeros"}}, "tables.a\tb"),
    ],
)
def test_a_wrong_key_is_named_with_its_path(path: str, value: object, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{named}"):
        config.parse(tree(path, value), {})
    file = tmp_path / "kvemb.yaml"
    file.write_text(yaml.safe_dump(tree(path, value)))
    with pytest.raises(ConfigError, match=rf"kvemb\.yaml: {named}"):
        config.load(file, {})


def test_a_layout_is_refused_where_storage_has_no_hashes() -> None:
    given = tree("tables.user.expected_rows", 1000)
    given["tables"]["user"]["layout"] = "compact"
    assert config.parse(given, {}).tables[0].layout == "compact"
    given["storage"]["kind"] = "memcached"
    with pytest.raises(ConfigError, match=r"^tables\.user\.layout: .*memcached has a key for every row"):
        config.parse(given, {})


@pytest.mark.parametrize("top", [None, [], "text", 5])
def test_a_file_that_is_no_mapping_is_refused(top: object) -> None:
    with pytest.raises(ConfigError, match="the file"):
        config.parse(top, {})


def test_keys_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^storage\.5"):
        config.parse(tree("storage", TREE["storage"] | {5: "x"}), {})
    with pytest.raises(ConfigError, match=r"^tables\.5"):
        config.parse(tree("tables", {5: TREE["tables"]["user"]}), {})


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "\t", "- a\nb: c", "!!python/object:os.system x", "a: &a [*b]", "\x00"])
def test_bad_yaml_names_the_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "kvemb.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"kvemb\.yaml: "):
        config.load(file, {})


def test_a_file_that_is_not_text_or_not_there_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvemb.yaml"
    for path in (file, tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            config.load(path, {})
    for nothing in (None, 5):
        with pytest.raises(ConfigError, match="expected the path"):
            config.load(nothing, {})  # type: ignore[arg-type]
    file.write_bytes(b"\xff\xfe\x00cluster")
    with pytest.raises(ConfigError, match=r"kvemb\.yaml"):
        config.load(file, {})


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    file = tmp_path / "with blank & percent%41.yaml"
    file.write_text(yaml.safe_dump(TREE))
    expected = config.load(file, {})
    assert expected.storage == config.parse(TREE, {}).storage
    assert config.load(str(file), {}) == config.load(file.as_uri(), {}) == expected
    assert config.load(file.as_uri().replace("file:///", "file://localhost/"), {}) == expected
    with pytest.raises(ConfigError, match="leave the host out"):
        config.load("file://elsewhere/kvemb.yaml", {})


@pytest.mark.parametrize(("given", "expected"), [(None, "kvemb-data"), ("state", "state"), ("/var/lib/kvemb", "/var/lib/kvemb")])
def test_a_relative_data_dir_starts_at_the_folder_of_the_file(
    given: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    servers = TREE["parameter_servers"] | ({"data_dir": given} if given else {})
    (tmp_path / "conf" / "kvemb.yaml").write_text(yaml.safe_dump(tree("parameter_servers", servers)))
    monkeypatch.chdir(tmp_path)
    assert config.load("conf/kvemb.yaml", {}).servers.data_dir == str(tmp_path / "conf" / expected)


def test_a_key_that_stands_twice_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "kvemb.yaml"
    text = yaml.safe_dump(TREE, sort_keys=False)
    n_lines = text.count("\n")
    for line, key in (("    dim: 16", "dim"), ("cluster: other", "cluster")):
        file.write_text(f"{text}{line}\n")
        with pytest.raises(ConfigError, match=rf"kvemb\.yaml: line {n_lines + 1}: the key '{key}' stands twice"):
            config.load(file, {})


def test_a_table_of_the_file_begins_as_one_of_create_table_where_no_initializer_is_given() -> None:
    tables = {"user": {"dim": 8, "optimizer": {"kind": "sgd", "lr": 0.1}}, "item": {"dim": 8, "frozen": True}}
    user, item = config.load(tree("tables") | {"tables": tables}, {}).tables
    assert (user.initializer, item.initializer) == (init.uniform(), init.zeros())


def test_a_key_may_override_a_merged_one(tmp_path: Path) -> None:
    file = tmp_path / "kvemb.yaml"
    text = yaml.safe_dump(tree("tables"))
    row = "{dim: 8, optimizer: {kind: sgd, lr: 1e-3}, initializer: {kind: zeros}}"
    file.write_text(f"{text}tables:\n  a: &a {row}\n  b: &b {{<<: *a, dim: 16}}\n  c: {{<<: *b, dim: 32}}\n")
    assert [table.dim for table in config.load(file, {}).tables] == [8, 16, 32]


def test_parts_of_rows_are_a_list_in_yaml(tmp_path: Path) -> None:
    parts = "[{width: 1, kind: zeros}, {width: 16, kind: normal, std: 1e-2}]"
    text = yaml.safe_dump({key: value for key, value in TREE.items() if key != "tables"})
    file = tmp_path / "kvemb.yaml"
    file.write_text(f"{text}tables:\n  a: {{dim: 17, optimizer: {{kind: adam}}, initializer: {{kind: columns, parts: {parts}}}}}\n")
    assert config.load(file, {}).tables[0].initializer == init.columns((1, init.zeros()), (16, init.normal(std=0.01)))


def test_secrets_are_in_no_repr_and_no_message() -> None:
    loaded = config.parse(tree("storage", TREE["storage"] | {"password_env": "P"}), {"P": "hunter2"})
    assert loaded.storage.password == "hunter2"
    assert "hunter2" not in repr(loaded) + str(loaded) + repr(loaded.storage)


def test_memcached_takes_no_credentials() -> None:
    storage = {"kind": "memcached", "nodes": ["a:1"], "password_env": "P"}
    with pytest.raises(ConfigError, match=r"storage\.password_env"):
        config.parse(tree("storage", storage), {"P": "x"})
