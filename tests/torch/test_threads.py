"""Models in several threads: each with its own, as in a study of trials, and one for all, whose gradients add up. Rows are compared."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import numpy as np
import torch
from making_cluster import MakingCluster
from torch import nn

from trainer.torch import distribute

pytestmark = pytest.mark.full  # jobs of several processes; tests/bridges and test_prefetch_consistency.py say how they train

N_ROWS, N_STEPS, N_RUNS = 50, 300, 3


@pytest.fixture(autouse=True)
def _threads_change_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.top = nn.Embedding(N_ROWS, 3), nn.Embedding(N_ROWS, 3), nn.Linear(3, 1)
        drawn = torch.Generator().manual_seed(0)  # the default one belongs to all threads
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=drawn))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.user(ids) * self.item(ids)).tanh().sum()


def train(distributed: bool = True) -> np.ndarray:
    """Train for some steps; return the rows of both tables."""
    model, cluster, drawn = Model(), MakingCluster(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if distributed:
        distribute(model, cluster, min_rows=10, optimizer=optimizer, quiet=True)
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        model(torch.randint(N_ROWS, (8,), generator=drawn)).backward()
        optimizer.step()
    return rows_of(model)


def rows_of(model: Model) -> np.ndarray:
    return np.stack([model.user.weight.detach().numpy(), model.item.weight.detach().numpy()])


@pytest.mark.parametrize("other", [lambda: train(distributed=False), train], ids=["plain torch", "another cluster's"])
def test_a_model_trains_while_another_thread_steps_any_optimizer(other: Callable[[], np.ndarray]) -> None:
    expected = train(distributed=False)
    for _ in range(N_RUNS):
        with ThreadPoolExecutor(2) as threads:
            runs = [threads.submit(train), threads.submit(other)]
        for run in runs:
            np.testing.assert_allclose(run.result(), expected, rtol=1e-5)


def test_backward_passes_of_one_model_in_several_threads_add_up() -> None:
    model, plain, cluster = Model(), Model(), MakingCluster()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, plain)]
    distribute(model, cluster, min_rows=10, optimizer=optimizers[0], quiet=True)
    batches = torch.randint(N_ROWS, (40, 8, 6), generator=torch.Generator().manual_seed(1))
    with ThreadPoolExecutor(8) as threads:
        for at_once in batches:
            list(threads.map(lambda ids: model(ids).backward(), at_once))
            for ids in at_once:
                plain(ids).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    np.testing.assert_allclose(rows_of(model), rows_of(plain), rtol=1e-3)
    assert len(cluster.pushes) == len(batches)
