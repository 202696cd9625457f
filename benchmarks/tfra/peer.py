"""Drives TFRA's worker: starts it in its environment, hands it arrays in files, and offers its calls as contenders.

What must not live here: TensorFlow (worker.py). TFRA keeps its rows in a database of its own on the server that ours is measured on.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import Turn
from benchmarks.peers import PeerAbsentError
from benchmarks.worker_process import ROOT, WorkerProcess, running

PYTHON = ROOT / ".bench-peers" / "tfra" / "bin" / "python"
DATABASE = 1


class Tfra:
    """A running worker. Make it with `started`.

    Args:
        worker: its process.
    """

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self.versions: dict[str, str] = {}

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._worker.pid

    def open(self, port: int, dim: int, lr: float = 0.01, *, std: float = 0.0) -> None:
        """Connect to a Redis or Valkey server on loopback; rows begin as normal draws of this deviation, unless it is 0 as zeros.

        Raises:
            PeerError: TFRA could not.
        """
        self.versions = self._worker.ask(do="open", config=config_file(self._worker.folder, port), dim=dim, lr=lr, std=std)

    def fill(self, ids: NDArray[np.uint64], rows: NDArray[np.float32]) -> None:
        """Write rows: uint64 [n], float32 [n, dim]."""
        self._worker.ask(do="fill", ids=self._worker.saved("ids", ids.view(np.int64)), rows=self._worker.saved("rows", rows))

    def batches(self, ids: Sequence[NDArray[np.uint64]], first: int = 0) -> None:
        """Hand over the batches that `turn` uses one after another, from number `first` on: uint64 [m] each, all of one length."""
        self._worker.ask(do="batches", ids=self._worker.saved("ids", np.stack(ids).view(np.int64)), first=first)

    def rows(self, ids: NDArray[np.uint64], call: str = "lookup") -> NDArray[np.float32]:
        """Return the rows of these ids; one that does not exist is zeros."""
        path = self._worker.folder / "answer.npy"
        self._worker.ask(do="look", ids=self._worker.saved("ids", ids.view(np.int64)), rows=str(path), call=call)
        rows: NDArray[np.float32] = np.load(path)
        return rows

    def step(self, index: int) -> None:
        """Train on one batch."""
        self._worker.ask(do="step", index=index)

    def turn(self, call: str, seconds: float = 0.0, *, steps: int = 0) -> Turn:
        """Work for that long, or that many calls.

        Args:
            call: "lookup", "lookup_unique" or "train", whose rows are the distinct ones.
            seconds: of calls; one at least.
            steps: how many calls at least.
        """
        done = self._worker.ask(do="run", call=call, seconds=seconds, steps=steps)
        return Turn(done["n_rows"], done["wall_s"], done["cpu_s"])


def config_file(folder: Path, port: int) -> str:
    """Write `redis_config` there; return the path."""
    path = folder / "redis_config.json"
    path.write_text(json.dumps(redis_config(port)), encoding="utf-8")
    return str(path)


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
    with running("TFRA", [str(PYTHON), str(Path(__file__).with_name("worker.py"))], {"PYTHONPATH": ""}) as worker:
        yield Tfra(worker)
