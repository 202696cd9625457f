"""A torch optimizer after distribute: its step pushes, and everything that is usually done with an optimizer still works."""

import copy
import math
import pickle
from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from typing import Any

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from making_cluster import MakingCluster
from torch import nn

from kvemb.errors import InvalidInputError, ShardUnavailableError
from trainer.torch import Embedding, SparseOptimizer, distribute


class Model(nn.Module):
    """Two tables in groups of their own, a local embedding and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Embedding(20, 3)
        self.item = nn.EmbeddingBag(30, 3, mode="sum")
        self.kind = nn.Embedding(4, 3)
        self.top = nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.user(ids[:, 0]) * self.item(ids) + self.kind(ids[:, 0] % 4)
        return self.top(rows).sum()

    def groups(self) -> list[dict[str, Any]]:
        dense = [self.kind.weight, self.item.weight, *self.top.parameters()]
        return [{"params": [self.user.weight], "lr": 0.25}, {"params": dense}]


IDS = torch.tensor([[1, 2], [3, 2]])


def distributed(
    make: Callable[[Any], torch.optim.Optimizer] = lambda groups: torch.optim.SGD(groups, lr=0.5), mode: str = "async"
) -> tuple[Model, torch.optim.Optimizer, MakingCluster, SparseOptimizer]:
    model, cluster = Model(), MakingCluster(mode)
    optimizer = make(model.groups())
    done = distribute(model, cluster, min_rows=10, optimizer=optimizer, carry_weights=True, quiet=True)
    assert done.optimizer is not None
    return model, optimizer, cluster, done.optimizer


def n_params(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def test_the_weights_leave_the_optimizer_and_the_rest_keeps_its_group_place_and_state() -> None:
    model, cluster = Model(), MakingCluster()
    optimizer = torch.optim.Adam(model.groups(), lr=0.5)
    model(IDS).backward()
    optimizer.step()
    kept = optimizer.state[model.top.weight]
    done = distribute(model, cluster, min_rows=10, optimizer=optimizer, quiet=True)
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [
        [],
        [id(p) for p in (model.kind.weight, *model.top.parameters())],
    ]
    assert len(optimizer.state) == 3
    assert optimizer.state[model.top.weight] is kept
    assert "the optimizer's state of these weights (moments, sums) is not carried, and begins again (user, item)" in str(done)


def test_a_step_changes_dense_weights_and_rows_and_uses_the_gradients_up() -> None:
    model, optimizer, cluster, sparse = distributed()
    before = model.top.weight.detach().clone()
    model(IDS).backward()
    assert n_params(optimizer) == [1, 4], "gradients wait where GradScaler looks for them"
    optimizer.step()
    assert n_params(optimizer) == [0, 3]
    assert not torch.equal(model.top.weight, before)
    (push,) = cluster.pushes
    assert {name: ids.tolist() for name, (ids, _) in push.items()} == {"user": [1, 3], "item": [1, 2, 3]}
    assert set(optimizer.state) <= set(model.parameters()), "the optimizer never saw the rows"
    assert sparse.last_ack is not None


def test_each_table_follows_its_own_group_live() -> None:
    model, optimizer, cluster, _ = distributed()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    optimizer.param_groups[1]["momentum"] = 0.0
    for _ in range(2):
        model(IDS).backward()
        optimizer.step()
        scheduler.step()
    optimizer.param_groups[0]["weight_decay"] = 0.125
    model(IDS).backward()
    optimizer.step()
    followed = [(hyper["user"]["lr"], hyper["item"]["lr"], hyper["user"]["weight_decay"]) for hyper in cluster.hyper]
    assert followed == [(0.25, 0.5, 0.0), (0.125, 0.25, 0.0), (0.0625, 0.125, 0.125)]


def test_a_scheduler_made_before_goes_on() -> None:
    model, cluster = Model(), MakingCluster()
    optimizer = torch.optim.Adam(model.groups(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1.0, 2.0], total_steps=10)
    distribute(model, cluster, min_rows=10, optimizer=optimizer, quiet=True)
    for _ in range(3):
        rate, betas = [group["lr"] for group in optimizer.param_groups], optimizer.param_groups[0]["betas"]
        model(IDS).backward()
        optimizer.step()
        scheduler.step()
        assert [cluster.hyper[-1][name]["lr"] for name in ("user", "item")] == rate
        assert cluster.hyper[-1]["user"]["beta1"] == betas[0]
    assert len({hyper["user"]["lr"] for hyper in cluster.hyper}) == 3


@pytest.mark.parametrize("as_keyword", [True, False])
def test_a_closure_is_evaluated_once_and_its_gradients_are_pushed(as_keyword: bool) -> None:
    model, optimizer, cluster, _ = distributed()
    evaluated = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(IDS)
        loss.backward()
        evaluated.append(loss)
        return loss

    loss = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
    assert loss is evaluated[0]
    assert len(evaluated) == len(cluster.pushes) == 1
    assert n_params(optimizer) == [0, 3]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_waits_or_makes_it_zero(set_to_none: bool) -> None:
    model, optimizer, cluster, _ = distributed()
    model(IDS).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    model(IDS[:1]).backward()
    optimizer.step()
    ids, grads = cluster.pushes[0]["user"]
    assert ids.tolist() == ([1] if set_to_none else [1, 3])
    once = distributed()
    once[0](IDS[:1]).backward()
    once[1].step()
    expected = once[2].pushes[0]["user"][1]
    assert grads[0].tolist() == pytest.approx(expected[0].tolist())
    assert set_to_none or not grads[1].any()


def test_dropped_gradients_do_not_pile_up() -> None:
    model, optimizer, _, _ = distributed()
    for _ in range(5):
        model(IDS).backward()
        optimizer.zero_grad()
    assert len(model.user.pending.lookups) == 1
    assert n_params(optimizer) == [1, 4]


def test_when_the_push_fails_nothing_has_changed_and_the_step_can_be_taken_again() -> None:
    model, optimizer, cluster, _ = distributed(lambda groups: torch.optim.Adam(groups, lr=0.5))
    before = model.top.weight.detach().clone()
    model(IDS).backward()
    cluster.failure = ShardUnavailableError("shard 0 is away")
    with pytest.raises(ShardUnavailableError):
        optimizer.step()
    assert torch.equal(model.top.weight, before)
    assert len(optimizer.state) == 0
    cluster.failure = None
    optimizer.step()
    assert cluster.pushes[0]["user"][0].tolist() == [1, 3]
    assert not torch.equal(model.top.weight, before)


def test_gradients_accumulate_over_micro_batches() -> None:
    whole, parts = distributed(), distributed()
    whole[0](IDS).backward()
    for line in IDS:
        parts[0](line[None]).backward()
    for _, optimizer, _, _ in (whole, parts):
        optimizer.step()
    for name in ("user", "item"):
        (ids, grads), (expected_ids, expected) = parts[2].pushes[0][name], whole[2].pushes[0][name]
        assert ids.tolist() == expected_ids.tolist()
        torch.testing.assert_close(torch.from_numpy(grads), torch.from_numpy(expected))
    torch.testing.assert_close(parts[0].top.weight, whole[0].top.weight)


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_gives_the_step_without_it(mode: str, unscale_first: bool, fused: bool) -> None:
    def make(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(groups, lr=0.5, fused=fused)

    plain, scaled = distributed(make, mode), distributed(make, mode)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        plain[0](IDS).backward()
        plain[1].step()
        plain[1].zero_grad()
        scaler.scale(scaled[0](IDS)).backward()
        if unscale_first:
            scaler.unscale_(scaled[1])
        scaler.step(scaled[1])
        scaler.update()
        scaled[1].zero_grad()
    assert [len(one[2].pushes) for one in (plain, scaled)] == [2, 2]
    torch.testing.assert_close(scaled[0].top.weight, plain[0].top.weight)
    torch.testing.assert_close(torch.from_numpy(scaled[2].pushes[1]["user"][1]), torch.from_numpy(plain[2].pushes[1]["user"][1]))


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_after_an_overflow_nothing_changes_but_a_sync_trainer_takes_part(mode: str, unscale_first: bool, fused: bool) -> None:
    model, optimizer, cluster, _ = distributed(lambda groups: torch.optim.Adam(groups, lr=0.5, fused=fused), mode)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = model.top.weight.detach().clone()
    scaler.scale(model(IDS) * math.inf).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    assert torch.equal(model.top.weight, before)
    assert cluster.pushes == ([{}] if mode == "sync" else [])
    scaler.scale(model(IDS)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert cluster.pushes[-1]["user"][0].tolist() == [1, 3]
    assert not torch.equal(model.top.weight, before)


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_a_step_that_overflowed_does_not_count_for_adam(make: Callable[..., torch.optim.Optimizer], mode: str) -> None:
    torch.manual_seed(0)
    ids, original = torch.arange(20).reshape(4, 5), nn.Sequential(nn.Embedding(20, 3), nn.Linear(3, 1))
    ours, cluster = copy.deepcopy(original), MakingCluster(mode)
    for model in (original, ours):
        optimizer = make(model.parameters(), lr=0.05)
        if model is ours:
            distribute(model, cluster, min_rows=10, optimizer=optimizer, carry_weights=True, names={"0": "user"}, quiet=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(model(ids).square().mean() * (math.inf if step in (0, 1, 3) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    rows = cluster.tables["user"].pull(torch.arange(20).numpy())
    torch.testing.assert_close(torch.from_numpy(rows), original[0].weight.detach(), atol=1e-6, rtol=0)


class Wrapped:
    """As accelerate's AcceleratedOptimizer and others: hands everything on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def test_a_wrapper_around_the_optimizer_pushes_too() -> None:
    model, optimizer, cluster, _ = distributed()
    wrapped = Wrapped(optimizer)
    for _ in range(2):
        wrapped.zero_grad()
        model(IDS).backward()
        wrapped.step()
    assert len(cluster.pushes) == 2


