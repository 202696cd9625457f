"""The `kvemb` command as a person runs it: a process of its own, against real servers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvemb
from kvemb.local_cluster import LocalCluster

ROOT = Path(__file__).parents[2]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "kvemb.cli", *words]


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster("valkey", 2, shards=2) as running:
        with kvemb.connect(running.url) as client:
            table = client.create_table("t", dim=4, optimizer=kvemb.optim.sgd(lr=1.0))
            table.push(np.arange(1000), np.ones((1000, 4)))
            table.flush()
        yield running


def test_status_shows_every_node_and_shard(cluster: LocalCluster) -> None:
    done = run("status", str(cluster.config_path))
    assert done.returncode == 0, done.stderr
    for server in cluster.servers:
        assert server.address in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("0 ", "1 "))]
    assert sum(int(row[2].replace(",", "")) for row in rows) == 1000
    assert all(row[-1] == "ok" for row in rows)
    assert "1,024 MB" in done.stdout or "1,074 MB" in done.stdout  # the nodes' limit


def test_status_of_a_cluster_with_a_dead_node_says_so_and_fails() -> None:
    with LocalCluster("valkey", 2, shards=1) as running:
        running.servers[1].process.kill()
        done = run("status", str(running.config_path))
    assert done.returncode == 1
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("127.0.0.1")}
    assert "Connection refused" in rows[running.servers[1].address]
    assert "valkey" in rows[running.servers[0].address]
    assert "Traceback" not in done.stderr


def test_status_shows_the_other_shards_when_one_is_down() -> None:
    with LocalCluster("valkey", 1, shards=2) as running:
        running.shards[0].kill()
        done = run("status", str(running.config_path))
    states = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith(("0 ", "1 "))}
    assert done.returncode == 1
    assert "shard 0" in states["0"]
    assert states["1"].endswith("ok")


def test_a_missing_config_is_one_line_with_the_mend() -> None:
    done = run("status", "no-such-file.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("kvemb status: no-such-file.yaml: cannot be read")
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_server_program_is_one_line_with_the_mend(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(
        command("demo", "--store", "memcached"), capture_output=True, text=True, timeout=60, cwd=ROOT, env=env, check=False
    )
    assert done.returncode == 2
    assert "apt-get install memcached" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_in_the_demo_leaves_no_process() -> None:
    demo = subprocess.Popen(command("demo"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True)
    assert demo.stdout is not None
    children: set[int] = set()
    try:
        for line in demo.stdout:
            children |= descendants(demo.pid)
            if " steps  loss" in line:
                break
        assert len(children) >= 6, "2 nodes, 2 shards, 2 trainers"
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 130
        rest = demo.stdout.read()
        assert "interrupted" in rest
        assert "Traceback" not in rest
    finally:
        demo.kill()
        demo.wait()
        demo.stdout.close()
    deadline = time.monotonic() + 5
    while alive(children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(children)


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found |= {int(child)} | descendants(int(child))
    return found


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}
