"""Faults of processes: hang, go on, end, die. A hung one keeps its connections open and answers nothing, which is what makes it hard."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from kvemb.local_cluster.processes import LocalProcess


def pause(process: LocalProcess) -> None:
    """Stop it at any point of its work (SIGSTOP)."""
    process.signal(signal.SIGSTOP)


def resume(process: LocalProcess) -> None:
    """Let it go on (SIGCONT)."""
    process.signal(signal.SIGCONT)


def kill(process: LocalProcess) -> int:
    """End it at once (SIGKILL); return its exit code."""
    return process.kill()


def terminate(process: LocalProcess, grace_s: float) -> int:
    """Ask it to end (SIGTERM), by force after the grace time; return its exit code."""
    return process.stop(grace_s)


@contextmanager
def paused(process: LocalProcess) -> Iterator[None]:
    """Have it stopped for the length of a `with` block."""
    pause(process)
    try:
        yield
    finally:
        resume(process)