def test_state_dict_has_dense_state_only_and_loads_while_gradients_wait(tmp_path) -> None:
    model, optimizer, _, _ = distributed(lambda groups: torch.optim.Adam(groups, lr=0.5))
    model(IDS).backward()
    optimizer.step()
    model(IDS).backward()
    state = optimizer.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [[], [0, 1, 2]]
    assert n_params(optimizer) == [1, 4], "what waits still waits"
    torch.save(state, tmp_path / "state.pt")

    again, fresh, cluster, _ = distributed(lambda groups: torch.optim.Adam(groups, lr=0.125))
    again(IDS).backward()
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert sum(n_params(fresh)) > 3, "as in torch, gradients wait through a load"
    assert fresh.state[again.top.weight]["step"] == 1
    fresh.step()
    assert cluster.hyper[0]["item"]["lr"] == 0.5
    assert cluster.pushes[0]["user"][0].tolist() == [1, 3]


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy of what holds it": lambda optimizer: copy.deepcopy(torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)),
    "pickle": pickle.dumps,
    "torch.save": lambda optimizer: torch.save(optimizer, BytesIO()),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_that_would_not_push_is_refused_and_the_original_goes_on(copied: Callable[[Any], Any]) -> None:
    model, optimizer, cluster, _ = distributed()
    with pytest.raises(InvalidInputError, match=r"table\(s\) user, item, a copy of it would not.*state_dict\(\)"):
        copied(optimizer)
    model(IDS).backward()
    optimizer.step()
    assert len(cluster.pushes) == 1


