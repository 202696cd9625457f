"""Starts and ends the processes of a local cluster; none outlives this process, however it ends.

Every child is started through a few lines that ask the kernel to kill it when its parent dies (Linux). It has a session of its own: Ctrl-C
reaches this process only, which then ends them in order.

A program that is killed leaves its cluster's folder behind; the next program that starts a cluster removes it. The owner, and children that
it has forked, hold a lock on a file in the folder as long as they live. The kernel releases it, so no process id can be mistaken for
another's. A folder without that file, or of another user, is never touched.
"""

import fcntl
import logging
import os
import queue
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from kvemb.errors import KvembError
from kvemb.net.deadline import Deadline

_PR_SET_PDEATHSIG = 1
_LAUNCHER = f"""
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""
_POLL_S = 0.02
_START_TIMEOUT_S = 30.0
_LOG_TAIL = 20


class LocalProcessError(KvembError):
    """A server of the local cluster did not start or ended by itself; the message holds the end of its log."""


class LocalProcess:
    """One child process and its log file."""

    def __init__(self, name: str, command: Sequence[str], log: Path, extra_env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as out:
            self._child = launch(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, extra_env=extra_env)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._child.poll()

    def wait_until(self, ready: Callable[[], bool], deadline: Deadline, *, while_it_talks: bool = False) -> None:
        """Wait until `ready()` holds."""
        said_bytes = self.log.stat().st_size
        while not ready():
            if while_it_talks and said_bytes != (said_bytes := self.log.stat().st_size):
                deadline = Deadline.after(deadline.timeout_s)
            code = self.poll()
            if code is not None:
                raise LocalProcessError(f"{self.name} ended with exit code {code} while starting; its last words:\n{self.log_tail()}")
            if deadline.expired:
                raise LocalProcessError(f"{self.name} was not ready within {deadline.timeout_s:g} s; its last words:\n{self.log_tail()}")
            time.sleep(_POLL_S)

    def log_tail(self) -> str:
        """The last lines of its output."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_LOG_TAIL:]) or "  (none)"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when it has ended. After SIGSTOP all its threads stand still when this returns."""
        if self.poll() is None:
            self._child.send_signal(number)
            if number == signal.SIGSTOP:
                with suppress(ChildProcessError):  # it has ended, and another thread has its exit code
                    os.waitid(os.P_PID, self._child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def stop(self, grace_s: float) -> int:
        """Ask it to end, then make it end; return its exit code."""
        self.signal(signal.SIGTERM)
        try:
            return self._child.wait(grace_s)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """End it at once; return its exit code."""
        self.signal(signal.SIGKILL)
        return self._child.wait()


def launch(
    command: Sequence[str],
    *,
    stdin: int | IO[bytes],
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    extra_env: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a child that does not outlive this process and does not hear its Ctrl-C."""

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-S", "-c", _LAUNCHER, str(os.getpid()), *command],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            env={**os.environ, **(extra_env or {})},
        )

    return _on_starter_thread(start)


_starter: tuple[int, "queue.SimpleQueue[tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]]]"] | None = None
_starter_lock = threading.Lock()


def _on_starter_thread(start: Callable[[], "subprocess.Popen[bytes]"]) -> "subprocess.Popen[bytes]":
    """Run `start` on a thread that lives as long as this process: to Linux, the end of the thread that started a child is the parent's."""
    global _starter
    with _starter_lock:
        if _starter is None or _starter[0] != os.getpid():  # none yet, or left behind by a fork
            _starter = (os.getpid(), queue.SimpleQueue())
            threading.Thread(target=_start_forever, args=(_starter[1],), name="kvemb-process-starter", daemon=True).start()
        jobs = _starter[1]
    done: Future[subprocess.Popen[bytes]] = Future()
    jobs.put((start, done))
    return done.result(timeout=_START_TIMEOUT_S)


def _start_forever(jobs: "queue.SimpleQueue[tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]]]") -> None:
    while True:
        start, done = jobs.get()
        try:
            done.set_result(start())
        except BaseException as error:
            done.set_exception(error)


def python_env() -> dict[str, str]:
    """Return the environment of a Python child: it finds these packages in any folder, and has one BLAS thread.

    Several of our processes share the cores already; a BLAS that starts a thread per core in each only slows the others down.
    """
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def free_ports(n: int) -> list[int]:
    """Return n unique loopback ports without a listener, each set aside for about a minute.

    A connection that was just closed keeps the system from giving its port to another process that asks for any. A server that listens with
    SO_REUSEADDR, as all of ours do, may have it.
    """
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(n)]
        for listener in listeners:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            with socket.create_connection(listener.getsockname()):
                listener.accept()[0].close()
        return [int(listener.getsockname()[1]) for listener in listeners]


def accepts(port: int) -> bool:
    """Whether something listens on that loopback port."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


_PREFIX, _LOCK = "kvemb-", "owner.lock"
log = logging.getLogger("kvemb")


class LocalFolder:
    """A new folder; first the folders of dead owners are removed."""

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
            _remove_if_left(left)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # memcached drops root for the user "nobody", and must still be able to reach its folder.
        self.path.chmod(0o755)
        self._lock = _locked(self.path)

    def remove(self) -> None:
        """Delete the folder with all its files. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _locked(folder: Path) -> IO[bytes]:
    """Make the lock file; it gets its name when it is locked, so that no program finds it without its owner."""
    new = folder / f"{_LOCK}.new"
    file = new.open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(folder / _LOCK)
    except OSError as error:  # a file system without locks
        log.info("%s cannot be locked (%s): if this program is killed, the folder stays", folder, error.strerror)
    return file


def _remove_if_left(lock: Path) -> None:
    """Remove a folder of this user's without an owner; of several processes that try at once, one does."""
    try:
        folder = lock.parent.lstat()
        if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.geteuid():
            return
        with os.fdopen(os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), lock.lstat()):
                shutil.rmtree(lock.parent, ignore_errors=True)
                log.info("removed %s of a program that was killed", lock.parent)
    except OSError:  # owned, or gone meanwhile
        return
