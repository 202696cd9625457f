"""After distribute a model learns what it learned before: losses and rows over 200 steps, on real clusters in sync mode.

The original is trained by torch alone. Where torch's dense gradients would also move rows without a gradient (Adam, momentum), it has
sparse gradients and SparseAdam, or every row is in every batch.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from ddp_job import train
from matrix import one_of
from torch import nn, optim

import kvemb
from tests.warm_clusters import warm_url
from trainer.torch import distribute

pytestmark = pytest.mark.timeout(300)

N_STEPS, N_USERS, N_ITEMS, DIM = 200, 40, 60, 4
SERVER = {"redis": "redis-server", "memcached": "memcached"}


class Model(nn.Module):
    """A user's row times the mean of a bag of items, the first item's row once more, and a dense layer."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Embedding(N_USERS, DIM, sparse=sparse, padding_idx=0)
        self.items = nn.EmbeddingBag(N_ITEMS, DIM, sparse=sparse)
        self.first_item = nn.Embedding(N_ITEMS, DIM, sparse=sparse)
        self.first_item.weight = self.items.weight
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([self.user(users) * self.items(items), self.first_item(items[:, 0])], dim=1)
        return self.top(rows).squeeze(1)


def batches(*, all_ids: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(5)
    liked, taste = rng.normal(size=N_ITEMS), rng.normal(size=(N_USERS, N_ITEMS))
    for _ in range(N_STEPS):
        users, items = rng.integers(0, N_USERS, 64), rng.integers(0, N_ITEMS, (64, 3))
        if all_ids:
            users[:N_USERS], items[:N_ITEMS, 0] = rng.permutation(N_USERS), rng.permutation(N_ITEMS)
        labels = (liked[items[:, 0]] + 0.5 * taste[users[:, None], items].mean(axis=1) > 0).astype(np.float32)
        yield torch.from_numpy(users), torch.from_numpy(items), torch.from_numpy(labels)


Make = Callable[[Any], optim.Optimizer]
# name: (optimizer, whether embeddings have sparse gradients and SparseAdam of their own, whether all rows are in every batch)
JOBS: dict[str, tuple[Make, bool, bool]] = {
    "sgd": (partial(optim.SGD, lr=0.7), False, False),
    "sgd-momentum": (partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True), False, True),
    "adagrad": (partial(optim.Adagrad, lr=0.05), False, False),
    "adagrad-decay": (partial(optim.Adagrad, lr=0.05, weight_decay=1e-3), False, True),
    "sparse-adam": (partial(optim.SparseAdam, lr=0.01), True, False),
    "adam": (partial(optim.Adam, lr=0.01), False, True),
    "adamw": (partial(optim.AdamW, lr=0.01), False, True),
}
TURNS: dict[str, Make] = {
    "adam": partial(optim.Adam, lr=0.01),
    "adamw": partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "amsgrad": partial(optim.AdamW, lr=0.01, amsgrad=True),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "rmsprop": partial(optim.RMSprop, lr=0.01, momentum=0.5),
}
# Of the others tests/parity says it for every rule.
CASES = [pytest.param("memcached", job, marks=[] if job in ("sgd", "adam") else pytest.mark.full) for job in JOBS]
CASES += [pytest.param("redis", job, marks=pytest.mark.full) for job in JOBS]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, require_server: Callable[[str], str]) -> Iterator[kvemb.Cluster]:
    require_server(SERVER[request.param])
    with (
        warm_url(store=request.param, nodes=2, shards=2, mode="sync", trainers=1) as url,
        kvemb.connect(url, trainer="trainer-0") as connected,
    ):
        yield connected


@pytest.mark.parametrize(("cluster", "job"), CASES, indirect=["cluster"])
def test_losses_and_rows_are_those_of_the_original_model(cluster: kvemb.Cluster, job: str) -> None:
    make, sparse, all_ids = JOBS[job]
    theirs = Model(sparse=sparse)
    ours = copy.deepcopy(theirs)

    def optimizers(model: Model) -> list[optim.Optimizer]:
        """One for all, or, where it takes sparse gradients only, one for the dense layer beside it."""
        if not sparse:
            return [make(model.parameters())]
        return [make([model.user.weight, model.items.weight]), optim.SGD(model.top.parameters(), lr=0.1)]

    their_optimizers, our_optimizers = optimizers(theirs), optimizers(ours)
    names = {"user": f"{job}.user", "items": f"{job}.items"}
    done = distribute(ours, cluster, min_rows=10, optimizer=our_optimizers[0], carry_weights=True, names=names, quiet=True)
    expected = train(theirs, batches(all_ids=all_ids), their_optimizers)
    losses = train(ours, batches(all_ids=all_ids), our_optimizers)
    assert np.mean(expected[-20:]) < 0.97 * np.mean(expected[:20]), "it learns, so that equal losses mean something"
    exact = job == "sgd" and torch.backends.cpu.get_cpu_capability() != "DEFAULT"  # elsewhere torch rounds twice
    np.testing.assert_allclose(losses, expected, rtol=0 if exact else 1e-5)
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-5}
    for table, weight in zip(done.tables, (theirs.user.weight, theirs.items.weight), strict=True):
        np.testing.assert_allclose(table.pull(np.arange(len(weight))), weight.detach().numpy(), **tolerance)


class Towers(nn.Module):
    """Two embeddings, one of which a batch uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.towers = nn.ModuleList(nn.Embedding(N_USERS, DIM) for _ in range(2))
        self.top = nn.Linear(DIM, 1)

    def train_turns(self, optimizer: optim.Optimizer) -> "Towers":
        """Tower 0 alone, then both in turn, then tower 0 frozen (whatever is looked up in it), and both again."""
        rng = np.random.default_rng(3)
        one, other, both, half_frozen = (False, [0]), (False, [1]), (False, [0, 1]), (True, [0, 1])
        for frozen, used in [one] * 40 + [other, both] * 5 + [half_frozen] * 9 + [both] * 5:
            self.towers[0].requires_grad_(not frozen)
            ids, wanted = torch.from_numpy(rng.permutation(N_USERS)), torch.from_numpy(rng.normal(size=N_USERS)).float()
            optimizer.zero_grad()
            rows = torch.stack([self.towers[at](ids) for at in used]).sum(0)
            (self.top(rows).squeeze(1) - wanted).square().mean().backward()
            optimizer.step()
        return self


@pytest.mark.parametrize("cluster", one_of("memcached", "redis"), indirect=True, scope="module")
@pytest.mark.parametrize("job", TURNS)
def test_a_table_without_a_gradient_counts_no_step(cluster: kvemb.Cluster, job: str) -> None:
    theirs, ours = Towers(), Towers()
    make, optimizer = TURNS[job], TURNS[job](ours.parameters())
    names = {f"towers.{at}": f"turns.{job}.{at}" for at in range(2)}
    done = distribute(ours, cluster, min_rows=10, optimizer=optimizer, names=names, quiet=True)
    ours.train_turns(optimizer)
    theirs.train_turns(make(theirs.parameters()))
    assert [table.steps() for table in done.tables] == [50, 24]
    for table, tower in zip(done.tables, theirs.towers, strict=True):
        np.testing.assert_allclose(table.pull(np.arange(N_USERS)), tower.weight.detach().numpy(), rtol=1e-4, atol=1e-5)
