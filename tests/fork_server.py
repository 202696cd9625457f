"""The program that forks what tests start, with everything imported that our programs import: see `tests.forked`.

One thread, and gRPC imported but not begun: what is forked is as one that has just been started. Whoever is forked leaves the loop below
and runs its program at this file's end, so that it ends as every Python program does.
"""

import ctypes
import gc
import json
import os
import resource
import runpy
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from kvemb.schema import slots

PR_SET_PDEATHSIG = 1
_ROOT = Path(__file__).resolve().parents[1]
_OF_OTHERS = {"torch", "keras", "tensorflow", "jax", "own", "testing"}  # what brings a framework or pytest, or looks elsewhere
MAINS = {"kvemb.cli": "kvemb.cli", "paramserver": "paramserver.__main__"}
Job = dict[str, Any]


def next_job(asked: socket.socket) -> Job:
    """Fork at each request, and answer with the child's id; return what to do only in the child.

    A process of its own forks it and ends: so its parent is who asked (`tests.forked` adopts it), and may wait for it.
    """
    while True:
        head, fds, _, _ = socket.recv_fds(asked, 4, 3)
        if not head:
            os._exit(0)
        job = json.loads(received(asked, struct.unpack("!I", head)[0]))
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            if child := os.fork():
                os.write(tell, struct.pack("!I", child))
                os._exit(0)
            asked.close()
            os.close(told)
            os.close(tell)
            become(job, fds)
            return job
        for fd in (tell, *fds):
            os.close(fd)
        child_id = os.read(told, 4)
        os.close(told)
        os.waitpid(between, 0)
        asked.sendall(child_id)


def received(asked: socket.socket, size_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < size_bytes:
        parts += asked.recv(size_bytes - len(parts))
    return bytes(parts)


def become(job: Job, fds: list[int]) -> None:
    """Take over the environment, folder, files and arguments of a new process, which is killed when its parent dies."""
    while os.getppid() != job["parent"]:
        time.sleep(0.0002)
        if os.getppid() == 1:
            os._exit(1)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != job["parent"]:
        os._exit(1)
    if job["session"]:
        os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, job["most_files"])
    os.umask(int(job["umask"], 8))
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    time.tzset()
    sys.argv[:] = job["words"]


def import_all() -> None:
    """Import what a shard or a command may come to import."""
    for package in ("kvemb", "paramserver"):
        for path in sorted((_ROOT / package).rglob("*.py")):
            parts = path.relative_to(_ROOT).with_suffix("").parts
            if not _OF_OTHERS & set(parts[1:2]):
                with suppress(ImportError):  # an extra that is not installed
                    import_module(".".join(part for part in parts if part != "__init__"))
    slots.slot_texts()  # which most programs come to compute
    gc.collect()
    gc.freeze()


def run(is_module: bool, program: str) -> None:
    """Do what Python does with `-m` and a module, or with a script."""
    if program in MAINS:  # imported already, which runpy warns of
        sys.exit(import_module(MAINS[program]).main())
    elif is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    import_all()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in what is forked"
    job = next_job(socket.socket(fileno=int(sys.argv.pop())))
    run(job["module"], sys.argv[0])
