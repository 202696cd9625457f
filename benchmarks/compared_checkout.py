"""The worker of `compare`: a program of one checkout, with a cluster of its own, that runs a loop when it is told to. Public names only.

It is run by its path, with the checkout on Python's path, so that it is the same program for both. Requests and replies are lines of JSON
(`worker_process`).
"""

import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kvemb

N_IDS, BATCH, N_BATCHES, ZIPF = 300_000, 106_496, 4, 1.05
TIMEOUT_S = 120.0
LOOPS = ("pull", "pull 1 id", "pull 26 ids", "pull 500 ids", "train seen rows", "train new rows", "save")


class Loops:
    """The loops of one cluster, each a function of its table's dim that does one step and returns how many rows that were."""

    def __init__(self, cluster: Any, folder: str, seed: int) -> None:
        self._cluster, self._folder, self._rng = cluster, folder, np.random.default_rng(seed)
        weights = np.arange(1, N_IDS + 1, dtype=np.float64) ** -ZIPF
        cumulative = np.cumsum(weights) / weights.sum()
        order = self._rng.permutation(N_IDS)
        draws = [order[np.searchsorted(cumulative, self._rng.random(BATCH))] for _ in range(N_BATCHES)]
        self._batches = [np.unique(draw) for draw in draws]
        self._tables: dict[int, Any] = {}
        self._acks: list[Any] = []
        self._at, self._next_new = 0, N_IDS

    def table(self, dim: int) -> Any:
        """The table of a dim, with all rows of the batches."""
        if dim not in self._tables:
            table = self._tables[dim] = self._cluster.create_table(f"dim{dim}", dim=dim, optimizer=kvemb.optim.adam(lr=0.001))
            for ids in self._batches:
                table.push(ids, np.ones((len(ids), dim), np.float32)).wait_applied(TIMEOUT_S)
        return self._tables[dim]

    def step(self, loop: str, dim: int) -> int:
        """Do one step of a loop."""
        table, self._at = self.table(dim), self._at + 1
        ids = self._batches[self._at % N_BATCHES]
        if loop.startswith("pull "):
            n = int(loop.split()[1])
            table.pull(ids[:n])
            return n
        if loop == "pull":
            table.pull(ids)
        elif loop == "save":
            self._cluster.save(f"{self._folder}/{self._at}")
            shutil.rmtree(f"{self._folder}/{self._at}")
            return sum(len(one) for one in self._tables.values())
        elif loop == "train seen rows":
            rows, versions = table.pull(ids, return_versions=True)
            self._acks.append(table.push(ids, rows, versions=versions))
            if len(self._acks) > 1:
                self._acks.pop(0).wait_applied(TIMEOUT_S)
        else:
            ids = np.arange(self._next_new, self._next_new + len(ids))
            self._next_new += len(ids)
            rows = table.pull(ids)
            table.push(ids, rows).wait_applied(TIMEOUT_S)
        return len(ids)

    def finish(self) -> None:
        """Wait for what is on its way."""
        while self._acks:
            self._acks.pop().wait_applied(TIMEOUT_S)


def processes() -> dict[str, int]:
    """The processes that are counted: this one, its shard and its storage server."""
    found = {"client": int(Path("/proc/self").resolve().name)}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == found["client"]:
                words = (stat.parent / "cmdline").read_bytes()
                found["storage" if b"redis-server" in words else "shard"] = int(stat.parent.name)
        except OSError:  # it has ended meanwhile
            continue
    return found


def used(pid: int) -> np.ndarray:
    """CPU time in microseconds, and minor page faults, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return np.array([(int(fields[11]) + int(fields[12])) * 1e6 / 100, int(fields[7])])


def run(loops: Loops, loop: str, dim: int, seconds: float) -> dict[str, Any]:
    """Run a loop for so long; return its rows a second, and of each process CPU microseconds and minor faults a row."""
    counted = processes()
    loops.step(loop, dim)
    loops.finish()
    before, began_s, n_rows = {name: used(pid) for name, pid in counted.items()}, time.perf_counter(), 0
    while time.perf_counter() - began_s < seconds:
        n_rows += loops.step(loop, dim)
    loops.finish()
    took_s = time.perf_counter() - began_s
    spent = {name: (used(pid) - before[name]) / n_rows for name, pid in counted.items()}
    return {"rows_per_s": n_rows / took_s, "spent": {name: both.tolist() for name, both in spent.items()}, "rows": n_rows}


def main(answer: Callable[[dict[str, Any]], None], requests: Iterator[str]) -> None:
    """Answer requests until their end."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as folder, kvemb.local(store="redis", nodes=1, shards=1) as url, kvemb.connect(url) as cluster:
        loops = Loops(cluster, folder, seed=1)
        answer({"product": str(Path(kvemb.__file__).parents[1]), "pids": processes()})
        for line in requests:
            answer(run(loops, **json.loads(line)))


if __name__ == "__main__":
    main(lambda reply: print(json.dumps(reply), flush=True), iter(sys.stdin))
