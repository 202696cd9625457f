"""One table of checks that every optimizer passes: 200 steps beside its named reference, and the laws common to all.

A row of the table is a specification, a reference and how many rows each step touches. References are torch.optim, and
for what torch does not have a float64 loop over elements, written here from the paper.

Tolerance: float32 has 24 bits, 6e-8 relative per operation. Our operations are torch's up to their order (lerp,
addcmul, fused multiply-add), so each step's update differs by a few roundings, 1e-7 relative; over 200 steps these add
up to 2e-5 at worst. The absolute 1e-6 is for weights that have come near 0, where the rounding is that of the larger
numbers they came from; weights here are of the order of 1. A wrong formula is far outside:
`test_the_tolerance_tells_wrong_formulas` keeps that so.
"""

import numpy as np
import pytest

from kvemb import optim
from kvemb.optim import OptimizerSpec
from paramserver.optim import build_optimizer
from tests.parity.optimizer_cases import CASES, Case, batches, every_case, ours, start, torch

RTOL, ATOL = 2e-5, 1e-6


@pytest.mark.parametrize("change_lr", [False, True], ids=["one lr", "lr changed mid-way"])
@every_case
def test_200_steps_are_those_of_the_reference(case: Case, change_lr: bool) -> None:
    steps = batches(case.touched, case.spec.defaults()["lr"], change_lr)
    weights = start(case)
    mine, theirs = ours(weights, steps, case.spec), case.reference(weights, steps, case.spec)
    for step, (got, expected) in enumerate(zip(mine, theirs, strict=True), start=1):
        np.testing.assert_allclose(got, expected, rtol=RTOL, atol=ATOL, err_msg=f"step {step}")
    assert np.abs(np.array(mine) - weights).max() > 0.05  # it went somewhere


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (optim.sgd(0.05, momentum=0.9), "sgd nesterov"),
        (optim.sgd(0.0501), "sgd"),
        (optim.adam(0.01, eps=1e-7, amsgrad=True), "adam amsgrad"),
        (optim.adam(0.01, eps=1e-7), "adam"),
        (optim.adamw(0.01, weight_decay=0.011), "adamw"),
        (optim.rmsprop(0.01), "rmsprop centered"),
        (optim.rowwise_adagrad(0.1, eps=1e-6), "rowwise_adagrad"),
        (optim.ftrl(0.1, beta=1e-3), "ftrl"),
        (optim.sgd(0.05), "clip_by_norm"),
    ],
)
def test_the_tolerance_tells_wrong_formulas(wrong: OptimizerSpec, right: str) -> None:
    case = next(case for case in CASES if case.name == right)
    steps = batches(case.touched, wrong.defaults()["lr"])
    right_steps = batches(case.touched, case.spec.defaults()["lr"])
    mine = np.array(ours(start(case), steps, wrong))
    assert not np.allclose(mine, np.array(ours(start(case), right_steps, case.spec)), rtol=RTOL, atol=ATOL)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch multiplies and adds in two roundings here")
@pytest.mark.parametrize(
    ("options", "sparse"),
    [({}, True), ({}, False), ({"weight_decay": 0.01}, False), ({"momentum": 0.9}, False), ({"momentum": 0.9, "nesterov": True}, False)],
)
def test_sgd_gives_the_bits_of_torch_at_any_rate(options: dict[str, float], sparse: bool) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((20_000, 16)).astype(np.float32)
    module = torch.nn.Embedding(*weights.shape, sparse=sparse, _weight=torch.from_numpy(weights.copy()))
    theirs, ours = torch.optim.SGD(module.parameters(), lr=0.1, **options), build_optimizer(optim.sgd(0.1, **options))
    state = ours.initial_state(*weights.shape)
    for step in range(1, 6):
        grads = rng.standard_normal(weights.shape).astype(np.float32)
        theirs.zero_grad()
        (module(torch.arange(len(weights))) * torch.from_numpy(grads)).sum().backward()
        theirs.step()
        ours.update_in_place(weights, state, grads, ours.factors(ours.spec.defaults(), step))
        assert np.array_equal(weights, module.weight.detach().numpy()), step
