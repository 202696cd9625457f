"""A shard that starts waits for storage at every step, not only until it has joined: a node that hangs meanwhile ends no start."""

import importlib
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from matrix import one_of
from scraped import ports_side_by_side, value

import kvemb
from kvemb.commands.status_command import render
from kvemb.config import load
from kvemb.errors import DeadlineExceededError, FencedError, NodeUnavailableError, ParameterServerError, ShardUnavailableError
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.processes import LocalProcessError, free_ports
from kvemb.operate.cluster_status import healthy, survey
from kvemb.operate.examination import examine
from kvemb.protocol.message_format import installed_version
from paramserver.lifecycle.shard import Shard
from paramserver.lifecycle.start import start
from paramserver.recovery.start_report import PHASES
from tests.real_servers import ServerNodes

pytestmark = pytest.mark.full  # starts and ends of processes, of which each test needs several

PATIENCE_S = 90.0
KINDS = {"redis": "redis-server", "memcached": "memcached"}
STEPS = {
    "the registry of tables is read": "paramserver.model.table_registry.Registry.load",
    "a table of kvemb.yaml is created": "paramserver.model.table_registry.Registry.create",
    "the last owner is asked for": "paramserver.recovery.claim_shard._owner",
    "this process says that it is the owner": "paramserver.recovery.claim_shard._take",
}


@pytest.fixture
def nodes(request: pytest.FixtureRequest, require_server: Callable[[str], str], tmp_path: Path) -> Any:
    kind = request.param
    require_server(KINDS[kind])
    (tmp_path / "nodes").mkdir()
    made = ServerNodes(kind, 2, tmp_path / "nodes", 64)
    yield made
    made.reset()
    made.close()


def started(
    nodes: ServerNodes,
    folder: Path,
    wait: Callable[[float], None],
    start_timeout_s: float = PATIENCE_S,
    port: int = 0,
    metrics_port: int = 0,
) -> Shard:
    tree = {
        "cluster": "demo",
        "storage": {"kind": nodes.config.kind, "nodes": list(nodes.config.nodes), "timeout_s": 1.0},
        "parameter_servers": {
            "shards": [f"127.0.0.1:{port or 1}"],
            "data_dir": str(folder / "shards"),
            "metrics_port": metrics_port,
            "away_timeout_s": 5,  # a client that connects meanwhile waits so long for it
        },
        "tables": {"t": {"dim": 2, "optimizer": {"kind": "sgd", "lr": 1.0}, "initializer": {"kind": "zeros"}}},
    }
    path = folder / "kvemb.yaml"
    path.write_text(yaml.safe_dump(tree))
    return start(load(path, {}), 0, listen=f"127.0.0.1:{port}", start_timeout_s=start_timeout_s, wait=wait)


def before(monkeypatch: pytest.MonkeyPatch, step: str, then: Callable[[], None]) -> None:
    """Have something happen before a step of the start is taken for the first time."""
    where, _, name = step.rpartition(".")
    try:
        owner: Any = importlib.import_module(where)
    except ModuleNotFoundError:
        module, _, cls = where.rpartition(".")
        owner = getattr(importlib.import_module(module), cls)
    original, called = getattr(owner, name), []

    def patched(*args: Any, **kwargs: Any) -> Any:
        if not called:
            called.append(True)
            then()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, patched)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("nodes", one_of("memcached", "redis"), indirect=True)
