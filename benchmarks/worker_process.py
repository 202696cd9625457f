"""A worker in another Python, perhaps of another virtual environment: requests and replies are JSON lines, arrays go in .npy files.

What must not live here: what is asked. A worker prints one object for each line that it reads, {"error": ...} after a failure, and ends
with its standard input.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import PeerError

ROOT = Path(__file__).resolve().parents[1]
_TAIL_CHARS = 2000
_END_S = 60.0


class WorkerProcess:
    """A running worker. Make it with `running`.

    Args:
        name: for messages.
        process: the worker.
        folder: for arrays.
        log: where the worker's own words go.
    """

    def __init__(self, name: str, process: "subprocess.Popen[str]", folder: Path, log: Path) -> None:
        self.name, self.folder = name, folder
        self._process, self._log = process, log

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def saved(self, name: str, array: NDArray[Any]) -> str:
        """Write an array where the worker can read it; return the path."""
        path = self.folder / f"{name}.npy"
        np.save(path, array)
        return str(path)

    def ask(self, **request: object) -> dict[str, Any]:
        """Send a request, and wait for what comes of it.

        Raises:
            PeerError: it failed, or has ended; with its last words.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its last words are in its log
        return self.reply()

    def reply(self) -> dict[str, Any]:
        """Return what the worker says next; raises as `ask`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self.name}'s process has ended: {self._log.read_text(encoding='utf-8', errors='replace')[-_TAIL_CHARS:]}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerError(f"{self.name}: {reply['error']}")
        return reply

    def end(self) -> None:
        """Let it end by itself, and wait for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_END_S)


@contextmanager
def running(name: str, command: Sequence[str], more_environment: Mapping[str, str] | None = None) -> Iterator[WorkerProcess]:
    """Start a worker; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="kvemb-worker-") as folder:
        log = Path(folder) / "worker.log"
        environment = {**os.environ, **(more_environment or {})}
        with (
            log.open("wb") as words,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True, cwd=ROOT, env=environment
            ) as process,
        ):
            try:
                yield WorkerProcess(name, process, Path(folder), log)
            finally:
                process.kill()
                assert process.stdin is not None
                with suppress(BrokenPipeError):  # what it was not sent any more
                    process.stdin.close()
