"""What tests fork is as a process that a user starts; and one of each command line is started as users start it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvemb.local_cluster import LocalCluster
from tests import forked

COMMAND = [sys.executable, "-m", "kvemb.cli"]


def is_forked(pid: int) -> bool:
    return b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("words", [["--version"], ["nonsense"], ["shard", "--nonsense"], ["status", "none.yaml"], ["shard", "--help"]])
def test_a_forked_command_says_and_returns_what_a_real_one_does(words: list[str]) -> None:
    def done() -> tuple[int, str, str]:
        ended = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=200, check=False)
        return ended.returncode, ended.stdout, ended.stderr

    told = done()
    with forked.real_processes():
        assert done() == told


@pytest.mark.parametrize("how", ["forked", "real"])
def test_a_shard_is_a_process_with_a_session_and_signals_of_its_own(how: str, request: pytest.FixtureRequest) -> None:
    if how == "real":
        request.getfixturevalue("real_processes")
    with LocalCluster(shards=2) as local:
        shard, other = local.shards
        assert is_forked(shard.pid) is (how == "forked")
        assert os.getsid(shard.pid) == shard.pid != os.getsid(0)
        shard.signal(signal.SIGSTOP)
        assert Path(f"/proc/{shard.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        shard.signal(signal.SIGCONT)
        assert (shard.kill(), shard.poll()) == (-signal.SIGKILL, -signal.SIGKILL)
        assert other.poll() is None
        assert local.start_shard(0).stop(60) == 0


@pytest.mark.parametrize("env", [{"PYTHONHASHSEED": "1"}, {"PYTHONPATH": "/elsewhere"}, {"LD_PRELOAD": ""}])
def test_a_command_that_python_is_to_start_differently_for_is_real(env: dict[str, str]) -> None:
    with subprocess.Popen([*COMMAND, "--version"], env={**os.environ, **env}, stdout=subprocess.DEVNULL) as process:
        assert not is_forked(process.pid)


@pytest.mark.parametrize("name", ["paramserver.py", "yaml/__init__.py", "notes.txt"])
def test_a_command_in_a_folder_that_may_have_modules_of_a_user_is_real(name: str, tmp_path: Path) -> None:
    tmp_path.joinpath(name).parent.mkdir(exist_ok=True)
    tmp_path.joinpath(name).touch()
    with subprocess.Popen([*COMMAND, "--version"], cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        assert is_forked(process.pid) is (name == "notes.txt")
