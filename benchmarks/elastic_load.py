"""The load of `elastic`: steps of trainers, their times, and the proof that none is lost."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

import kvemb
from benchmarks.apply_load import TIMEOUT_S, WrongApplyError
from benchmarks.ids import row_ids
from kvemb.api import Cluster
from kvemb.api.table import Table
from kvemb.client.ack import Ack

_UNAPPLIED = 2
_BLOCK_ROWS = 100_000


@dataclass(frozen=True)
class Window:
    """What happened between two moments.

    Args:
        start_s, end_s: of `time.perf_counter`.
        steps: of each trainer, when each step that was under way in the window began and ended: float64 [n, 2].
    """

    start_s: float
    end_s: float
    steps: Sequence[NDArray[np.float64]]

    @property
    def steps_per_s(self) -> float:
        """Of all trainers; a step that is in the window in part counts as that part."""
        n = 0.0
        for times in self.steps:
            inside_s = np.minimum(times[:, 1], self.end_s) - np.maximum(times[:, 0], self.start_s)
            n += float((inside_s / (times[:, 1] - times[:, 0])).sum())
        return n / (self.end_s - self.start_s)

    @property
    def step_s(self) -> float:
        """The median step."""
        return float(median(np.concatenate([times[:, 1] - times[:, 0] for times in self.steps]).tolist()))

    @property
    def longest_s(self) -> float:
        """The longest step of any trainer, its part outside the window included."""
        return max(float((times[:, 1] - times[:, 0]).max()) for times in self.steps)


class Trainers:
    """Threads that pull and push, each over a connection of its own; a context manager.

    Args:
        url: of a cluster with the table.
        name: of a table of SGD with rate 1, every row of which is one.
        n_rows: in it.
        batch_rows: distinct rows of a step.
        n: how many.
    """

    def __init__(self, url: str, name: str, n_rows: int, batch_rows: int, n: int) -> None:
        self._url, self._name, self._n_rows, self._batch_rows = url, name, n_rows, batch_rows
        self._times: list[list[tuple[float, float]]] = [[] for _ in range(n)]
        self.counts = np.zeros((n, n_rows), np.int64)
        self._end, self._begun = threading.Event(), threading.Barrier(n + 1)
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._guarded, args=(number,), name=f"trainer {number}") for number in range(n)]

    def __enter__(self) -> "Trainers":
        for thread in self._threads:
            thread.start()
        self._begun.wait(TIMEOUT_S)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        if self._errors and exc_info[0] is None:
            raise self._errors[0]

    @contextmanager
    def window(self) -> Iterator[list[Window]]:
        """Note what happens in a block: one window, there at the block's end."""
        found: list[Window] = []
        start_s = time.perf_counter()
        yield found
        end_s = time.perf_counter()
        before = [len(times) for times in self._times]
        while not self._errors and any(len(times) == n for times, n in zip(self._times, before, strict=True)):
            time.sleep(0.005)  # the step that is under way belongs to it
        if self._errors:
            raise self._errors[0]
        steps = [np.array(list(times)) for times in self._times]
        found.append(Window(start_s, end_s, [times[(times[:, 1] > start_s) & (times[:, 0] < end_s)] for times in steps]))

    def _guarded(self, number: int) -> None:
        try:
            with kvemb.connect(self._url) as opened:
                self._train(opened.table(self._name), number)
        except BaseException as error:
            self._errors.append(error)
            self._begun.abort()

    def _train(self, table: Table, number: int) -> None:
        rng = np.random.default_rng(number)
        grads = np.ones((self._batch_rows, table.dim), np.float32)
        waiting: deque[Ack] = deque()
        self._begun.wait(TIMEOUT_S)
        while not self._end.is_set():
            rows = rng.choice(self._n_rows, self._batch_rows, replace=False, shuffle=False)
            ids = row_ids(rows)
            start_s = time.perf_counter()
            table.pull(ids, timeout_s=TIMEOUT_S)
            waiting.append(table.push(ids, grads, timeout_s=TIMEOUT_S))
            if len(waiting) > _UNAPPLIED:
                waiting.popleft().wait_applied(TIMEOUT_S)
            self._times[number].append((start_s, time.perf_counter()))
            self.counts[number, rows] += 1
        for ack in waiting:
            ack.wait_applied(TIMEOUT_S)


def fill(opened: Cluster, name: str, n_rows: int, dim: int) -> Table:
    """Create a table of SGD with rate 1, every row of which is pushed once."""
    table = opened.create_table(name, dim=dim, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros(), id_dtype="uint64")
    for start in range(0, n_rows, _BLOCK_ROWS):
        ids = row_ids(np.arange(start, min(n_rows, start + _BLOCK_ROWS)))
        table.push(ids, np.ones((len(ids), dim), np.float32), timeout_s=TIMEOUT_S)
    table.flush(TIMEOUT_S)
    return table


def check_counts(table: Table, counts: NDArray[np.int64]) -> None:
    """Refuse a table whose rows are not the number of pushes that touched them.

    Args:
        table: flushed.
        counts: int64 [n], of every row.

    Raises:
        WrongApplyError: with how many are wrong.
    """
    for start in range(0, len(counts), _BLOCK_ROWS):
        some = counts[start : start + _BLOCK_ROWS]
        rows = table.pull(row_ids(np.arange(start, start + len(some))), timeout_s=TIMEOUT_S)
        wrong = (-rows != some[:, None]).any(axis=1)
        if wrong.any():
            raise WrongApplyError(f"{int(wrong.sum())} of {len(some)} rows are not the number of pushes that they got")
