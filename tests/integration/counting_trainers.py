"""Trainers whose pushes are counted, so that every row says how often each was applied."""

import threading
from collections.abc import Callable

import numpy as np

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.net.deadline import Deadline

PATIENCE_S = 60.0
N_IDS, PER_PUSH = 64, 24
KINDS = {"redis": "redis-server", "memcached": "memcached"}


class Trainer(threading.Thread):
    """Pushes 1 to random rows of two tables until it is told to stop, then waits until all of it is applied."""

    def __init__(self, url: str, number: int, stop: threading.Event) -> None:
        super().__init__(name=f"trainer-{number}", daemon=True)
        self._url, self._number, self._stop_it = url, number, stop
        self.counts = np.zeros((N_IDS, 4))
        self.n_pushes = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self.error = error

    def _train(self) -> None:
        random = np.random.default_rng(self._number)
        with kvemb.connect(self._url, trainer=f"t{self._number}") as cluster:
            table = cluster.table("ledger")
            acks = []
            while not self._stop_it.is_set():
                ids = random.choice(N_IDS, PER_PUSH, replace=False)
                grads = -np.eye(4, dtype=np.float32)[random.integers(0, 4, PER_PUSH)]  # one of its own to every row
                acks.append(table.push(ids, grads, timeout_s=PATIENCE_S))
                self.counts[ids] -= grads
                self.n_pushes += 1
            for ack in acks:
                ack.wait_applied(PATIENCE_S)


def wait_for(ready: Callable[[], bool]) -> None:
    deadline = Deadline.after(PATIENCE_S)
    pause = threading.Event()
    while not ready():
        assert not deadline.expired
        pause.wait(0.02)
