"""What `train` runs and checks: our training loop, what one stretch of it cost, and the proof that both sides train alike."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import redis
from numpy.typing import NDArray

from benchmarks.measure import Turn, cpu_s
from benchmarks.tfra.peer import Tfra
from kvemb.api.table import Table
from kvemb.arrays.ids import unique_ascending
from kvemb.client.ack import Ack, Staleness

TIMEOUT_S = 120.0
GRADIENT = 0.5  # as tfra/worker.py
CHECKED_STEPS = 3
_TOLERANCE = 1e-4  # Keras puts epsilon elsewhere than Adam's paper does
_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8
_ROW_WRITES = ("set", "setrange")
_OWN = ("info", "ping")


class WrongTrainingError(AssertionError):
    """Rows are not what the steps must have made of them."""


@dataclass(frozen=True)
class Stretch:
    """One turn, and its cost for each process.

    Args:
        turn: distinct rows of each step, summed; time until all of it was applied; the trainer's CPU time.
        server_cpu_s, ps_cpu_s: CPU time of the storage server and of the shards in it.
        n_operations: values read or written in storage.
        n_calls: commands that storage counted.
        staleness: of each push, as its ack says: changed fraction and batches elapsed.
    """

    turn: Turn
    server_cpu_s: float
    ps_cpu_s: float
    n_operations: int
    n_calls: int
    staleness: Sequence[Staleness] = ()

    @property
    def rows_per_s(self) -> float:
        """Distinct rows per second of wall time."""
        return self.turn.n_rows / self.turn.wall_s

    def per_row(self, total: float) -> float:
        """Return a total divided by the rows."""
        return total / self.turn.n_rows


class Ours:
    """Our trainer: the loop that a training program runs, with a model that costs nothing.

    Args:
        table: to train.
        batches: ids, uint64 [m] each, duplicates included.
    """

    def __init__(self, table: Table, batches: Sequence[NDArray[np.uint64]]) -> None:
        self.table, self.batches = table, batches
        self.staleness: list[Staleness] = []
        self.used: set[int] = set()
        self.loss = 0.0
        self._at = 0

    def run(self, seconds: float, max_unapplied: int) -> Turn:
        """Train batch after batch, going on where the last run stopped; after `seconds`, wait until all of it is in storage."""
        self.staleness = []
        unapplied: deque[Ack] = deque()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        n_rows = 0
        while time.perf_counter() - start_s < seconds:
            n, ack = self.step(self._at)
            n_rows, self._at = n_rows + n, (self._at + 1) % len(self.batches)
            unapplied.append(ack)
            while len(unapplied) > max_unapplied:
                self.wait_applied(unapplied.popleft())
        while unapplied:
            self.wait_applied(unapplied.popleft())
        self.table.flush(TIMEOUT_S)
        return Turn(n_rows, time.perf_counter() - start_s, time.process_time() - start_cpu_s)

    def step(self, index: int) -> tuple[int, Ack]:
        """Pull and push one batch; return how many distinct rows it has, and the push's ack."""
        ids = unique_ascending(self.batches[index]).ids
        rows, versions = self.table.pull(ids, return_versions=True, timeout_s=TIMEOUT_S)
        self.loss = float(rows.sum()) * GRADIENT
        self.used.add(index)
        return len(ids), self.table.push(ids, np.full_like(rows, GRADIENT), versions=versions, timeout_s=TIMEOUT_S)

    def wait_applied(self, ack: Ack) -> None:
        """Wait until a push is applied, and keep its staleness."""
        ack.wait_applied(TIMEOUT_S)
        if ack.staleness is not None:
            self.staleness.append(ack.staleness)


class CommandCounter:
    """What a Redis or Valkey server has counted of its commands.

    Args:
        client: of the server; its own commands do not count.
    """

    def __init__(self, client: "redis.Redis") -> None:
        self._client = client

    @staticmethod
    @contextmanager
    def on(port: int) -> Iterator["CommandCounter"]:
        """Open one."""
        with redis.Redis(port=port) as client:
            yield CommandCounter(client)

    def read(self) -> tuple[int, int]:
        """Return (values read or written, calls) so far."""
        return counted(self._client.info("commandstats"), self._client.info("stats"))


