"""docs/operations.md tried: each command that it names is run, each alert's symptom is planted, and what it says to do mends it."""

import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import redis
import yaml
from scraped import ports_side_by_side, value
from test_cli import ROOT, command, run

import kvemb
from kvemb.local_cluster import LocalCluster

pytestmark = pytest.mark.full  # commands and pages for operators, on clusters that something is wrong with

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
PATIENCE_S = 60.0


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.fixture(scope="module")
def port() -> int:
    return ports_side_by_side(2)


@pytest.fixture(scope="module")
def cluster(port: int, require_server: Callable[[str], str]) -> Iterator[LocalCluster]:
    require_server("redis-server")
    with LocalCluster("redis", 2, shards=2, memory_mb=64, metrics_port=port) as made:
        with kvemb.connect(made.url) as client:
            client.create_table("user", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        train(made)
        yield made


def train(cluster: LocalCluster, n: int = 100) -> None:
    with kvemb.connect(cluster.url) as client:
        client.table("user").push(np.arange(n), np.ones((n, 2), np.float32)).wait_applied(PATIENCE_S)


def status(cluster: LocalCluster) -> "subprocess.CompletedProcess[str]":
    return run("status", str(cluster.config_path))


def doctor(cluster: LocalCluster) -> str:
    return run("doctor", str(cluster.config_path)).stdout


def well(cluster: LocalCluster) -> bool:
    return status(cluster).returncode == 0


@contextmanager
def setting(server: redis.Redis, **wanted: object) -> Iterator[None]:
    before = {name.replace("_", "-"): server.config_get(name.replace("_", "-")) for name in wanted}
    for name, to in wanted.items():
        server.config_set(name.replace("_", "-"), str(to))
    try:
        yield
    finally:
        for name, was in before.items():
            server.config_set(name, was[name])


@pytest.fixture
def node(cluster: LocalCluster) -> Iterator[redis.Redis]:
    with redis.Redis(port=cluster.servers[0].port) as client:
        yield client


# --- every command ------------------------------------------------------------------------------------------------------------

COMMANDS = set(re.findall(r"^\$ (kvemb [^#\n]*?) *(?:#.*)?$", PAGE, re.MULTILINE)) | set(re.findall(r"`(kvemb [^`]+)`", PAGE))
# Of those that need a word of the cluster's in the place of one of the page, or are run elsewhere: where.
ELSEWHERE = {
    "kvemb shard": "the cluster's own processes",
    "kvemb shard --config kvemb.yaml --shard N --take-over": "tests/faults/test_faults_data_folder.py",
    "kvemb shard --log-format json": "test_shard_logs.py",
    "kvemb completion bash > ~/.local/share/bash-completion/completions/kvemb": "test_cli.py",
    "kvemb completion zsh > ~/.zfunc/_kvemb": "test_cli.py",
    "kvemb save URL --resume": "test_save_load.py: it takes a shard that was killed",
    "kvemb nodes replace kvemb.yaml OLD NEW": "test_nodes_command.py: it takes a server that has ended",
    "kvemb drop TABLE --yes": "test_drop_table.py",
    "kvemb plan": "tests/unit/test_capacity.py",
    "kvemb status --watch": "below",
    "kvemb moves abort": "test_nodes_command.py: it takes a move",
    "kvemb doctor --conformance redis://HOST:PORT": "test_conformance.py: it takes a server that is of no cluster",
    "kvemb acl --check shard": "test_redis_users.py: it takes a user that may do no more",
}


def test_the_page_names_commands() -> None:
    assert {"kvemb status", "kvemb show user 42", "kvemb save URL", "kvemb repair --node ADDRESS"} <= COMMANDS
    assert sorted(ELSEWHERE) == sorted(ELSEWHERE.keys() & COMMANDS), "a command that the page names no more"


@pytest.mark.parametrize("line", sorted(COMMANDS - ELSEWHERE.keys()))
def test_every_command_of_the_page_does_what_it_says_on_a_cluster_that_is_well(line: str, cluster: LocalCluster, tmp_path: Path) -> None:
    words = shlex.split(line)[1:]
    words = [{"ADDRESS": cluster.servers[0].address, "URL": str(tmp_path / "saved"), "VERB": "save"}.get(word, word) for word in words]
    words = [word for word in words if word != "[kvemb.yaml]"]
    if "--help" not in words:
        words += ["--config", str(cluster.config_path)]
    if words[0] == "bench" and "--seconds" not in words:
        words += ["--seconds", "0.3"]
    done = run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_status_is_printed_again_until_ctrl_c(cluster: LocalCluster) -> None:
    words = command("status", str(cluster.config_path), "--watch", "1")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        seen: list[str] = []
        while len(seen) < 2:
            line = child.stdout.readline()
            assert line
            seen += [line] if line.startswith("NODE") else []
        child.send_signal(signal.SIGINT)
        child.stdout.read()


# --- every alert --------------------------------------------------------------------------------------------------------------


def test_every_alert_of_the_page_is_tried_here_or_its_figure_by_another_test() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    rules = yaml.safe_load((ROOT / "deploy/monitoring/alerts.yml").read_text())["groups"][0]["rules"]
    figures = {rule["alert"]: set(re.findall(r"kvemb_\w+", rule["expr"])) for rule in rules}
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    alerts = re.findall(r"^### (\w+)", PAGE, re.MULTILINE)
    assert {alert for alert in alerts if alert not in here and not any(figure in tests for figure in figures[alert])} == set()


def test_a_shard_that_is_down_is_named_and_goes_on_when_it_is_started_again(cluster: LocalCluster) -> None:
    """KvembShardDown"""
    with kvemb.connect(cluster.url) as client:
        client.table("user").push(np.arange(100), np.ones((100, 2), np.float32)).wait_applied(PATIENCE_S)
        before = client.table("user").pull([7])
        cluster.shards[1].kill()
        ack = client.table("user").push(np.arange(100), np.ones((100, 2), np.float32))
        done = status(cluster)
        assert done.returncode == 1
        assert "\nshard 1: " in done.stdout
        assert "[shard-unreachable]" in doctor(cluster)
        cluster.start_shard(1)
        ack.wait_applied(PATIENCE_S)
        assert (client.table("user").pull([7]) == before - 1).all()
    until(lambda: well(cluster))


def test_answers_of_nodes_and_the_clock_are_in_what_prometheus_asks_for(cluster: LocalCluster, port: int) -> None:
    """KvembNodeSlow, KvembClockOff"""
    until(lambda: value(port, "kvemb_node_answer_seconds", node=cluster.servers[0].address) is not None)
    clock_s = value(port, "kvemb_shard_clock_seconds")
    assert clock_s is not None
    assert abs(clock_s - time.time()) < PATIENCE_S


def test_a_shard_that_has_stopped_says_why_and_goes_on_after_a_restart(cluster: LocalCluster, node: redis.Redis, port: int) -> None:
    """KvembShardFailed, KvembNodeUnsafe, KvembNodeEvicts"""
    with setting(node, maxmemory_policy="volatile-ttl"):
        assert "[node-eviction]" in doctor(cluster)
        with setting(node, maxmemory="4mb"):
            for number in range(5000):  # only keys with an end are evicted: the rows stay, and the counter tells
                node.set(f"stranger:{number}", b"x" * 1000, ex=1000)
        logs = [cluster.folder / f"shard-{shard}.log" for shard in range(2)]
        until(lambda: all("failed because UnsafeNodeError" in log.read_text() for log in logs))  # each looks for itself
        until(lambda: all("keys away" in log.read_text() for log in logs))
        assert "failed" in status(cluster).stdout
        assert "maxmemory-policy is volatile-ttl" in status(cluster).stdout  # which was noticed first, and ended them
        until(lambda: value(port, "kvemb_node_unsafe", node=cluster.servers[0].address) == 1)
    node.delete(*node.keys("stranger:*"))
    done = run("repair", str(cluster.config_path), "--node", cluster.servers[0].address)
    assert "restart the shard" in done.stderr
    for shard in range(2):
        cluster.shards[shard].kill()
        cluster.start_shard(shard)
    assert run("repair", str(cluster.config_path), "--node", cluster.servers[0].address).returncode == 0
    train(cluster)
    until(lambda: well(cluster))


def test_a_full_node_is_found_before_and_after_shards_wait_and_room_is_all_that_they_need(
    cluster: LocalCluster, node: redis.Redis, port: int
) -> None:
    """KvembNodeNearlyFull, KvembShardWaits, KvembShardLags"""
    with kvemb.connect(cluster.url) as client:
        with setting(node, maxmemory=int(node.info("memory")["used_memory"] * 1.05)):
            assert "[node-headroom]" in doctor(cluster)
            ack = client.table("user").push(np.arange(100_000), np.ones((100_000, 2), np.float32))
            until(lambda: "[shard-waiting]" in doctor(cluster))
            assert "retrying" in status(cluster).stdout
            assert max(value(port + shard, "kvemb_shard_lag_seconds") or 0 for shard in range(2)) > 0
        ack.wait_applied(PATIENCE_S)
    until(lambda: well(cluster))


def test_a_node_that_comes_back_empty_gets_its_rows_back(cluster: LocalCluster) -> None:
    """KvembNodeDown, KvembNodeLost"""
    with kvemb.connect(cluster.url, read_only=True) as client:
        before = client.table("user").pull(np.arange(100))
    cluster.servers[0].process.kill()
    done = status(cluster)
    assert done.returncode == 1
    assert "Connection refused" in done.stdout
    assert "[node-unreachable]" in doctor(cluster)
    cluster.servers[0].restart()
    assert run("repair", str(cluster.config_path)).returncode == 0
    until(lambda: well(cluster))
    with kvemb.connect(cluster.url, read_only=True) as client:
        assert (client.table("user").pull(np.arange(100), timeout_s=PATIENCE_S) == before).all()


def test_a_smaller_journal_is_an_edit_and_a_restart(cluster: LocalCluster, port: int) -> None:
    """KvembJournalDiskNearlyFull"""
    tree = yaml.safe_load(cluster.config_path.read_text())
    tree["parameter_servers"]["journal_max_mb"] = 64
    cluster.config_path.write_text(yaml.safe_dump(tree))
    for shard in range(2):
        cluster.shards[shard].kill()
        cluster.start_shard(shard)
    train(cluster)
    assert value(port, "kvemb_shard_journal_limit_bytes") == 64 << 20


def test_a_save_that_failed_says_why_and_the_next_one_is_seen(cluster: LocalCluster, tmp_path: Path, port: int) -> None:
    """KvembSaveFailed, KvembSaveTooOld"""
    (tmp_path / "file").write_text("in the way")
    failed = run("save", str(tmp_path / "file" / "one"), "--config", str(cluster.config_path))
    assert failed.returncode == 1
    assert str(tmp_path / "file") in failed.stderr
    (tmp_path / "file").unlink()
    done = run("save", str(tmp_path / "file" / "one"), "--config", str(cluster.config_path))
    assert done.returncode == 0, done.stderr
    assert (value(port, "kvemb_shard_last_save_timestamp_seconds") or 0) > time.time() - PATIENCE_S


def test_a_step_that_waits_for_a_trainer_is_named_and_goes_on_when_that_one_is_back(require_server: Callable[[str], str]) -> None:
    """KvembStepStuck"""
    require_server("redis-server")
    with LocalCluster("redis", 1, shards=1, mode="sync", trainers=2, barrier_timeout_s=2) as made:
        tree = yaml.safe_load(made.config_path.read_text())
        tree["parameter_servers"]["on_lost_trainer"] = "wait"
        made.config_path.write_text(yaml.safe_dump(tree))
        made.shards[0].kill()
        made.start_shard(0)

        def pushes(name: str, n_steps: int) -> None:
            with kvemb.connect(made.url, trainer=name) as client:
                table = client.create_table("user", dim=2, optimizer=kvemb.optim.sgd(), exist_ok=True)
                for _ in range(n_steps):
                    table.push(np.arange(10), np.ones((10, 2), np.float32)).wait_applied(PATIENCE_S)

        anna = threading.Thread(target=pushes, args=("anna", 2))
        anna.start()
        with kvemb.connect(made.url, trainer="berta") as client:
            table = client.create_table("user", dim=2, optimizer=kvemb.optim.sgd(), exist_ok=True)
            table.push(np.arange(10), np.ones((10, 2), np.float32)).wait_applied(PATIENCE_S)
            until(lambda: "for berta; here are anna" in status(made).stdout)
            table.push(np.arange(10), np.ones((10, 2), np.float32)).wait_applied(PATIENCE_S)
        anna.join(PATIENCE_S)
        assert not anna.is_alive()
        assert well(made)
