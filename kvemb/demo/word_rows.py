"""The demo's rows: in a cluster, or, to compare, in NumPy arrays of one process. Both begin and learn alike.

Two tables: "word_in" holds a word as a centre, "word_out" as a context.
"""

from collections import deque
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb import init, optim
from kvemb.api import Cluster
from kvemb.client.ack import Ack

WORD_IN = "word_in"
WORD_OUT = "word_out"
DIM = 32
INITIALIZER = init.uniform(low=-0.5 / DIM, high=0.5 / DIM)  # word2vec's own start for its input vectors
OPTIMIZER = optim.rowwise_adagrad(lr=0.2)  # as good as full Adagrad here, with one float of state per row instead of 32

# Pushes handed over and not yet applied. Without a bound a trainer would run ahead of the parameter servers and learn from old rows. With 8
# late pushes the held-out loss was 10 % worse, with 2 it was 2 %.
MAX_UNAPPLIED = 2
APPLY_TIMEOUT_S = 60.0


class Rows(Protocol):
    """The source of the demo's rows, and the destination of its gradients."""

    def pull(self, batch: Mapping[str, NDArray[np.int64]]) -> Mapping[str, NDArray[np.float32]]:
        """Fetch rows: per table, unique ids int64 [n] to rows float32 [n, d] in the same order."""
        ...

    def push(self, grads: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float32]]]) -> None:
        """Hand over gradients: per table, unique ids int64 [n] and gradients float32 [n, d]."""
        ...


class ClusterRows:
    """Rows of a cluster. The tables are created, or opened as they are."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._unapplied: deque[Ack] = deque()
        for name in (WORD_IN, WORD_OUT):
            cluster.create_table(name, dim=DIM, optimizer=OPTIMIZER, initializer=INITIALIZER, seed=seed, exist_ok=True)

    def pull(self, batch: Mapping[str, NDArray[np.int64]]) -> Mapping[str, NDArray[np.float32]]:
        """See `Rows`: all tables in one round trip per node."""
        return self._cluster.pull(batch)

    def push(self, grads: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float32]]]) -> None:
        """See `Rows`: returns while the newest pushes are still on their way."""
        self._unapplied.append(self._cluster.push(grads))
        self._wait_applied(MAX_UNAPPLIED)

    def flush(self) -> None:
        """Wait until all pushes are applied and visible."""
        self._wait_applied(0)

    def _wait_applied(self, n_left: int) -> None:
        while len(self._unapplied) > n_left:
            self._unapplied.popleft().wait_applied(APPLY_TIMEOUT_S)


class LocalRows:
    """Rows of this process, updated by row-wise Adagrad; for one thread. All ids are known: int64 [v], ascending and unique."""

    def __init__(self, ids: NDArray[np.int64], *, seed: int) -> None:
        self._ids = ids
        unsigned = np.ascontiguousarray(ids).view(np.uint64)
        self._weights = {name: INITIALIZER.rows(unsigned, DIM, table=name, seed=seed) for name in (WORD_IN, WORD_OUT)}
        self._mean_square_sums = {name: np.zeros((ids.size, 1), np.float32) for name in self._weights}
        hyper = OPTIMIZER.defaults()
        self._lr, self._eps = np.float32(hyper["lr"]), np.float32(hyper["eps"])

    def pull(self, batch: Mapping[str, NDArray[np.int64]]) -> Mapping[str, NDArray[np.float32]]:
        """See `Rows`: copies."""
        return {name: self._weights[name][np.searchsorted(self._ids, ids)] for name, ids in batch.items()}

    def push(self, grads: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float32]]]) -> None:
        """Apply at once: G += mean(g ** 2) over the row's columns; w -= lr g / (sqrt(G) + eps) (Naumov et al. 2019, DLRM)."""
        for name, (ids, gradients) in grads.items():
            at = np.searchsorted(self._ids, ids)
            sums = self._mean_square_sums[name][at] + np.square(gradients).mean(axis=1, keepdims=True)
            self._mean_square_sums[name][at] = sums
            self._weights[name][at] -= self._lr * gradients / (np.sqrt(sums) + self._eps)