def test_names_of_parameters_leave_with_them() -> None:
    model, cluster = Model(), MakingCluster()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.5)
    distribute(model, cluster, min_rows=10, optimizer=optimizer, quiet=True)
    assert optimizer.param_groups[0]["param_names"] == ["kind.weight", "top.weight", "top.bias"]


def test_an_option_that_no_table_can_follow_stops_the_step_before_anything_changes() -> None:
    model, optimizer, cluster, _ = distributed()
    before = model.top.weight.detach().clone()
    optimizer.param_groups[0]["maximize"] = True
    model(IDS).backward()
    with pytest.raises(InvalidInputError, match="table 'user' \\(module 'user'\\): maximize=True of SGD"):
        optimizer.step()
    assert cluster.pushes == []
    assert torch.equal(model.top.weight, before)


def test_a_weight_that_the_optimizer_does_not_have_is_refused() -> None:
    model = Model()
    optimizer = torch.optim.SGD([model.user.weight, *model.top.parameters()], lr=0.5)
    with pytest.raises(InvalidInputError, match="table 'item' \\(module 'item'\\): its weight is no parameter of the optimizer"):
        distribute(model, MakingCluster(), min_rows=10, optimizer=optimizer)


@pytest.mark.parametrize(
    ("mode", "reduce", "ranks", "told"),
    [("sync", "sum", 2, True), ("sync", "mean", 2, False), ("sync", "sum", 1, False), ("async", "sum", 2, False)],
)
def test_several_ranks_are_told_of_sums(mode: str, reduce: str, ranks: int, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    model = Model()
    optimizer = torch.optim.SGD(model.groups(), lr=0.5)
    done = distribute(model, MakingCluster(mode), min_rows=10, optimizer=optimizer, reduce=reduce, quiet=True)
    assert ('give reduce="mean" (user, item)' in str(done)) is told


@pytest.mark.parametrize("fails_in", ["table", "module", "step"])
def test_a_failure_in_the_middle_leaves_model_and_optimizer_as_they_were(fails_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cluster = Model(), MakingCluster(fail_after=1 if fails_in == "table" else 9)
    optimizer = torch.optim.Adam(model.groups(), lr=0.5)
    model(IDS).backward()
    optimizer.step()
    modules, groups, state = dict(model.named_modules()), [list(g["params"]) for g in optimizer.param_groups], dict(optimizer.state)
    if fails_in != "table":
        failing = {"module": "SparseOptimizer", "step": "JoinedStep"}[fails_in]

        def fail(*_: Any, **__: Any) -> None:
            raise ConnectionError("in the middle")

        monkeypatch.setattr(import_module("trainer.torch.conversion.distribute"), failing, fail)
    with pytest.raises(ConnectionError):
        distribute(model, cluster, min_rows=10, optimizer=optimizer)
    assert {path: id(m) for path, m in model.named_modules()} == {path: id(m) for path, m in modules.items()}
    assert [[id(p) for p in g["params"]] for g in optimizer.param_groups] == [[id(p) for p in params] for params in groups]
    assert {id(p): s for p, s in optimizer.state.items()} == {id(p): s for p, s in state.items()}
    assert not isinstance(model.user, Embedding)
    optimizer.step()
