"""Every optimizer beside its named reference, torch.optim's or the paper's, on the same batches."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from kvemb import optim
from kvemb.optim import OptimizerSpec
from paramserver.optim import build_optimizer

torch = pytest.importorskip("torch")
Array = npt.NDArray[np.float32]
Trajectory = list[Array]
STEPS, ROWS, DIM = 200, 12, 5


@dataclass(frozen=True)
class Batch:
    """What one step pushes: some rows, their gradients, and the learning rate in force."""

    rows: npt.NDArray[np.int64]
    grads: Array
    lr: float


@dataclass(frozen=True)
class Case:
    name: str
    spec: OptimizerSpec
    reference: Callable[[Array, list[Batch], OptimizerSpec], Trajectory]
    touched: int = ROWS  # rows per step
    zero_start: bool = False


def batches(touched: int, lr: float, change_lr: bool = False) -> list[Batch]:
    """200 steps of gradients whose scale differs by row from 1e-3 to 1, with a constant part so that weights travel."""
    rng = np.random.default_rng(7)
    scale = np.logspace(-3, 0, ROWS)[:, None]
    drift = rng.normal(size=(ROWS, DIM))
    out = []
    for step in range(STEPS):
        rows = np.sort(rng.choice(ROWS, size=touched, replace=False))
        grads = ((rng.normal(size=(ROWS, DIM)) + 0.3 * drift) * scale)[rows].astype(np.float32)
        out.append(Batch(rows, grads, lr * 0.1 if change_lr and step >= STEPS // 2 else lr))
    return out


def ours(weights: Array, steps: list[Batch], spec: OptimizerSpec) -> Trajectory:
    optimizer, weights = build_optimizer(spec), weights.copy()
    state, out = optimizer.initial_state(len(weights), DIM), []
    for step, batch in enumerate(steps, start=1):
        rows = batch.rows
        weights[rows], state[rows] = optimizer.update(weights[rows], state[rows], batch.grads, {"lr": batch.lr}, step)
        out.append(weights.copy())
    return out


def torch_dense(
    make: Callable[..., object], *, transform_by_hand: bool = True
) -> Callable[[Array, list[Batch], OptimizerSpec], Trajectory]:
    """Every row touched at every step; the spec's transforms by torch's own functions, unless `make` holds them."""

    def run(weights: Array, steps: list[Batch], spec: OptimizerSpec) -> Trajectory:
        parameters = [torch.nn.Parameter(torch.from_numpy(row.copy())) for row in weights]  # clip_grad_norm_ per row
        optimizer, out = make(parameters, lr=steps[0].lr), []
        for batch in steps:
            assert len(batch.rows) == len(parameters)
            for parameter, grad in zip(parameters, batch.grads, strict=True):
                parameter.grad = torch.from_numpy(grad.copy())
                for transform in spec.transforms if transform_by_hand else ():
                    TORCH_TRANSFORMS[transform.kind](parameter, transform.params[0][1])
            optimizer.param_groups[0]["lr"] = batch.lr
            optimizer.step()
            out.append(torch.stack([p.detach() for p in parameters]).numpy().copy())
        return out

    return run


def torch_sparse(make: Callable[..., object]) -> Callable[[Array, list[Batch], OptimizerSpec], Trajectory]:
    """Some rows touched per step, by a sparse gradient on one parameter, as nn.Embedding(sparse=True) makes it."""

    def run(weights: Array, steps: list[Batch], spec: OptimizerSpec) -> Trajectory:
        parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
        optimizer, out = make([parameter], lr=steps[0].lr), []
        with torch.sparse.check_sparse_tensor_invariants():  # torch warns where they are neither on nor off
            for batch in steps:
                values, index = torch.from_numpy(batch.grads), torch.from_numpy(batch.rows)[None]
                parameter.grad = torch.sparse_coo_tensor(index, values, parameter.shape)
                optimizer.param_groups[0]["lr"] = batch.lr
                optimizer.step()
                out.append(parameter.detach().numpy().copy())
        return out

    return run


TORCH_TRANSFORMS: Mapping[str, Callable[..., object]] = {
    "clip_by_value": lambda p, v: p.grad.clamp_(-v, v),
    "clip_by_norm": lambda p, v: torch.nn.utils.clip_grad_norm_([p], v),
    "l2": lambda p, v: p.grad.add_(p.detach(), alpha=v),
}


def ftrl_by_the_paper(weights: Array, steps: list[Batch], spec: OptimizerSpec) -> Trajectory:
    """McMahan et al. 2013, algorithm 1, line by line, one coordinate at a time, in float64."""
    hyper, n0 = spec.defaults(), float(dict(spec.options)["initial_accumulator_value"])
    w, z, n, out = weights.astype(np.float64), np.zeros(weights.shape), np.full(weights.shape, n0), []
    for batch in steps:
        alpha, beta, lambda1, lambda2 = batch.lr, hyper["beta"], hyper["l1"], hyper["l2"]
        for row, grads in zip(batch.rows, batch.grads.astype(np.float64), strict=True):
            for i, g in enumerate(grads):
                at = (row, i)
                sigma = (math.sqrt(n[at] + g * g) - math.sqrt(n[at])) / alpha
                z[at] += g - sigma * w[at]
                n[at] += g * g
                if abs(z[at]) <= lambda1:
                    w[at] = 0.0
                else:
                    step_size = 1.0 / ((beta + math.sqrt(n[at])) / alpha + lambda2)
                    w[at] = -step_size * (z[at] - math.copysign(lambda1, z[at]))
        out.append(w.astype(np.float32))
    return out


def rowwise_adagrad_by_the_paper(weights: Array, steps: list[Batch], spec: OptimizerSpec) -> Trajectory:
    """FBGEMM's EXACT_ROWWISE_ADAGRAD, one element at a time, in float64."""
    w, a, out = weights.astype(np.float64), np.zeros(len(weights)), []
    for batch in steps:
        for row, grads in zip(batch.rows, batch.grads.astype(np.float64), strict=True):
            a[row] += sum(g * g for g in grads) / DIM
            for i, g in enumerate(grads):
                w[row, i] -= batch.lr * g / (math.sqrt(a[row]) + spec.defaults()["eps"])
        out.append(w.astype(np.float32))
    return out


