"""The demo's rows in a cluster: the same `Rows` as the local yardstick, over storage and parameter servers."""

from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvemb.client.ack import Ack
from kvemb.cluster import Cluster
from kvemb.demo.skipgram import DIM, INITIALIZER, OPTIMIZER, WORD_IN, WORD_OUT

# Pushes handed over and not yet applied. Without a bound a trainer would run ahead of the parameter servers and learn from old rows:
# with 8 late pushes the held-out loss was 10 % worse, with 2 it was 2 %.
MAX_UNAPPLIED = 2
APPLY_TIMEOUT_S = 60.0


class ClusterRows:
    """Rows pulled from and pushed to a cluster.

    Args:
        cluster: connected; the tables exist (`create_tables`).
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._unapplied: deque[Ack] = deque()

    def pull(self, batch: Mapping[str, NDArray[np.int64]]) -> Mapping[str, NDArray[np.float32]]:
        """See `skipgram.Rows`: all tables in one round trip per node."""
        return self._cluster.pull(batch)

    def push(self, grads: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float32]]]) -> None:
        """See `skipgram.Rows`: returns while the newest pushes are still on their way."""
        self._unapplied.append(self._cluster.push(grads))
        while len(self._unapplied) > MAX_UNAPPLIED:
            self._unapplied.popleft().wait_applied(APPLY_TIMEOUT_S)

    def flush(self) -> None:
        """Wait until all pushes are applied and visible."""
        while self._unapplied:
            self._unapplied.popleft().wait_applied(APPLY_TIMEOUT_S)


def create_tables(cluster: Cluster, seed: int) -> None:
    """Create the two tables, or open them as they are."""
    for name in (WORD_IN, WORD_OUT):
        cluster.create_table(name, dim=DIM, optimizer=OPTIMIZER, initializer=INITIALIZER, seed=seed, exist_ok=True)
