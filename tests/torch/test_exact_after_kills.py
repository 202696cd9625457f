"""Exact lookups ahead over real shards that are killed on the way: not a bit of the training differs."""

import threading
from collections.abc import Callable, Iterable

import pytest
from matrix import one_of

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import numpy as np
import torch
from torch import nn

import kvemb
from kvemb.api import Cluster
from kvemb.local_cluster import LocalCluster
from trainer.torch import Embedding, SparseOptimizer, prepare

pytestmark = pytest.mark.full  # jobs of several processes; tests/bridges and test_prefetch_consistency.py say how they train

N_STEPS, BATCH, IDS = 24, 64, np.arange(50)


class Model(nn.Module):
    """Two tables, fed by two columns of the batch; the same first rows whatever their names."""

    def __init__(self, cluster: Cluster, suffix: str) -> None:
        super().__init__()
        tables = [cluster.create_table(name + suffix, dim=4, optimizer=kvemb.optim.adam(lr=0.05)) for name in ("user", "item")]
        for table in tables:
            table.assign(IDS, np.random.default_rng(1).normal(size=(len(IDS), 4)))
        self.user, self.item = (Embedding(table) for table in tables)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.user(batch[:, 0]) * self.item(batch[:, 1])).sum(dim=1)


def draw_batches() -> list[torch.Tensor]:
    """Few ids, so that every step changes rows of the next."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, len(IDS), (BATCH, 2), generator=generator) for _ in range(N_STEPS)]


def train(model: Model, batches: Iterable[torch.Tensor], at_step: Callable[[int], None] = lambda step: None) -> list[float]:
    optimizer, losses = SparseOptimizer(model), []
    for step, batch in enumerate(batches):
        at_step(step)
        loss = (model(batch) - (batch.sum(dim=1) % 2).float()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", one_of("memcached", "redis"))
def test_exact_training_is_the_same_while_shards_are_killed(kind: str, require_server: Callable[[str], str]) -> None:
    require_server({"redis": "redis-server"}.get(kind, kind))
    with LocalCluster(kind, 2, shards=2, mode="sync", trainers=1, barrier_timeout_s=60) as local:
        restarts: list[threading.Thread] = []

        def kill_now_and_then(step: int) -> None:
            if step in (5, 12, 18):
                if restarts:
                    restarts[-1].join()
                victim = step % 2
                local.shards[victim].kill()
                restarts.append(threading.Thread(target=local.start_shard, args=(victim,)))
                restarts[-1].start()

        with kvemb.connect(local.url, trainer="a") as cluster:
            plain = train(Model(cluster, ".plain"), draw_batches())
            model = Model(cluster, ".ahead")
            loader = prepare(model, draw_batches(), consistency="exact", threads_num=2, capacity=3)
            ahead = train(model, loader, kill_now_and_then)
            for thread in restarts:
                thread.join()
            assert [loss.hex() for loss in ahead] == [loss.hex() for loss in plain]
            assert len(set(plain)) == N_STEPS
            assert model.user.shared.n_ahead >= 2 * N_STEPS - 4
            for name in ("user", "item"):
                rows = [cluster.table(name + suffix).pull(IDS) for suffix in (".plain", ".ahead")]
                assert rows[0].tobytes() == rows[1].tobytes()