def counted(commands: Mapping[str, Mapping[str, float]], stats: Mapping[str, int]) -> tuple[int, int]:
    """Return (values read or written, calls) from INFO's sections; an MGET is as many reads as it has keys.

    Example:
        >>> commands = {"cmdstat_mget": {"calls": 2}, "cmdstat_set": {"calls": 7}, "cmdstat_info": {"calls": 1}}
        >>> counted(commands, {"keyspace_hits": 5, "keyspace_misses": 1})
        (13, 9)
    """
    calls = {name.removeprefix("cmdstat_"): int(one["calls"]) for name, one in commands.items()}
    n_writes = sum(calls.get(name, 0) for name in _ROW_WRITES)
    n_reads = stats["keyspace_hits"] + stats["keyspace_misses"]  # only reads are counted there
    return n_reads + n_writes, sum(n for name, n in calls.items() if name not in _OWN)


def stretch(run: Callable[[], Turn], server: Sequence[int], shards: Sequence[int], counter: CommandCounter) -> Stretch:
    """Run a turn and take stock."""
    operations, calls = counter.read()
    server_s, ps_s = cpu_s(server), cpu_s(shards)
    turn = run()
    server_s, ps_s = cpu_s(server) - server_s, cpu_s(shards) - ps_s
    operations_after, calls_after = counter.read()
    return Stretch(turn, server_s, ps_s, operations_after - operations, calls_after - calls)


def check_first_steps(ours: Ours, other: Tfra | None, lr: float) -> None:
    """Train the first batches one by one, and compare every row with Adam in NumPy.

    Raises:
        WrongTrainingError: naming the contender that is wrong, and by how much.
    """
    for index in range(CHECKED_STEPS):
        ours.step(index)[1].wait_applied(TIMEOUT_S)
        if other is not None:
            other.step(index)
    ours.table.flush(TIMEOUT_S)
    ids, expected = after_steps(ours.batches[:CHECKED_STEPS], lr)
    require_close("ours", ours.table.pull(ids, timeout_s=TIMEOUT_S), expected)
    if other is not None:
        require_close("TFRA", other.rows(ids), expected)


def after_steps(batches: Sequence[NDArray[np.uint64]], lr: float) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
    """Return distinct ids [n] and what each weight of their rows must be [n], from zeros, by Adam on the rows of a step only."""
    ids = np.unique(np.concatenate(batches))
    w, m, v = np.zeros((3, len(ids)))
    for step, batch in enumerate(batches, 1):
        at = np.searchsorted(ids, np.unique(batch))
        m[at] = _BETA1 * m[at] + (1 - _BETA1) * GRADIENT
        v[at] = _BETA2 * v[at] + (1 - _BETA2) * GRADIENT**2
        w[at] -= lr * m[at] / (1 - _BETA1**step) / (np.sqrt(v[at] / (1 - _BETA2**step)) + _EPS)
    return ids, w


def require_close(name: str, rows: NDArray[np.float32], expected: NDArray[np.float64]) -> None:
    """Refuse rows that differ from what every one of their weights must be.

    Raises:
        WrongTrainingError: with the worst.
    """
    off = np.abs(rows / expected[:, None] - 1).max()
    if not off <= _TOLERANCE:
        raise WrongTrainingError(f"{name}: after {CHECKED_STEPS} steps of Adam a weight is off by {off:.2e} of its value")


def check_trained(ours: Ours) -> None:
    """Every row pushed exists and went down, as its gradient was always above zero; no other row exists.

    Raises:
        WrongTrainingError: with the numbers.
    """
    ids = np.unique(np.concatenate([ours.batches[index] for index in ours.used]))
    rows, versions = ours.table.pull(ids, return_versions=True, timeout_s=TIMEOUT_S)
    n_missing, n_wrong, n_known = int((versions == 0).sum()), int((~(rows < 0)).any(axis=1).sum()), len(ours.table)
    if n_missing or n_wrong or n_known != len(ids):
        raise WrongTrainingError(
            f"{len(ids)} rows were pushed; {n_missing} do not exist, {n_wrong} did not go down, the shards know {n_known}"
        )
