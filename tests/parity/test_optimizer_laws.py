"""Laws that hold for all optimizers: no argument is changed, a row's bits depend on nothing beside it, values stay finite."""

import math

import numpy as np
import pytest

from kvemb import optim
from kvemb.errors import InvalidInputError
from paramserver.optim import Optimizer, build_optimizer
from tests.parity.optimizer_cases import DIM, ROWS, Array, Case, every_case, start


def state_after(case: Case, n: int, dim: int, seed: int = 3) -> tuple[Optimizer, Array, Array, Array]:
    """An optimizer with rows in mid-training (state not at their first values), and a gradient for each."""
    rng = np.random.default_rng(seed)
    optimizer = build_optimizer(case.spec)
    weights, state = rng.normal(size=(n, dim)).astype(np.float32), optimizer.initial_state(n, dim)
    for step in (1, 2):
        grads = rng.normal(size=(n, dim)).astype(np.float32)
        weights, state = optimizer.update(weights, state, grads, {}, step)
    return optimizer, weights, state, rng.normal(size=(n, dim)).astype(np.float32)


@every_case
def test_arguments_are_not_changed_and_results_are_new(case: Case) -> None:
    optimizer, weights, state, grads = state_after(case, 9, DIM)
    before = [a.copy() for a in (weights, state, grads)]
    for array in (weights, state, grads):
        array.flags.writeable = False
    results = optimizer.update(weights, state, grads, {}, 3)
    for array, copy in zip((weights, state, grads), before, strict=True):
        np.testing.assert_array_equal(array, copy)
        assert not any(np.shares_memory(array, result) for result in results)
    assert [(r.dtype, r.shape, r.flags.c_contiguous) for r in results] == [
        (np.float32, weights.shape, True),
        (np.float32, state.shape, True),
    ]


