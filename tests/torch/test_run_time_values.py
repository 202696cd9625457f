"""SparseOptimizer: run-time values of a push; schedulers, GradScaler, saved state."""

import math
from collections.abc import Callable

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from memory_cluster import MemoryCluster
from torch import nn

from kvemb import optim
from kvemb.errors import InvalidInputError
from trainer.torch import Embedding, SparseOptimizer


def test_groups_begin_with_the_tables_values_and_travel_with_every_push() -> None:
    cluster = MemoryCluster()
    model = nn.ModuleList([Embedding(cluster.table("a", 2, optim.adam(0.25))), Embedding(cluster.table("b", 2))])
    cluster.tables["a"].hyper["eps"] = 1e-6  # as Table.set_hyper does
    optimizer = SparseOptimizer(model)
    assert [group["table"] for group in optimizer.param_groups] == ["a", "b"]
    optimizer.param_groups[1]["lr"] = 0.125
    for module in model:
        module(torch.tensor([1])).sum().backward()
    optimizer.step()
    expected = {"a": {**optim.adam(0.25).defaults(), "eps": 1e-6}, "b": {**optim.sgd().defaults(), "lr": 0.125}}
    assert cluster.hyper[0] == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10, cycle_momentum=False),
    ],
    ids=["LambdaLR", "StepLR", "OneCycleLR"],
)
def test_schedulers_set_the_rate_of_every_push_as_for_torchs_own(make: Callable) -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2, optim.sgd(0.5)))
    theirs = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    ours = SparseOptimizer(module)
    schedulers = [make(ours), make(theirs)]
    rates = []
    for _ in range(6):
        module(torch.tensor([1])).sum().backward()
        ours.step()
        theirs.step()
        rates.append(theirs.param_groups[0]["lr"])
        for scheduler in schedulers:
            scheduler.step()
    assert len(set(rates)) > 1
    assert [hyper["t"]["lr"] for hyper in cluster.hyper] == pytest.approx(rates)


@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler_pushes_unscaled_gradients(unscale_first: bool) -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2))
    optimizer, scaler = SparseOptimizer(module), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((module(torch.tensor([3, 4])) * 3).sum()).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
        assert optimizer.param_groups[0]["params"][0].grad.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    scaler.step(optimizer)
    scaler.update()
    assert cluster.pushes[0]["t"][1].tolist() == [[3.0, 3.0], [3.0, 3.0]]


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_after_an_overflow_nothing_is_pushed_but_a_sync_trainer_takes_part(mode: str, unscale_first: bool) -> None:
    cluster = MemoryCluster(mode)
    module = Embedding(cluster.table("t", 2))
    optimizer, scaler = SparseOptimizer(module), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((module(torch.tensor([3])) * math.inf).sum()).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert cluster.pushes == ([{}] if mode == "sync" else [])
    scaler.scale(module(torch.tensor([3])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert cluster.pushes[-1]["t"][1].tolist() == [[1.0, 1.0]]


def test_values_out_of_range_are_refused_before_the_push() -> None:
    cluster = MemoryCluster()
    module = Embedding(cluster.table("t", 2))
    optimizer = SparseOptimizer(module)
    module(torch.tensor([3])).sum().backward()
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(InvalidInputError, match="lr"):
        optimizer.step()
    assert cluster.pushes == []


def test_state_holds_run_time_values_and_no_rows(tmp_path) -> None:
    cluster = MemoryCluster()
    model = Embedding(cluster.table("user", 4, optim.adam()))
    optimizer = SparseOptimizer(model)
    optimizer.param_groups[0]["lr"] = 0.5
    model(torch.tensor([1, 2])).sum().backward()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["state"] == {}
    fresh_model = Embedding(cluster.table("user", 4, optim.adam()))
    fresh = SparseOptimizer(fresh_model)
    fresh_model(torch.tensor([1, 2])).sum().backward()
    fresh.load_state_dict(state)
    assert fresh.param_groups[0]["lr"] == 0.5
    fresh.step()
    assert cluster.hyper[0]["user"]["lr"] == 0.5
    assert cluster.pushes[0]["user"][0].tolist() == [1, 2]


def test_a_schedule_goes_on_after_loading() -> None:
    def make() -> tuple[SparseOptimizer, torch.optim.lr_scheduler.StepLR]:
        optimizer = SparseOptimizer(Embedding(MemoryCluster().table("t", 2, optim.sgd(1.0))))
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    (optimizer, scheduler), (again, scheduler_again) = make(), make()
    optimizer.step()
    scheduler.step()
    again.load_state_dict(optimizer.state_dict())
    scheduler_again.load_state_dict(scheduler.state_dict())
    again.step()
    scheduler_again.step()
    assert again.param_groups[0]["lr"] == 0.25


def test_a_state_of_other_tables_or_another_optimizer_is_refused() -> None:
    cluster = MemoryCluster()
    sgd = SparseOptimizer(Embedding(cluster.table("s", 2, optim.sgd())))
    adam = SparseOptimizer(Embedding(cluster.table("a", 2, optim.adam())))
    with pytest.raises(InvalidInputError, match="'s'"):
        adam.load_state_dict(sgd.state_dict())
    state = sgd.state_dict()
    state["param_groups"][0]["table"] = "a"
    with pytest.raises(InvalidInputError, match="beta1"):
        adam.load_state_dict(state)
