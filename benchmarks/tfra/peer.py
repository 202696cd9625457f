"""Drives TFRA's worker: starts it in its environment, hands it arrays in files, and offers what it does as contenders.

What must not live here: TensorFlow (worker.py). TFRA keeps its rows in a database of its own on the server that ours is measured on.
"""

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import Turn
from benchmarks.peers import PeerAbsentError, PeerError

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".bench-peers" / "tfra" / "bin" / "python"
DATABASE = 1
_TAIL_CHARS = 2000


class Tfra:
    """A running worker. Make it with `started`.

    Args:
        process: the worker.
        folder: for arrays.
        log: where the worker's own words go.
    """

    def __init__(self, process: "subprocess.Popen[str]", folder: Path, log: Path) -> None:
        self._process, self._folder, self._log = process, folder, log
        self.versions: dict[str, str] = {}

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def open(self, port: int, dim: int, lr: float = 0.01, *, std: float = 0.0) -> None:
        """Connect to a Redis or Valkey server on loopback; rows begin as normal draws of this deviation, unless it is 0 as zeros.

        Raises:
            PeerError: TFRA could not.
        """
        config = self._folder / "redis_config.json"
        config.write_text(json.dumps(redis_config(port)), encoding="utf-8")
        self.versions = self._ask(do="open", config=str(config), dim=dim, lr=lr, std=std)

    def fill(self, ids: NDArray[np.uint64], rows: NDArray[np.float32]) -> None:
        """Write rows: uint64 [n], float32 [n, dim]."""
        self._ask(do="fill", ids=self._saved("ids", ids.view(np.int64)), rows=self._saved("rows", rows))

    def batches(self, ids: Sequence[NDArray[np.uint64]], first: int = 0) -> None:
        """Hand over the batches that `turn` uses one after another, from number `first` on: uint64 [m] each, all of one length."""
        self._ask(do="batches", ids=self._saved("ids", np.stack(ids).view(np.int64)), first=first)

    def rows(self, ids: NDArray[np.uint64], call: str = "lookup") -> NDArray[np.float32]:
        """Return the rows of these ids; what does not exist is zeros."""
        path = self._folder / "answer.npy"
        self._ask(do="look", ids=self._saved("ids", ids.view(np.int64)), rows=str(path), call=call)
        rows: NDArray[np.float32] = np.load(path)
        return rows

    def step(self, index: int) -> None:
        """Train on one batch."""
        self._ask(do="step", index=index)

    def turn(self, call: str, seconds: float = 0.0, *, steps: int = 0) -> Turn:
        """Work for that long, or that many calls.

        Args:
            call: "lookup", "lookup_unique" or "train", whose rows are the distinct ones.
            seconds: of calls; one at least.
            steps: how many calls at least.
        """
        done = self._ask(do="run", call=call, seconds=seconds, steps=steps)
        return Turn(done["n_rows"], done["wall_s"], done["cpu_s"])

    def _saved(self, name: str, array: NDArray[Any]) -> str:
        path = self._folder / f"{name}.npy"
        np.save(path, array)
        return str(path)

    def _ask(self, **request: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; what it said last is in its log
        return read_reply(self._process.stdout.readline(), self._log)


def redis_config(port: int) -> dict[str, object]:
    """Return TFRA's redis_config.json for one standalone server (mode 2), one hash per table, in `DATABASE`."""
    tags = ["{bench}"]
    return {
        "redis_connection_mode": 2,
        "redis_host_ip": ["127.0.0.1"],
        "redis_host_port": [port],
        "redis_user": "default",  # with an empty name TFRA sends an AUTH that the server refuses, and gives up
        "redis_password": "",
        "redis_db": DATABASE,
        "redis_connect_timeout": 10_000,
        "redis_socket_timeout": 60_000,
        "storage_slice": 1,
        "keys_sending_size": 1024,
        "model_tag_import": "bench",
        "model_tag_runtime": "bench",
        "redis_hash_tags_import": tags,
        "redis_hash_tags_runtime": tags,
        "table_store_mode": 2,
    }


def read_reply(line: str, log: Path) -> dict[str, Any]:
    """Read a reply of the worker.

    Raises:
        PeerError: it failed, or has ended; with its last words.
    """
    if not line:
        raise PeerError(f"TFRA's process has ended: {log.read_text(encoding='utf-8', errors='replace')[-_TAIL_CHARS:]}")
    reply: dict[str, Any] = json.loads(line)
    if "error" in reply:
        raise PeerError(f"TFRA: {reply['error']}")
    return reply


def require_installed() -> None:
    """Refuse to go on without TFRA's environment.

    Raises:
        PeerAbsentError: saying how to get it.
    """
    if not PYTHON.exists():
        raise PeerAbsentError("TFRA is not installed. To set it up beside this checkout: make bench-peers")


@contextmanager
def started() -> Iterator[Tfra]:
    """Start a worker; it ends with the block.

    Raises:
        PeerAbsentError: TFRA is not installed.
    """
    require_installed()
    command = [str(PYTHON), str(Path(__file__).with_name("worker.py"))]
    with tempfile.TemporaryDirectory(prefix="kvemb-tfra-") as name:
        log = Path(name) / "worker.log"
        with log.open("wb") as words:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True)
        try:
            yield Tfra(process, Path(name), log)
        finally:
            process.kill()
            process.communicate()