def bound(name: str, **options: object) -> Callable[..., object]:
    return lambda parameters, lr: getattr(torch.optim, name)(parameters, lr=lr, **options)


SGD = bound("SGD")
CASES = [
    Case("sgd", optim.sgd(0.05), torch_dense(SGD)),
    Case("sgd, some rows", optim.sgd(0.05), torch_sparse(SGD), touched=3),
    Case("sgd momentum", optim.sgd(0.05, momentum=0.9), torch_dense(bound("SGD", momentum=0.9))),
    Case(
        "sgd nesterov",
        optim.sgd(0.05, momentum=0.9, nesterov=True),
        torch_dense(bound("SGD", momentum=0.9, nesterov=True)),
    ),
    Case("sgd weight_decay", optim.sgd(0.05, weight_decay=0.1), torch_dense(bound("SGD", weight_decay=0.1))),
    Case(
        "sgd everything",
        optim.sgd(0.05, momentum=0.8, nesterov=True, weight_decay=0.1),
        torch_dense(bound("SGD", momentum=0.8, nesterov=True, weight_decay=0.1)),
    ),
    Case("adagrad", optim.adagrad(0.1), torch_dense(bound("Adagrad"))),
    Case("adagrad, some rows", optim.adagrad(0.1), torch_sparse(bound("Adagrad")), touched=3),
    Case(
        "adagrad initial",
        optim.adagrad(0.1, initial_accumulator_value=0.5, eps=1e-3),
        torch_dense(bound("Adagrad", initial_accumulator_value=0.5, eps=1e-3)),
    ),
    Case("rowwise_adagrad", optim.rowwise_adagrad(0.1), rowwise_adagrad_by_the_paper, touched=3),
    Case("adam", optim.adam(0.01), torch_sparse(bound("SparseAdam")), touched=3),
    Case("adam, one row", optim.adam(0.01), torch_sparse(bound("SparseAdam")), touched=1),
    Case("adam, all rows", optim.adam(0.01), torch_sparse(bound("SparseAdam"))),
    Case(
        "adam betas, large eps",
        optim.adam(0.01, betas=(0.5, 0.9), eps=0.1),
        torch_sparse(bound("SparseAdam", betas=(0.5, 0.9), eps=0.1)),
        touched=3,
    ),
    Case("adam amsgrad", optim.adam(0.01, amsgrad=True), torch_dense(bound("Adam", amsgrad=True))),
    Case(
        "adam amsgrad, large eps",
        optim.adam(0.01, eps=0.1, amsgrad=True),
        torch_dense(bound("Adam", eps=0.1, amsgrad=True)),
    ),
    Case("adamw", optim.adamw(0.01), torch_dense(bound("AdamW"))),
    Case(
        "adamw amsgrad, large decay and eps",
        optim.adamw(0.01, weight_decay=0.5, eps=0.1, amsgrad=True),
        torch_dense(bound("AdamW", weight_decay=0.5, eps=0.1, amsgrad=True)),
    ),
    Case("rmsprop", optim.rmsprop(0.01), torch_dense(bound("RMSprop"))),
    Case("rmsprop momentum", optim.rmsprop(0.01, momentum=0.9), torch_dense(bound("RMSprop", momentum=0.9))),
    Case("rmsprop centered", optim.rmsprop(0.01, centered=True), torch_dense(bound("RMSprop", centered=True))),
    Case(
        "rmsprop everything",
        optim.rmsprop(0.01, alpha=0.9, eps=1e-3, momentum=0.5, centered=True),
        torch_dense(bound("RMSprop", alpha=0.9, eps=1e-3, momentum=0.5, centered=True)),
    ),
    Case("ftrl", optim.ftrl(0.1), ftrl_by_the_paper, touched=3, zero_start=True),
    Case(
        "ftrl l1 l2 beta",
        optim.ftrl(0.1, l1=1.5, l2=0.5, beta=1.0, initial_accumulator_value=0.01),
        ftrl_by_the_paper,
        touched=5,
        zero_start=True,
    ),
    Case("clip_by_value", optim.chain(optim.clip_by_value(0.1), optim.sgd(0.05)), torch_dense(SGD)),
    Case("clip_by_norm", optim.chain(optim.clip_by_norm(0.5), optim.sgd(0.05)), torch_dense(SGD)),
    Case(
        "l2",
        optim.chain(optim.l2(0.1), optim.adam(0.01, amsgrad=True)),
        torch_dense(bound("Adam", amsgrad=True, weight_decay=0.1), transform_by_hand=False),
    ),
    Case(
        "transforms in order",
        optim.chain(optim.l2(0.5), optim.clip_by_norm(0.5), optim.clip_by_value(0.2), optim.adagrad(0.1)),
        torch_dense(bound("Adagrad")),
    ),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def start(case: Case) -> Array:
    if case.zero_start:
        return np.zeros((ROWS, DIM), np.float32)
    return np.random.default_rng(1).normal(size=(ROWS, DIM)).astype(np.float32)
