"""Data of another release are refused by name before anything changes, and the way that the message gives works, followed word by word."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from golden_data import GOLDEN, IDS, KeptCluster, facts, rows_of, unpacked
from next_release import NAMES, apply

import kvemb
from kvemb.cli import main
from kvemb.errors import MessageError
from kvemb.local_cluster.processes import LocalProcess, python_env
from kvemb.local_cluster.storage_servers import start_servers
from kvemb.net.deadline import Deadline
from kvemb.protocol import message_format

PATIENCE_S = 90.0
LATER = str(Path(__file__).with_name("next_release.py"))
WAY = (
    "Either go on with the release that wrote it. Or move to this one: with that release run `kvemb save URL`, and stop its shards; in "
    "kvemb.yaml name other, empty nodes (storage.nodes) and another, empty data folder (parameter_servers.data_dir); start the shards "
    "with this release, and run `kvemb load URL` (docs/upgrade.md)."
)


@pytest.fixture
def cluster(require_server: Callable[[str], str]) -> Iterator[tuple[KeptCluster, Path]]:
    """Of this release, started from golden data."""
    require_server("redis-server")
    with unpacked(GOLDEN / "0.1.tar.xz") as folder, KeptCluster(folder) as running:
        yield running, folder


def later_shard(cluster: KeptCluster, shard: int, *changes: str) -> LocalProcess:
    """Start a shard of a later release."""
    usual = cluster._shard_command(shard)
    cluster._ready_file(shard).unlink(missing_ok=True)
    command = [sys.executable, "-P", LATER, *changes, "--", *usual[usual.index("shard") :], "--start-timeout", "5"]
    return LocalProcess("a later shard", command, cluster.folder / f"later-{'-'.join(changes)}.log", python_env())


def refused(cluster: KeptCluster, shard: int, *formats: str) -> str:
    """Start a shard of a later release, which must not come up; return its words."""
    process = later_shard(cluster, shard, *formats)
    try:
        assert process._child.wait(PATIENCE_S) == 3, process.log_tail()
    finally:
        process.kill()
    return re.sub(r"\s+", " ", process.log.read_text())


def test_another_format_of_anything_is_refused_with_the_way_on_and_changes_nothing(cluster: tuple[KeptCluster, Path]) -> None:
    running, folder = cluster
    with kvemb.connect(running.url) as client:
        client.flush()
    for shard in running.shards:
        assert shard.stop(PATIENCE_S) == 0
    found = {name: refused(running, 1, name) for name in NAMES if name != "run"}  # runs are read when they are needed
    for name, words in found.items():
        assert f"this release of kvemb reads {' and '.join(map(str, reads(name)))}. Nothing was changed. {WAY}" in words, words
    for shard in range(2):
        running.start_shard(shard)
    with kvemb.connect(running.url) as client:
        assert rows_of(client) == facts(folder)["rows"]


def test_further_fields_of_a_later_release_are_left_unread_by_shards_trainers_and_the_command(
    cluster: tuple[KeptCluster, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    running, _ = cluster
    assert running.shards[1].stop(PATIENCE_S) == 0
    later = later_shard(running, 1, "messages")
    try:
        later.wait_until(running._ready_file(1).exists, Deadline.after(PATIENCE_S))
        for trainer in ("this", "later"):
            with kvemb.connect(running.url, trainer=trainer) as client:
                before = rows_of(client)
                grads = {name: (ids, np.ones((len(ids), client.table(name).definition.dim))) for name, ids in IDS.items()}
                client.push(grads).wait_applied(timeout_s=60)
                assert all(rows != before[name] for name, rows in rows_of(client).items())
            assert main(["save", str(running.config_path), (tmp_path / trainer).as_uri()]) == 0
            apply("messages", monkeypatch.setattr)
    finally:
        later.kill()


def test_another_protocol_is_refused_with_a_typed_error_on_either_side(
    cluster: tuple[KeptCluster, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, _ = cluster
    with kvemb.connect(running.url, trainer="golden") as client:
        client.flush()
        monkeypatch.setattr(message_format, "PROTOCOL_VERSION", 2)
        with pytest.raises(MessageError, match=r"protocol version 1, expected 2: .* Install one release for all of them"):
            kvemb.connect(running.url, trainer="later")
        with pytest.raises(MessageError, match="protocol version 1, expected 2"):
            client.push({"user": ([3], [[1.0] * 4])}).wait(timeout_s=30)
        monkeypatch.undo()
    with kvemb.connect(running.url, trainer="golden") as client:  # install one release for all of them
        client.push({"user": ([3], [[1.0] * 4])}).wait_applied(timeout_s=30)


def reads(name: str) -> list[int]:
    """The formats that the later release reads."""
    return sorted({"map": [4], "state": [5], "marker": [7, 8]}.get(name, [2]))


@pytest.mark.full
def test_the_way_that_a_refusal_gives_leads_to_the_other_release(
    cluster: tuple[KeptCluster, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, folder = cluster
    # with that release run `kvemb save URL`, and stop its shards
    url = (tmp_path / "saved").as_uri()
    assert main(["save", str(running.config_path), url]) == 0
    for shard in running.shards:
        assert shard.stop(PATIENCE_S) == 0
    assert WAY in refused(running, 0, *NAMES)
    # in kvemb.yaml name other, empty nodes (storage.nodes) and another, empty data folder (parameter_servers.data_dir)
    tree = yaml.safe_load(running.config_path.read_text())
    servers = start_servers("redis", 2, tmp_path, 64)
    tree["storage"]["nodes"] = [server.address for server in servers]
    tree["parameter_servers"]["data_dir"] = str(tmp_path / "another")
    running.config_path.write_text(yaml.safe_dump(tree))
    later: list[LocalProcess] = []
    try:
        # start the shards with this release
        for shard in range(2):
            ready = tmp_path / f"ready-{shard}"
            options = ["shard", "--config", str(running.config_path), "--shard", str(shard), "--ready-file", str(ready)]
            command = [sys.executable, "-P", LATER, *NAMES, "--", *options]
            later.append(LocalProcess(f"later shard {shard}", command, tmp_path / f"later-{shard}.log", python_env()))
        for shard, process in enumerate(later):
            process.wait_until((tmp_path / f"ready-{shard}").exists, Deadline.after(PATIENCE_S))
        # and run `kvemb load URL`
        for name in NAMES:
            apply(name, monkeypatch.setattr)
        assert main(["load", str(running.config_path), url]) == 0
        with kvemb.connect(running.url) as client:
            assert rows_of(client) == facts(folder)["rows"]
    finally:
        for process in (*later, *(server.process for server in servers)):
            process.kill()
