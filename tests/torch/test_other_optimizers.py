"""An optimizer that steps where the one that pushes does not: told at its second step. Loops that only look like it are left alone."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from making_cluster import MakingCluster
from torch import nn

from kvemb.errors import InvalidInputError
from trainer.torch import SparseOptimizer, distribute

IDS = torch.tensor([1, 2, 3])
Optimizer = torch.optim.Optimizer


class Model(nn.Module):
    def __init__(self, dense: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item = nn.Embedding(20, 3), nn.Embedding(30, 3)
        self.top = nn.Linear(3, 1) if dense else nn.Flatten()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.user(ids) * self.item(ids)).sum()


def distributed(dense: bool = True) -> tuple[Model, Optimizer, MakingCluster]:
    model, cluster = Model(dense), MakingCluster()
    optimizer = sgd(model.parameters())
    distribute(model, cluster, min_rows=10, optimizer=optimizer, quiet=True)
    return model, optimizer, cluster


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.fixture(autouse=True)
def _nobody_is_told(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Any:
    """A test that expects a log line takes it out."""
    caplog.set_level(logging.WARNING, "kvemb")
    yield
    assert not caplog.get_records("call")


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("dropped_by", ["model", "new", "nobody"])
def test_an_optimizer_made_after_distribute_is_told_at_its_second_step(dense: bool, dropped_by: str) -> None:
    model, _, cluster = distributed(dense)
    new = sgd(model.parameters())
    drop = {"model": model.zero_grad, "new": new.zero_grad, "nobody": lambda: None}[dropped_by]

    def step() -> None:
        drop()
        model(IDS).backward()
        new.step()

    step()
    before = [param.detach().clone() for param in model.top.parameters()]
    with pytest.raises(InvalidInputError, match=r"SGD steps .* 'user', 'item' .*Make the optimizer first, and keep it"):
        step()
    assert all(torch.equal(*both) for both in zip(before, model.top.parameters(), strict=True)), "this step changed nothing"
    assert cluster.pushes == []


def test_an_optimizer_made_anew_after_some_steps_of_the_first_is_told() -> None:
    model, first, cluster = distributed()
    for optimizer in (first, first, sgd(model.parameters())):
        model.zero_grad()
        model(IDS).backward()
        optimizer.step()
    model.zero_grad()
    model(IDS).backward()
    with pytest.raises(InvalidInputError, match="Make the optimizer first"):
        optimizer.step()
    assert len(cluster.pushes) == 2


def test_a_step_with_a_closure_is_told_at_its_third_for_it_brings_its_own_backward() -> None:
    model, _, _ = distributed()
    new = sgd(model.parameters())

    def closure() -> torch.Tensor:
        new.zero_grad()
        loss = model(IDS)
        loss.backward()
        return loss

    new.step(closure)
    new.step(closure)
    with pytest.raises(InvalidInputError, match="Make the optimizer first"):
        new.step(closure)


def test_a_sparse_optimizer_beside_the_new_one_is_a_way() -> None:
    model, _, cluster = distributed()
    model(IDS).backward()
    optimizers = [sgd(model.parameters()), SparseOptimizer(model)]
    for _ in range(4):
        model.zero_grad()
        model(IDS).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert len(cluster.pushes) == 4


class Around(Optimizer):
    """A wrapper that has its optimizer's groups, as Lookahead implementations do, and steps it."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def plain(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(IDS).backward()
    optimizer.step()