def test_a_node_that_hangs_is_waited_for_at_every_step_of_a_start(
    nodes: ServerNodes, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before(monkeypatch, step, lambda: nodes.pause(1))

    def wait(pause_s: float) -> None:
        nodes.resume(1)
        time.sleep(pause_s)

    with caplog.at_level(logging.INFO, "paramserver"):
        shard = started(nodes, tmp_path, wait)
    epoch = shard._parts.engine.epoch
    assert shard.stop(PATIENCE_S) == ""
    assert epoch == 1  # the tries together are one start
    assert "waiting for storage" in caplog.text


@pytest.mark.parametrize("nodes", ["memcached"], indirect=True)
def test_a_node_that_hangs_for_good_ends_a_start_when_its_time_is_up(
    nodes: ServerNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before(monkeypatch, STEPS["the last owner is asked for"], lambda: nodes.pause(1))
    waited: list[float] = []
    with pytest.raises((NodeUnavailableError, DeadlineExceededError)):
        started(nodes, tmp_path, lambda pause_s: (waited.append(pause_s), time.sleep(pause_s))[0], start_timeout_s=8.0)
    assert waited


@pytest.mark.parametrize("nodes", ["memcached"], indirect=True)
def test_who_waits_to_say_that_a_shard_is_his_does_not_say_it_once_another_one_has_it(
    nodes: ServerNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before(monkeypatch, STEPS["this process says that it is the owner"], lambda: nodes.pause(1))

    def taken_over(pause_s: float) -> None:
        (epoch,) = (tmp_path / "shards").rglob("epoch")
        epoch.write_text("2\n")
        nodes.resume(1)

    with pytest.raises(FencedError, match="a process with epoch 2 has taken the shard over"):
        started(nodes, tmp_path, taken_over)


class Seen:
    """What is seen of a shard in the middle of its start."""

    def __init__(self, folder: Path, port: int, metrics_port: int) -> None:
        self.folder, self.address, self.metrics_port = folder, f"127.0.0.1:{port}", metrics_port

    def look(self) -> None:
        config = load(self.folder / "kvemb.yaml", {})
        seen = survey(config)
        self.status, self.well = render(seen).splitlines(), healthy(seen)
        self.findings = {finding.name: finding.what for finding in examine(config, installed_version()).findings}
        with grpc.insecure_channel(self.address) as channel:
            ask = health_pb2_grpc.HealthStub(channel).Check
            self.health = {name: ask(health_pb2.HealthCheckRequest(service=name)).status for name in ("live", "")}
        self.phases = {of: value(self.metrics_port, "kvemb_shard_starting", phase=of) for of in PHASES}
        self.ready = value(self.metrics_port, "kvemb_shard_ready")
        with pytest.raises(ShardUnavailableError, match="shard 0 is starting: it ") as caught:
            kvemb.connect(str(self.folder / "kvemb.yaml"), timeout_s=5)
        self.told = str(caught.value)


@pytest.mark.parametrize(
    ("step", "phase", "words"),
    [
        ("paramserver.model.table_registry.Registry.load", "claiming", "the files of the shard's last process"),
        ("paramserver.recovery.replay.Recovery.run", "replaying", "its journal"),
    ],
)
@pytest.mark.parametrize("nodes", ["memcached"], indirect=True)
def test_a_shard_says_from_its_first_second_how_far_its_start_is(
    nodes: ServerNodes, step: str, phase: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,), metrics_port = free_ports(1), ports_side_by_side(1)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/shard-0.last-words").write_text("NodeUnavailableError: of an hour ago")
    seen = Seen(tmp_path, port, metrics_port)
    before(monkeypatch, step, seen.look)
    shard = started(nodes, tmp_path, time.sleep, port=port, metrics_port=metrics_port)
    try:
        assert seen.status[-2].split()[-1] == "starting"
        assert words in seen.status[-1]
        assert not seen.well
        assert words in seen.findings["shard-starting"]
        assert "shard-unreachable" not in seen.findings
        assert seen.health == {"live": 1, "": 2}
        assert {of for of, now in seen.phases.items() if now} == {phase}
        assert seen.ready == 0
        assert words in seen.told
        assert "an hour ago" not in "".join([*seen.status, seen.told])
        with kvemb.connect(str(tmp_path / "kvemb.yaml")) as cluster:  # the same port, and it serves
            assert cluster.table("t").pull([1]).shape == (1, 2)
        assert (value(metrics_port, "kvemb_shard_ready"), value(metrics_port, "kvemb_shard_starting", phase=phase)) == (1, 0)
    finally:
        assert shard.stop(PATIENCE_S) == ""


@pytest.mark.parametrize("nodes", ["memcached"], indirect=True)
def test_a_process_that_may_not_run_a_shard_leaves_the_words_of_the_one_that_does_alone(nodes: ServerNodes, tmp_path: Path) -> None:
    shard = started(nodes, tmp_path, time.sleep)
    try:
        with pytest.raises(ParameterServerError, match="another process runs shard 0"):
            started(nodes, tmp_path, time.sleep)
        assert not (tmp_path / "shards/shard-0.last-words").exists()
    finally:
        assert shard.stop(PATIENCE_S) == ""


@pytest.fixture
def hanging(require_server: Callable[[str], str]) -> Iterator[tuple[LocalCluster, int]]:
    """A cluster whose shard 1 hangs after an acknowledged push, and its pid."""
    require_server("redis-server")
    with LocalCluster("redis", 1, shards=2) as cluster:
        with kvemb.connect(cluster.url) as client:
            table = client.create_table("t", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
            table.push(range(100), [[1.0, 1.0]] * 100)
            table.flush()
        old = cluster.shards[1]
        os.kill(old.pid, signal.SIGSTOP)
        yield cluster, old.pid
        if old.poll() is None:
            old.kill()


def is_whole(cluster: LocalCluster) -> bool:
    with kvemb.connect(cluster.url) as client:
        return bool((client.table("t").pull(range(100)) == -1).all())


def test_a_shard_that_hangs_is_mended_by_following_the_doctor_word_by_word(hanging: tuple[LocalCluster, int]) -> None:
    cluster, pid = hanging
    (found,) = (one for one in examine(load(cluster.config_path, {}), installed_version()).findings if one.name == "shard-hangs")
    words = re.search(r"\(kill -9 (\d+) on .*?\), then start the shard as always: kvemb shard --shard (\d+)\.", found.mend)
    assert words is not None, found.mend
    assert (int(words[1]), int(words[2])) == (pid, 1)
    os.kill(int(words[1]), signal.SIGKILL)
    cluster.start_shard(int(words[2]))
    assert is_whole(cluster)


def test_a_take_over_beside_the_process_that_hangs_waits_for_its_port_and_says_whose_it_is(hanging: tuple[LocalCluster, int]) -> None:
    cluster, pid = hanging
    with pytest.raises(LocalProcessError, match=rf"cannot listen on .*process {pid} on .*end it .*Nothing was lost") as caught:
        cluster.start_shard(1, "--take-over", "--start-timeout", "2")
    assert "without --take-over" in str(caught.value)
    cluster.launch_shard(1, "--take-over")
    deadline = time.monotonic() + PATIENCE_S
    while "It is tried for" not in cluster.shards[1].log_tail():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (found,) = (one for one in examine(load(cluster.config_path, {}), installed_version()).findings if one.name == "shard-hangs")
    assert f"kill -9 {pid} " in found.mend  # not of the one that waits
    os.kill(pid, signal.SIGKILL)
    cluster._await_shard(1)
    assert is_whole(cluster)