@every_case
def test_an_update_in_place_gives_the_same_bits_and_leaves_the_gradients_alone(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, weights, state, grads = state_after(case, 101, DIM)
    monkeypatch.setattr("paramserver.optim.update_rule._BLOCK_VALUES", 40 * DIM)
    expected = optimizer.update(weights, state, grads, {}, 3)
    mine, my_state = weights.copy(), state.copy()
    grads.flags.writeable = False
    optimizer.update_in_place(mine, my_state, grads, optimizer.factors(case.spec.defaults(), 3))
    np.testing.assert_array_equal(mine.view(np.uint32), expected[0].view(np.uint32))
    np.testing.assert_array_equal(my_state.view(np.uint32), expected[1].view(np.uint32))
    with pytest.raises(InvalidInputError):
        optimizer.update_in_place(mine, my_state[:, :0], grads[:-1], {})
    np.testing.assert_array_equal(mine, expected[0])


@every_case
def test_rows_that_differ_in_step_and_values_have_the_same_bits_as_each_by_itself(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, weights, state, grads = state_after(case, 60, DIM)
    grads[::7, 0] = -0.0
    monkeypatch.setattr("paramserver.optim.update_rule._BLOCK_VALUES", 25 * DIM)
    expected, mine = (weights.copy(), state.copy()), (weights.copy(), state.copy())
    per_row = []
    for row in range(60):
        hyper, step = {name: value * (row % 4) / 3 for name, value in case.spec.defaults().items() if name in VARIED}, 1 + 3 * (row // 10)
        per_row.append(optimizer.factors(case.spec.check_hyper(hyper), step))
        optimizer.update_in_place(expected[0][row : row + 1], expected[1][row : row + 1], grads[row : row + 1], per_row[-1])
    factors = {name: np.array([[one[name]] for one in per_row], np.float32) for name in per_row[0]}
    optimizer.update_in_place(*mine, grads, factors)
    for got, wanted in zip(mine, expected, strict=True):
        np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


@every_case
def test_an_empty_batch_gives_an_empty_batch(case: Case) -> None:
    optimizer = build_optimizer(case.spec)
    empty = np.empty((0, DIM), np.float32)
    weights, state = optimizer.update(empty, optimizer.initial_state(0, DIM), empty, {}, 1)
    assert weights.shape == (0, DIM)
    assert state.shape == (0, case.spec.state_size(DIM))
    assert weights.dtype == state.dtype == np.float32


@pytest.mark.parametrize("dim", [1, 3, 16, 33])
@every_case
def test_a_row_has_the_same_bits_whatever_rows_lie_beside_it(case: Case, dim: int) -> None:
    optimizer, weights, state, grads = state_after(case, 101, dim)
    whole = optimizer.update(weights, state, grads, {}, 3)
    shuffled = np.random.default_rng(5).permutation(101)
    for rows in (shuffled, shuffled[:40], shuffled[:1]):
        part = optimizer.update(weights[rows], state[rows], grads[rows], {}, 3)
        np.testing.assert_array_equal(part[0], whole[0][rows])
        np.testing.assert_array_equal(part[1], whole[1][rows])


@every_case
def test_blocks_do_not_show(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, weights, state, grads = state_after(case, 101, DIM)
    whole = optimizer.update(weights, state, grads, {}, 3)
    monkeypatch.setattr("paramserver.optim.update_rule._BLOCK_VALUES", 7 * DIM)
    in_blocks = optimizer.update(weights, state, grads, {}, 3)
    for got, expected in zip(in_blocks, whole, strict=True):
        np.testing.assert_array_equal(got, expected)


@every_case
def test_non_contiguous_arguments_are_fine(case: Case) -> None:
    optimizer, weights, state, grads = state_after(case, 20, DIM)
    expected = optimizer.update(weights, state, grads, {}, 3)
    record = np.concatenate([weights, state, grads], axis=1)[::-1]  # columns of a record, in reverse
    s = state.shape[1]
    got = optimizer.update(record[:, :DIM], record[:, DIM : DIM + s], record[:, DIM + s :], {}, 3)
    np.testing.assert_array_equal(got[0], expected[0][::-1])
    np.testing.assert_array_equal(got[1], expected[1][::-1])


@pytest.mark.parametrize("size", [3e38, 1e20, 1e10, 1e-10, 1e-30, 1e-45, 0.0])
@every_case
def test_huge_and_tiny_gradients_leave_finite_rows_that_still_learn(case: Case, size: float) -> None:
    optimizer = build_optimizer(case.spec)
    weights, state = start(case), optimizer.initial_state(ROWS, DIM)
    sign = np.where(np.arange(DIM) % 2, 1.0, -1.0)
    for step in range(1, 21):
        grads = np.broadcast_to(sign * size, weights.shape).astype(np.float32)
        weights, state = optimizer.update(weights, state, grads, {}, step)
    for step in range(21, 31):
        weights, state = optimizer.update(weights, state, np.ones_like(weights), {}, step)
    assert np.isfinite(weights).all()
    assert np.isfinite(state).all()


@every_case
def test_left_out_run_time_values_have_the_tables_defaults(case: Case) -> None:
    optimizer, weights, state, grads = state_after(case, 9, DIM)
    expected = optimizer.update(weights, state, grads, case.spec.defaults(), 3)
    got = optimizer.update(weights, state, grads, {}, 3)
    np.testing.assert_array_equal(got[0], expected[0])
    other_lr = optimizer.update(weights, state, grads, {"lr": case.spec.defaults()["lr"] * 2}, 3)
    assert not np.array_equal(other_lr[0], expected[0])


@every_case
def test_numpy_scalars_among_run_time_values_keep_float32(case: Case) -> None:
    optimizer, weights, state, grads = state_after(case, 9, DIM)
    expected = optimizer.update(weights, state, grads, {}, 3)
    got = optimizer.update(weights, state, grads, {k: np.float64(v) for k, v in case.spec.defaults().items()}, 3)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])


def test_adam_counts_the_tables_steps_not_the_rows() -> None:
    """A row first touched at step 1000 moves by lr * sqrt(c2) / c1 * 0.1 / sqrt(0.001): 2.5 lr, not lr."""
    optimizer = build_optimizer(optim.adam(lr=1e-3))
    weights, grads = np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32)
    at_1 = optimizer.update(weights, optimizer.initial_state(1, 2), grads, {}, 1)[0]
    at_1000 = optimizer.update(weights, optimizer.initial_state(1, 2), grads, {}, 1000)[0]
    np.testing.assert_allclose(at_1, -1e-3, rtol=1e-5)
    np.testing.assert_allclose(at_1000, -1e-3 * math.sqrt(1 - 0.999**1000) * 0.1 / math.sqrt(0.001), rtol=1e-5)


def test_centered_rmsprop_stays_finite_where_rounding_makes_the_variance_negative() -> None:
    optimizer = build_optimizer(optim.rmsprop(0.01, alpha=0.5, centered=True))
    weights, state = np.zeros((64, 8), np.float32), optimizer.initial_state(64, 8)
    grads = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    negative = False
    for step in range(1, 201):
        weights, state = optimizer.update(weights, state, grads, {}, step)
        negative |= bool((state[:, :8] < np.square(state[:, 8:])).any())
    assert negative  # so the case did arise
    assert np.isfinite(weights).all()


@pytest.mark.parametrize(
    ("weights", "state", "grads", "step", "message"),
    [
        ((3, 4), (3, 8), (3, 5), 1, r"both be \[n, d\]"),
        ((3, 4), (3, 8), (2, 4), 1, r"both be \[n, d\]"),
        ((3, 4), (3, 4), (3, 4), 1, r"state must be \(3, 8\), got \(3, 4\)"),
        ((4,), (4, 8), (4,), 1, r"both be \[n, d\]"),
        ((3, 4), (3, 8), (3, 4), 0, "step counts from 1, got 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    weights: tuple[int, ...], state: tuple[int, ...], grads: tuple[int, ...], step: int, message: str
) -> None:
    arrays = [np.zeros(shape, np.float32) for shape in (weights, state, grads)]
    with pytest.raises(InvalidInputError, match=message):
        build_optimizer(optim.adam()).update(*arrays, {}, step)


def test_float64_gradients_are_refused() -> None:
    zeros = np.zeros((1, 2), np.float32)
    with pytest.raises(InvalidInputError, match="float32"):
        build_optimizer(optim.sgd()).update(zeros, zeros[:, :0], zeros.astype(np.float64), {}, 1)  # type: ignore[arg-type]


VARIED = ("weight_decay", "momentum", "beta1", "beta2", "alpha", "l1", "l2", "beta", "l2_weight")  # each may be 0
