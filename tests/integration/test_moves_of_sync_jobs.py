"""Nodes come and go while the trainers of a sync job push: every step is made once, by everybody, on every shard."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.local_cluster import LocalCluster
from tests.integration.test_moves import PATIENCE_S, further_node

pytestmark = pytest.mark.full  # faults at further points of a way; tests/models searches the steps

N_IDS, DIM, AT_ONCE = 2_000, 2, 2
IDS = np.arange(N_IDS)


class SyncTrainer:
    """One trainer of three: pushes ones to all rows with SGD at rate 1, two steps at once, until it has made as many as it is told.

    Args:
        url: of the cluster.
        name: of the trainer.
        last: returns the number of the last step, None while it is not known.
    """

    def __init__(self, url: str, name: str, last: Callable[[], int | None]) -> None:
        self.cluster = kvemb.connect(url, trainer=name)
        self.table = self.cluster.table("t")
        self.steps, self.error = 0, None
        self._last = last
        self.thread = threading.Thread(target=self._guarded)

    def _guarded(self) -> None:
        try:
            while (last := self._last()) is None or self.steps < last:
                self.table.pull(IDS[:10])  # and sees a newer map, before the others or after them
                for ack in [self.table.push(IDS, np.ones((N_IDS, DIM), np.float32)) for _ in range(AT_ONCE)]:
                    ack.wait_applied(PATIENCE_S)
                self.steps += AT_ONCE
        except BaseException as error:
            self.error = error


def test_steps_are_made_once_while_nodes_come_and_go(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    last: list[int] = []
    with (
        LocalCluster("redis", 2, shards=2, mode="sync", trainers=3, memory_mb=64) as local,
        further_node(local) as third,
        kvemb.connect(local.url) as maker,
    ):
        maker.create_table("t", dim=DIM, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
        trainers = [SyncTrainer(local.url, name, lambda: last[0] if last else None) for name in ("a", "b", "c")]
        for trainer in trainers:
            trainer.thread.start()
        try:
            nodes, first = maker.nodes, local.servers[0].address
            shares = lambda: nodes.rebalance({first: 3.0}), nodes.rebalance
            for plan in (lambda: nodes.add(third.address), *shares, lambda: nodes.remove(third.address)):
                nodes.begin(plan())
                nodes.wait(timeout_s=PATIENCE_S)
        finally:
            last.append(max(trainer.steps for trainer in trainers) + AT_ONCE)
            for trainer in trainers:
                trainer.thread.join(PATIENCE_S)
            errors = [trainer.error for trainer in trainers if trainer.error is not None]
            for trainer in trainers:
                trainer.cluster.close()
        assert not errors, errors
        assert [trainer.steps for trainer in trainers] == last * 3
        np.testing.assert_array_equal(maker.table("t").pull(IDS), np.full((N_IDS, DIM), -3.0 * last[0], np.float32))
