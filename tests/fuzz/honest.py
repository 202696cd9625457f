"""A trainer that must not be disturbed: it pushes, waits, pulls, and compares while another part is attacked."""

import threading
from typing import Any

import numpy as np

import kvemb

_PAUSE_S = 0.1
_IDS = np.arange(50)
_END_S = 60.0


class Honest:
    """A trainer on a thread of its own; a context manager.

    Args:
        source: for `kvemb.connect`.
        begun: the pushes of the one that it is the restart of.
    """

    def __init__(self, source: Any, begun: int = 0) -> None:
        self._source, self._ended = source, threading.Event()
        self._trouble: BaseException | None = None
        self.n_pushes = begun
        self._thread = threading.Thread(target=self._train, name="honest-trainer", daemon=True)

    def __enter__(self) -> "Honest":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let it end its present round, and no more; idempotent."""
        self._ended.set()
        self._thread.join(_END_S)

    def check(self) -> None:
        """Raise what happened to it."""
        if self._trouble is not None:
            raise AssertionError(f"the honest trainer was harmed after {self.n_pushes} pushes: {self._trouble!r}") from self._trouble
        assert self._ended.is_set() or self._thread.is_alive(), "the honest trainer's thread has ended"

    def _train(self) -> None:
        try:
            with kvemb.connect(self._source, trainer="honest") as cluster:
                options: Any = {"optimizer": kvemb.optim.sgd(1.0), "initializer": kvemb.init.zeros()}
                table = cluster.create_table("honest", dim=4, exist_ok=True, **options)
                while not self._ended.wait(_PAUSE_S):
                    table.push(_IDS, np.ones((len(_IDS), 4), np.float32)).wait_applied(timeout_s=120)
                    self.n_pushes += 1
                    np.testing.assert_array_equal(table.pull(_IDS), np.full((len(_IDS), 4), -self.n_pushes, np.float32))
        except BaseException as error:  # told by `check`
            self._trouble = error
