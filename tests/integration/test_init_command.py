"""`kvemb init`: the file that it writes is a whole one, explains every key truly, and starts a cluster."""

import re
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import yaml
from shard_processes import Process, until
from test_cli import run

import kvemb
from kvemb import config
from kvemb.config import ServersConfig, StorageConfig
from kvemb.local_cluster.processes import free_ports
from kvemb.local_cluster.storage_servers import start_servers

ENVIRON = {"KVEMB_STORAGE_USER": "u", "KVEMB_STORAGE_PASSWORD": "p"}
SHOWS_ANOTHER = {"username_env", "password_env", "tls", "trainers", "metrics_port"}  # than the default, which would say nothing


def explained(path: Path) -> list[tuple[str, int]]:
    """The keys that are commented out, with the numbers of their lines."""
    found = [(re.match(r"  # (\w+): ", line), number) for number, line in enumerate(path.read_text().split("tables:")[0].splitlines())]
    return [(match[1], number) for match, number in found if match]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "kvemb.yaml"
    assert run("init", str(path)).returncode == 0
    return path


def test_the_file_has_every_key_and_nothing_but_defaults_in_force(written: Path) -> None:
    tree = yaml.safe_load(written.read_text())
    read = config.load(written, {})
    assert read.storage == StorageConfig("redis", ("127.0.0.1:6379",))
    assert read.servers == ServersConfig(("127.0.0.1:7070",), data_dir=str(written.parent / "kvemb-data"))
    keys = {key for key, _ in explained(written)} | set(tree["storage"]) | set(tree["parameter_servers"])
    known = {field.name for one in (StorageConfig, ServersConfig) for field in fields(one)}
    assert keys == known - {"username", "password"} | {"username_env", "password_env"}


def test_every_key_may_be_taken_in_as_it_stands_and_shows_its_default(written: Path) -> None:
    before, lines = config.load(written, ENVIRON), written.read_text().splitlines()
    for key, number in explained(written):
        text = "\n".join([*lines[:number], lines[number].replace("# ", "", 1), *lines[number + 1 :]])
        if key in {"trainers", "barrier_timeout_s", "on_lost_trainer"}:
            text = text.replace("  # mode: async", "  mode: sync")
            text = text if key == "trainers" else text.replace("  # trainers: 4", "  trainers: 4")
        after = config.load(yaml.safe_load(text) | {}, ENVIRON)
        if key not in SHOWS_ANOTHER:
            section = "storage" if hasattr(after.storage, key) and not hasattr(after.servers, key) else "servers"
            default = getattr(getattr(before, section), key)
            assert getattr(getattr(after, section), key) == (str(Path.cwd() / "kvemb-data") if key == "data_dir" else default), key


def test_a_file_that_is_there_stays_and_wrong_addresses_write_none(written: Path, tmp_path: Path) -> None:
    before = written.read_text()
    done = run("init", str(written), "--cluster", "other")
    assert (done.returncode, written.read_text()) == (2, before)
    assert "is there already, and was not changed" in done.stderr
    done = run("init", str(tmp_path / "new.yaml"), "--nodes", "no-port")
    assert done.returncode == 2
    assert "storage.nodes[0]: got 'no-port', expected \"host:port\"" in done.stderr
    assert not (tmp_path / "new.yaml").exists()


def test_a_file_with_other_machines_says_what_it_lacks_before_shards_start(tmp_path: Path) -> None:
    said = run("init", str(tmp_path / "far.yaml"), "--nodes", "10.0.0.1:6379", "--shards", "10.0.1.1:7070").stdout
    assert "first give storage and parameter_servers the line tls, or insecure: true (docs/security.md)" in said
    assert "first" not in run("init", str(tmp_path / "near.yaml")).stdout


def test_a_cluster_starts_from_it(tmp_path: Path, require_server: Callable[[str], str]) -> None:
    require_server("memcached")
    path, (port,) = tmp_path / "mine.yaml", free_ports(1)
    servers = start_servers("memcached", 2, tmp_path, 64)
    nodes, shard = [server.address for server in servers], f"127.0.0.1:{port}"
    try:
        done = run("init", str(path), "--cluster", "yes", "--store", "memcached", "--nodes", *nodes, "--shards", shard)
        words = next(line.split() for line in done.stdout.splitlines() if line.startswith("  kvemb shard"))
        process = Process([sys.executable, "-m", "kvemb.cli", *words[1:]], tmp_path / "shard.log")
        try:
            until(lambda: "serving on" in process.text(), process)
            with kvemb.connect(path) as cluster:
                assert cluster.config.cluster == "yes"
                table = cluster.create_table("t", dim=2, optimizer=kvemb.optim.sgd())
                table.push([1], np.ones((1, 2))).wait_applied()
            assert run("doctor", str(path)).returncode == 0
            process.child.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        finally:
            process.end()
    finally:
        for server in servers:
            server.process.kill()
