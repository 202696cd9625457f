"""torch.optim's optimizers as rules of a table: the same numbers for rows that have a gradient, or a refusal that names the option."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import torch
from torch import nn, optim

from kvemb.errors import InvalidInputError
from paramserver.optim import build_optimizer
from trainer.torch.optimizer.optimizer_map import MappedGroup

MAPPED: dict[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD with decay": partial(optim.SGD, lr=0.1, weight_decay=0.1),
    "SGD with momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "SGD, Nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": partial(optim.Adagrad, lr=0.1),
    "Adagrad with everything": partial(optim.Adagrad, lr=0.1, eps=1e-3, initial_accumulator_value=0.1, weight_decay=0.1),
    "Adam": partial(optim.Adam, lr=0.1),
    "Adam with a large eps": partial(optim.Adam, lr=0.1, betas=(0.8, 0.95), eps=0.1),
    "Adam with decay": partial(optim.Adam, lr=0.1, weight_decay=0.1),
    "Adam, AMSGrad": partial(optim.Adam, lr=0.1, betas=(0.9, 0.9), amsgrad=True),
    "Adam, decoupled": partial(optim.Adam, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True),
    "Adam, foreach": partial(optim.Adam, lr=0.1, foreach=True),
    "Adam, fused": partial(optim.Adam, lr=0.1, fused=True),
    "Adam, tensor lr": partial(optim.Adam, lr=torch.tensor(0.1)),
    "AdamW": partial(optim.AdamW, lr=0.1, weight_decay=0.1, eps=0.01),
    "AdamW, AMSGrad": partial(optim.AdamW, lr=0.1, amsgrad=True),
    "SparseAdam": partial(optim.SparseAdam, lr=0.1, eps=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.1, alpha=0.9),
    "RMSprop with everything": partial(optim.RMSprop, lr=0.05, momentum=0.5, centered=True, weight_decay=0.1, eps=1e-3),
}


@pytest.mark.parametrize("name", list(MAPPED))
def test_a_row_with_a_gradient_in_every_step_goes_where_torch_takes_it_while_lr_changes(name: str) -> None:
    rng = np.random.default_rng(3)
    weight = nn.Parameter(torch.from_numpy(rng.normal(size=(5, 3)).astype(np.float32)))
    theirs = MAPPED[name]([weight])
    mapped = MappedGroup(theirs, theirs.param_groups[0], "table 't'")
    ours = build_optimizer(mapped.spec)
    rows, state = weight.detach().numpy().copy(), ours.initial_state(5, 3)
    for step in range(1, 31):
        grads = rng.normal(size=(5, 3)).astype(np.float32)
        values = mapped.values(theirs.param_groups[0])
        rows, state = ours.update(rows, state, grads, values, step)
        weight.grad = torch.from_numpy(grads)
        if isinstance(theirs, optim.SparseAdam):
            weight.grad = weight.grad.to_sparse(1)
        theirs.step()
        theirs.param_groups[0]["lr"] *= 0.95
    np.testing.assert_allclose(rows, weight.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "lazy"),
    [(name, False) for name in ("SGD", "Adagrad", "SparseAdam")]
    + [(name, True) for name in ("SGD with momentum", "SGD with decay", "Adagrad with everything", "Adam", "AdamW", "RMSprop")],
)
def test_it_knows_where_torch_would_move_rows_without_a_gradient(name: str, lazy: bool) -> None:
    optimizer = MAPPED[name]([nn.Parameter(torch.zeros(1))])
    assert MappedGroup(optimizer, optimizer.param_groups[0], "table 't'").lazy is lazy


class MyAdam(optim.Adam):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5), "dampening=0.5 of SGD"),
        (partial(optim.SGD, lr=0.1, maximize=True), "maximize=True of SGD"),
        (partial(optim.Adagrad, lr_decay=0.1), "lr_decay=0.1 of Adagrad.*scheduler"),
        (partial(optim.Adam, capturable=True), "capturable=True of Adam"),
        (partial(optim.RMSprop, differentiable=True), "differentiable=True of RMSprop"),
        (partial(optim.Adam, eps=0.0), "table 't': Adam: .*eps"),
        (optim.NAdam, "no update rule for NAdam; use one of torch.optim's SGD, Adagrad, Adam, AdamW, SparseAdam, RMSprop"),
        (optim.LBFGS, "no update rule for LBFGS"),
        (MyAdam, "no update rule for MyAdam"),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name(make: Callable[[list[nn.Parameter]], optim.Optimizer], message: str) -> None:
    optimizer = make([nn.Parameter(torch.zeros(1))])
    with pytest.raises(InvalidInputError, match=message) as raised:
        MappedGroup(optimizer, optimizer.param_groups[0], "table 't'")
    assert str(raised.value).startswith("table 't'")


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (optim.SGD, {"maximize": True}, "maximize"),
        (partial(optim.SGD, momentum=0.9), {"nesterov": True}, "'nesterov': True.*'nesterov': False"),
        (optim.Adam, {"weight_decay": 0.1}, "weight_decay of Adam is 0.1 now"),
        (optim.Adagrad, {"initial_accumulator_value": 1.0}, "initial_accumulator_value"),
    ],
)
def test_what_belongs_to_the_table_may_not_change_later(make: Callable, change: dict, message: str) -> None:
    optimizer = make([nn.Parameter(torch.zeros(1))])
    mapped = MappedGroup(optimizer, optimizer.param_groups[0], "table 't'")
    optimizer.param_groups[0].update(change)
    with pytest.raises(InvalidInputError, match=message):
        mapped.values(optimizer.param_groups[0])
