"""A table under load while nodes come and go: one connection pushes and counts, another pulls and compares with the confirmed values."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.storage_servers import StorageServer, start_servers

PATIENCE_S = 90.0
N_IDS, DIM = 20_000, 4
IDS = np.arange(N_IDS)


@contextmanager
def further_node(local: LocalCluster) -> Iterator[StorageServer]:
    """A server that is none of the cluster's yet."""
    (server,) = start_servers(local.store, 1, local.folder, 64)
    try:
        yield server
    finally:
        server.process.kill()


class MovingLoad:
    """Pushes ones to random rows of a table with SGD at rate 1, and counts; another connection pulls all the while; a context manager.

    Args:
        local: the cluster.
        pages: whether the table has num_ids.
    """

    def __init__(self, local: LocalCluster, *, pages: bool = False) -> None:
        self.cluster, self.reader = kvemb.connect(local.url), kvemb.connect(local.url, read_only=True)
        self.table = self.cluster.create_table(
            "t", dim=DIM, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros(), num_ids=N_IDS if pages else None
        )
        self.counts = np.zeros(N_IDS)
        self.confirmed = self.counts.copy()
        self.errors: list[BaseException] = []
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._guarded, args=(run,)) for run in (self._push, self._pull)]
        self.n_steps = 0
        self.table.push(IDS, np.ones((N_IDS, DIM), np.float32)).wait_applied(PATIENCE_S)
        self.counts += 1
        self.confirmed = self.counts.copy()
        for thread in self._threads:
            thread.start()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self.errors.append(error)

    def _push(self) -> None:
        rng = np.random.default_rng(0)
        while not self._end.is_set():
            ids = rng.choice(N_IDS, 500, replace=False)
            self.table.push(ids, np.ones((500, DIM), np.float32)).wait_applied(PATIENCE_S)
            self.counts[ids] += 1
            self.confirmed = self.counts.copy()
            self.n_steps += 1

    def _pull(self) -> None:
        rng, table = np.random.default_rng(1), self.reader.table("t")
        while not self._end.is_set():
            ids, least = rng.choice(N_IDS, 500, replace=False), self.confirmed
            rows = table.pull(ids, timeout_s=PATIENCE_S)
            assert (-rows[:, 0] >= least[ids]).all(), "a row is older than what was confirmed before it was asked for"

    def stop(self) -> None:
        """End both: every push is applied."""
        self._end.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def __enter__(self) -> "MovingLoad":
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End both, and compare every row."""
        self.stop()
        try:
            if self.errors:
                raise self.errors[0]
            for cluster in (self.cluster, self.reader):
                rows = cluster.table("t").pull(IDS, timeout_s=PATIENCE_S)
                np.testing.assert_array_equal(rows, -np.repeat(self.counts[:, None], DIM, axis=1).astype(np.float32))
        finally:
            self.reader.close()
            self.cluster.close()
