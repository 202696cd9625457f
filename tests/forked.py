"""Shards and `kvemb` commands that tests start are forked from a process that has imported all; the rest is started as ever.

A start takes 0.4 s of CPU, nearly all of it imports, and a run of the tests has a thousand. `subprocess.Popen` does all that it does but
for the start itself: the forked process is a child of this one, which may signal it and wait for it.
"""

import ctypes
import inspect
import json
import os
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvemb.local_cluster import processes

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("kvemb.cli", "paramserver", "chaos.trainer", "chaos.serving_reader", "chaos.subscriber")
"""What is forked as `python -m` starts it; and so are scripts in these folders, which import little but ours."""
FOLDERS = (ROOT / "tests" / "faults", ROOT / "tests" / "integration")

_PR_SET_CHILD_SUBREAPER = 36
_START = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_SIGNATURE = inspect.signature(_START)
_FILES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_CHILDS_FILES = ("p2cread", "c2pwrite", "errwrite")
# Whoever asks for more gets a process of the usual way.
_USUAL = {"executable": None, "preexec_fn": None, "pass_fds": (), "shell": False, "restore_signals": True, "process_group": -1}
_USUAL |= {"gid": None, "gids": None, "uid": None, "umask": -1}
# What Python, libc and the linker read only as a process begins.
_READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_")
_paused = False
n_started = 0
"""Processes of any kind that this one has started since `install`; `--most-starts` bounds them."""


class ForkServer:
    """The process that forks; one thread at a time may ask."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._env = {**os.environ, **processes.python_env()}
        self._env["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'tests'}"
        self._asks, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        with theirs:
            self.process = subprocess.Popen(command, cwd=ROOT, env=self._env, pass_fds=[theirs.fileno()], start_new_session=True, **quiet)  # type: ignore[call-overload]

    def may_serve(self, env: dict[str, str]) -> bool:
        """Whether a process with this environment is as one that was forked."""
        known, asked = (set(filter(None, given.get("PYTHONPATH", "").split(os.pathsep))) for given in (self._env, env))
        at_start = {name for name in {*env, *self._env} if name.startswith(_READ_AT_START)} - {"PYTHONPATH"}
        return asked <= known and all(env.get(name) == self._env.get(name) for name in at_start)

    def fork(self, job: dict[str, Any], fds: Sequence[int]) -> int:
        """Return the id of the new child of this process."""
        said = json.dumps(job).encode()
        with self._lock:
            _adopts(True)
            try:
                socket.send_fds(self._asks, [struct.pack("!I", len(said))], fds)
                self._asks.sendall(said)
                answer = struct.unpack("!I", self._asks.recv(4, socket.MSG_WAITALL))[0]
            except BaseException:  # a time limit: an answer that comes late would be taken for another one
                self.close()
                raise
            finally:
                _adopts(False)
        return int(answer)

    def close(self) -> None:
        self._asks.close()
        self.process.kill()
        self.process.wait()
        self.owner = 0


def _adopts(whether: bool) -> None:
    """Whether an orphan among this process's descendants becomes its child (Linux), as one does that the server forks."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0)


_server: ForkServer | None = None
_server_lock = threading.Lock()


def server() -> ForkServer:
    """This process's; started when it is first asked for."""
    global _server
    with _server_lock:
        if _server is None or _server.owner != os.getpid():
            _server = ForkServer()
        return _server


def install() -> None:
    """From now on this process and its forks start such programs so."""
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


@contextmanager
def real_processes() -> Iterator[None]:
    """Start everything as users do, for tests of the command lines themselves."""
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def _execute_child(popen: "subprocess.Popen[Any]", *args: object) -> None:
    """In place of `Popen._execute_child`, whose arguments these are."""
    global n_started
    n_started += 1
    asked = _SIGNATURE.bind(popen, *args).arguments
    job, fds = _job(asked), [asked[name] if asked[name] >= 0 else number for number, name in enumerate(_CHILDS_FILES)]
    if job is None or any(os.isatty(fd) for fd in fds):
        return _START(popen, *args)  # type: ignore[no-any-return]
    popen.pid = server().fork(job, fds)
    popen._child_created = True  # type: ignore[attr-defined]
    popen._close_pipe_fds(*(asked[name] for name in _FILES))  # type: ignore[attr-defined]


def _job(asked: dict[str, Any]) -> dict[str, Any] | None:
    """What to tell the server; None where a process is wanted that it cannot give."""
    if _paused or not isinstance(asked["args"], (list, tuple)) or any(asked[name] != usual for name, usual in _USUAL.items()):
        return None
    words, session = [os.fsdecode(word) for word in asked["args"]], asked["start_new_session"]
    if words[1:4] == ["-S", "-c", processes._LAUNCHER]:  # it would ask for a death with this process, and become the program behind it
        words = words[5:]
    ours_alone, words = words[1:2] == ["-P"] or _has_no_modules(Path(asked["cwd"] or os.getcwd())), [word for word in words if word != "-P"]
    env = dict(os.environ if asked["env"] is None else asked["env"])
    module = ours_alone and _is_module(words[1:])
    if words[:1] != [sys.executable] or not (module or _is_script(words[1:])) or not server().may_serve(env):
        return None
    return {
        "module": module,
        "words": words[2 if module else 1 :],
        "env": env,
        "cwd": str(asked["cwd"] or os.getcwd()),
        "session": session,
        "parent": os.getpid(),
        "most_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "umask": re.search(r"Umask:\s*(\d+)", Path("/proc/self/status").read_text())[1],  # type: ignore[index]
    }


def _has_no_modules(folder: Path) -> bool:
    """Whether Python, which looks there first, finds none but ours."""
    return folder == ROOT or (not any(folder.glob("*.py")) and not any(folder.glob("*/__init__.py")))


def _is_module(words: Sequence[str]) -> bool:
    return any(words[:2] == ["-m", name] for name in MODULES)


def _is_script(words: Sequence[str]) -> bool:
    return words[:1] != [] and words[0].endswith(".py") and Path(words[0]).resolve().parent in FOLDERS
