"""One table of checks that every optimizer passes: 200 steps beside its named reference, and the laws common to all.

A row of the table is a specification, a reference and how many rows each step touches. References are torch.optim, and
for what torch does not have a float64 loop over elements, written here from the paper.

Tolerance: float32 has 24 bits, 6e-8 relative per operation. Our operations are torch's up to their order (lerp,
addcmul, fused multiply-add), so each step's update differs by a few roundings, 1e-7 relative; over 200 steps these add
up to 2e-5 at worst. The absolute 1e-6 is for weights that have come near 0, where the rounding is that of the larger
numbers they came from; weights here are of the order of 1. A wrong formula is far outside:
`test_the_tolerance_tells_wrong_formulas` keeps that so.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from kvemb import optim
from kvemb.errors import InvalidInputError
from kvemb.optim import OptimizerSpec
from paramserver.optim import Optimizer, build_optimizer

torch = pytest.importorskip("torch")

Array = npt.NDArray[np.float32]
Trajectory = list[Array]
RTOL, ATOL = 2e-5, 1e-6
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
    slots, out = optimizer.init_slots(len(weights), DIM), []
    for step, batch in enumerate(steps, start=1):
        rows = batch.rows
        weights[rows], slots[rows] = optimizer.update(weights[rows], slots[rows], batch.grads, {"lr": batch.lr}, step)
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


def state_after(case: Case, n: int, dim: int, seed: int = 3) -> tuple[Optimizer, Array, Array, Array]:
    """An optimizer with rows in mid-training (slots not at their first values), and a gradient for each."""
    rng = np.random.default_rng(seed)
    optimizer = build_optimizer(case.spec)
    weights, slots = rng.normal(size=(n, dim)).astype(np.float32), optimizer.init_slots(n, dim)
    for step in (1, 2):
        grads = rng.normal(size=(n, dim)).astype(np.float32)
        weights, slots = optimizer.update(weights, slots, grads, {}, step)
    return optimizer, weights, slots, rng.normal(size=(n, dim)).astype(np.float32)


# --- parity ----------------------------------------------------------------------------------------------------------


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


VARIED = ("weight_decay", "momentum", "beta1", "beta2", "alpha", "l1", "l2", "beta", "l2_weight")  # each may be 0

# --- laws common to all ----------------------------------------------------------------------------------------------


@every_case
def test_arguments_are_not_changed_and_results_are_new(case: Case) -> None:
    optimizer, weights, slots, grads = state_after(case, 9, DIM)
    before = [a.copy() for a in (weights, slots, grads)]
    for array in (weights, slots, grads):
        array.flags.writeable = False
    results = optimizer.update(weights, slots, grads, {}, 3)
    for array, copy in zip((weights, slots, grads), before, strict=True):
        np.testing.assert_array_equal(array, copy)
        assert not any(np.shares_memory(array, result) for result in results)
    assert [(r.dtype, r.shape, r.flags.c_contiguous) for r in results] == [
        (np.float32, weights.shape, True),
        (np.float32, slots.shape, True),
    ]


@every_case
def test_an_update_in_place_gives_the_same_bits_and_leaves_the_gradients_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, weights, slots, grads = state_after(case, 101, DIM)
    monkeypatch.setattr("paramserver.optim.update_rule._BLOCK_VALUES", 40 * DIM)
    expected = optimizer.update(weights, slots, grads, {}, 3)
    mine, my_slots = weights.copy(), slots.copy()
    grads.flags.writeable = False
    optimizer.update_in_place(mine, my_slots, grads, {}, 3)
    np.testing.assert_array_equal(mine.view(np.uint32), expected[0].view(np.uint32))
    np.testing.assert_array_equal(my_slots.view(np.uint32), expected[1].view(np.uint32))
    with pytest.raises(InvalidInputError):
        optimizer.update_in_place(mine, my_slots, grads, {"lr": -1.0}, 4)
    np.testing.assert_array_equal(mine, expected[0])


@every_case
def test_rows_that_differ_in_step_and_values_have_the_same_bits_as_each_by_itself(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, weights, slots, grads = state_after(case, 60, DIM)
    grads[::7, 0] = -0.0
    monkeypatch.setattr("paramserver.optim.update_rule._BLOCK_VALUES", 25 * DIM)
    expected, mine = (weights.copy(), slots.copy()), (weights.copy(), slots.copy())
    per_row = []
    for row in range(60):
        hyper, step = {name: value * (row % 4) / 3 for name, value in case.spec.defaults().items() if name in VARIED}, 1 + 3 * (row // 10)
        optimizer.update_in_place(expected[0][row : row + 1], expected[1][row : row + 1], grads[row : row + 1], hyper, step)
        per_row.append(optimizer.factors(case.spec.check_hyper(hyper), step))
    factors = {name: np.array([[one[name]] for one in per_row], np.float32) for name in per_row[0]}
    optimizer.update_mixed(*mine, grads, factors)
    for got, wanted in zip(mine, expected, strict=True):
        np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


@every_case
def test_an_empty_batch_gives_an_empty_batch(case: Case) -> None:
    optimizer = build_optimizer(case.spec)
    empty = np.empty((0, DIM), np.float32)
    weights, slots = optimizer.update(empty, optimizer.init_slots(0, DIM), empty, {}, 1)
    assert weights.shape == (0, DIM)
    assert slots.shape == (0, optimizer.slot_size(DIM))
    assert weights.dtype == slots.dtype == np.float32


@pytest.mark.parametrize("dim", [1, 3, 16, 33])
@every_case
def test_a_row_has_the_same_bits_whatever_rows_lie_beside_it(case: Case, dim: int) -> None:
    optimizer, weights, slots, grads = state_after(case, 101, dim)
    whole = optimizer.update(weights, slots, grads, {}, 3)
    shuffled = np.random.default_rng(5).permutation(101)
    for rows in (shuffled, shuffled[:40], shuffled[:1]):
        part = optimizer.update(weights[rows], slots[rows], grads[rows], {}, 3)
        np.testing.assert_array_equal(part[0], whole[0][rows])
        np.testing.assert_array_equal(part[1], whole[1][rows])


@every_case
def test_blocks_do_not_show(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, weights, slots, grads = state_after(case, 101, DIM)
    whole = optimizer.update(weights, slots, grads, {}, 3)
    monkeypatch.setattr("paramserver.optim.update_rule._BLOCK_VALUES", 7 * DIM)
    in_blocks = optimizer.update(weights, slots, grads, {}, 3)
    for got, expected in zip(in_blocks, whole, strict=True):
        np.testing.assert_array_equal(got, expected)


@every_case
def test_non_contiguous_arguments_are_fine(case: Case) -> None:
    optimizer, weights, slots, grads = state_after(case, 20, DIM)
    expected = optimizer.update(weights, slots, grads, {}, 3)
    record = np.concatenate([weights, slots, grads], axis=1)[::-1]  # columns of a record, in reverse
    s = slots.shape[1]
    got = optimizer.update(record[:, :DIM], record[:, DIM : DIM + s], record[:, DIM + s :], {}, 3)
    np.testing.assert_array_equal(got[0], expected[0][::-1])
    np.testing.assert_array_equal(got[1], expected[1][::-1])


@pytest.mark.parametrize("size", [3e38, 1e20, 1e10, 1e-10, 1e-30, 1e-45, 0.0])
@every_case
def test_huge_and_tiny_gradients_leave_finite_rows_that_still_learn(case: Case, size: float) -> None:
    optimizer = build_optimizer(case.spec)
    weights, slots = start(case), optimizer.init_slots(ROWS, DIM)
    sign = np.where(np.arange(DIM) % 2, 1.0, -1.0)
    for step in range(1, 21):
        grads = np.broadcast_to(sign * size, weights.shape).astype(np.float32)
        weights, slots = optimizer.update(weights, slots, grads, {}, step)
    for step in range(21, 31):
        weights, slots = optimizer.update(weights, slots, np.ones_like(weights), {}, step)
    assert np.isfinite(weights).all()
    assert np.isfinite(slots).all()


@every_case
def test_left_out_run_time_values_have_the_tables_defaults(case: Case) -> None:
    optimizer, weights, slots, grads = state_after(case, 9, DIM)
    expected = optimizer.update(weights, slots, grads, case.spec.defaults(), 3)
    got = optimizer.update(weights, slots, grads, {}, 3)
    np.testing.assert_array_equal(got[0], expected[0])
    other_lr = optimizer.update(weights, slots, grads, {"lr": case.spec.defaults()["lr"] * 2}, 3)
    assert not np.array_equal(other_lr[0], expected[0])


@every_case
def test_numpy_scalars_among_run_time_values_keep_float32(case: Case) -> None:
    optimizer, weights, slots, grads = state_after(case, 9, DIM)
    expected = optimizer.update(weights, slots, grads, {}, 3)
    got = optimizer.update(weights, slots, grads, {k: np.float64(v) for k, v in case.spec.defaults().items()}, 3)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])


def test_adam_counts_the_tables_steps_not_the_rows() -> None:
    """A row first touched at step 1000 moves by lr * sqrt(c2) / c1 * 0.1 / sqrt(0.001): 2.5 lr, not lr."""
    optimizer = build_optimizer(optim.adam(lr=1e-3))
    weights, grads = np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32)
    at_1 = optimizer.update(weights, optimizer.init_slots(1, 2), grads, {}, 1)[0]
    at_1000 = optimizer.update(weights, optimizer.init_slots(1, 2), grads, {}, 1000)[0]
    np.testing.assert_allclose(at_1, -1e-3, rtol=1e-5)
    np.testing.assert_allclose(at_1000, -1e-3 * math.sqrt(1 - 0.999**1000) * 0.1 / math.sqrt(0.001), rtol=1e-5)


def test_centered_rmsprop_stays_finite_where_rounding_makes_the_variance_negative() -> None:
    optimizer = build_optimizer(optim.rmsprop(0.01, alpha=0.5, centered=True))
    weights, slots = np.zeros((64, 8), np.float32), optimizer.init_slots(64, 8)
    grads = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    negative = False
    for step in range(1, 201):
        weights, slots = optimizer.update(weights, slots, grads, {}, step)
        negative |= bool((slots[:, :8] < np.square(slots[:, 8:])).any())
    assert negative  # so the case did arise
    assert np.isfinite(weights).all()


@pytest.mark.parametrize(
    ("weights", "slots", "grads", "step", "message"),
    [
        ((3, 4), (3, 8), (3, 5), 1, r"both be \[n, d\]"),
        ((3, 4), (3, 8), (2, 4), 1, r"both be \[n, d\]"),
        ((3, 4), (3, 4), (3, 4), 1, r"slots must be \(3, 8\), got \(3, 4\)"),
        ((4,), (4, 8), (4,), 1, r"both be \[n, d\]"),
        ((3, 4), (3, 8), (3, 4), 0, "step counts from 1, got 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    weights: tuple[int, ...], slots: tuple[int, ...], grads: tuple[int, ...], step: int, message: str
) -> None:
    arrays = [np.zeros(shape, np.float32) for shape in (weights, slots, grads)]
    with pytest.raises(InvalidInputError, match=message):
        build_optimizer(optim.adam()).update(*arrays, {}, step)


def test_float64_gradients_are_refused() -> None:
    zeros = np.zeros((1, 2), np.float32)
    with pytest.raises(InvalidInputError, match="float32"):
        build_optimizer(optim.sgd()).update(zeros, zeros[:, :0], zeros.astype(np.float64), {}, 1)  # type: ignore[arg-type]


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
    slots = ours.init_slots(*weights.shape)
    for step in range(1, 6):
        grads = rng.standard_normal(weights.shape).astype(np.float32)
        theirs.zero_grad()
        (module(torch.arange(len(weights))) * torch.from_numpy(grads)).sum().backward()
        theirs.step()
        ours.update_in_place(weights, slots, grads, {}, step)
        assert np.array_equal(weights, module.weight.detach().numpy()), step