def accumulating(model: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(40):
        model(IDS).backward()
    optimizer.step()
    model.zero_grad()


def with_a_closure(model: nn.Module, optimizer: Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(IDS)
        loss.backward()
        return loss

    optimizer.step(closure)


def evaluating(model: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(40):
        model(IDS)
        model.zero_grad()
    plain(model, optimizer)


def scaled_beyond_range(model: nn.Module, optimizer: Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    for _ in range(8):  # several steps are left out first
        optimizer.zero_grad()
        scaler.scale(model(IDS) * 20).backward()
        scaler.step(optimizer)
        scaler.update()


def wrapped(model: nn.Module, optimizer: Optimizer) -> None:
    around = Around(optimizer)
    for _ in range(3):
        plain(model, around)


def beside_another_of_the_same_weights(model: nn.Module, optimizer: Optimizer) -> None:
    other = sgd(model.top.parameters())
    for _ in range(3):
        model.zero_grad()
        model(IDS).backward()
        other.step()
        other.step()
        optimizer.step()


def while_rows_are_frozen(model: nn.Module, optimizer: Optimizer) -> None:
    other = sgd(model.top.parameters())
    for module in (model.user, model.item):
        module.requires_grad_(False)
    for _ in range(3):
        plain(model, other)
    for module in (model.user, model.item):
        module.requires_grad_(True)
    plain(model, optimizer)


def with_an_lbfgs_beside(model: nn.Module, optimizer: Optimizer) -> None:
    extra = nn.Linear(1, 1)
    other = torch.optim.LBFGS(extra.parameters(), max_iter=20)

    def closure() -> torch.Tensor:
        model.zero_grad()
        other.zero_grad()
        loss = (extra(model(IDS).view(1, 1)) - 1).square().sum()
        loss.backward()
        return loss

    other.step(closure)
    optimizer.step()


def with_a_twin(model: nn.Module, optimizer: Optimizer) -> None:
    """Another model, whose head is this one's, with tables and an optimizer of its own."""
    twin = Model()
    twin.top = model.top
    second = sgd(twin.parameters())
    distribute(twin, MakingCluster(), min_rows=10, optimizer=second, quiet=True)
    for _ in range(3):
        for one, steps in ((model, optimizer), (twin, second)):
            plain(one, steps)
        (model(IDS) + twin(IDS)).backward()
        second.step()
        optimizer.step()


Loop = Callable[[nn.Module, Optimizer], None]
LOOPS = (
    *(plain, accumulating, with_a_closure, evaluating, scaled_beyond_range, wrapped, beside_another_of_the_same_weights),
    *(while_rows_are_frozen, with_an_lbfgs_beside, with_a_twin),
)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops_in_which_the_rows_are_pushed_go_on(loop: Loop) -> None:
    model, optimizer, cluster = distributed()
    for _ in range(3):
        loop(model, optimizer)
    assert len(cluster.pushes) >= 3


@pytest.mark.parametrize("dense_first", [True, False])
def test_an_optimizer_for_embeddings_and_one_for_the_rest_step_in_any_order(dense_first: bool) -> None:
    model, cluster = Model(), MakingCluster()
    optimizers = [sgd(model.top.parameters()), sgd([model.user.weight, model.item.weight])]
    distribute(model, cluster, min_rows=10, optimizer=optimizers[1], quiet=True)
    for _ in range(4):
        model.zero_grad()
        model(IDS).backward()
        for optimizer in optimizers if dense_first else reversed(optimizers):
            optimizer.step()
    assert len(cluster.pushes) == 4


def test_gradients_that_autograd_grad_takes_away_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, cluster = distributed()
    for _ in range(60):
        params = list(model.parameters())
        for param, grad in zip(params, torch.autograd.grad(model(IDS), params), strict=True):
            param.grad = grad
        optimizer.step()
    told = sorted(caplog.messages)
    caplog.clear()
    assert len(told) == 2
    assert "table 'item': rows were looked up for training and got no gradient before any of the last 30 steps" in told[0]
    assert cluster.pushes == []


@pytest.mark.parametrize("frozen", [True, False])
def test_steps_over_rows_in_eval_mode_are_told_of_once_unless_these_are_frozen(frozen: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, cluster = distributed()
    model.eval()
    if frozen:
        model.item.requires_grad_(False)
    for _ in range(60):
        optimizer.zero_grad()
        model(IDS).backward()
        optimizer.step()
    told = [
        line for line in caplog.messages if line.startswith("table 'item': rows were looked up in eval mode before each of the last 30")
    ]
    caplog.clear()
    assert len(told) == (0 if frozen else 1)
    assert cluster.pushes == []


@pytest.mark.parametrize("joined", [True, False])
def test_gradients_that_are_dropped_again_and_again_are_told_of_once(joined: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, _, cluster = distributed()
    optimizer = None if joined else SparseOptimizer(model)
    for _ in range(60):
        (model if joined else optimizer).zero_grad()
        model(IDS).backward()
        with torch.no_grad():  # by hand: rows are no parameters
            for param in model.top.parameters():
                param -= 0.1 * param.grad
    told = sorted(caplog.messages)
    caplog.clear()
    assert len(told) == 2
    assert told[0].startswith("table 'item': gradients of rows were dropped 30 times in a row, and none was pushed")
    assert "Make the optimizer first" in told[0]
    assert cluster.pushes == []
