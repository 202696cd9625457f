"""Grouping rows by id and summing them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvemb.arrays.segment_sum import group_by_id

few_ids = st.integers(0, 300).flatmap(lambda m: arrays(np.uint64, m, elements=st.integers(0, 12)))


def segment_sum(ids: np.ndarray, grads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = group_by_id(ids)
    return groups.ids, groups.sum(grads)


def in_order_of_appearance(ids: np.ndarray, grads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    distinct, inverse = np.unique(ids, return_inverse=True)
    sums = np.zeros((len(distinct), grads.shape[1]), np.float32)
    np.add.at(sums, inverse, grads)
    return distinct, sums


@given(few_ids, st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_sums_are_exact_to_float32_rounding_of_the_float64_sum(ids: np.ndarray, dim: int, seed: int) -> None:
    grads = np.random.default_rng(seed).standard_normal((len(ids), dim), np.float32)
    distinct, sums = segment_sum(ids, grads)
    exact = np.zeros((len(distinct), dim))
    np.add.at(exact, np.searchsorted(distinct, ids), grads.astype(np.float64))
    assert distinct.tolist() == sorted(set(ids.tolist()))
    assert sums.dtype == np.float32
    np.testing.assert_allclose(sums, exact, rtol=0, atol=2e-5)


@given(few_ids)
def test_integer_sums_are_exact(ids: np.ndarray) -> None:
    grads = np.arange(2 * len(ids), dtype=np.float32).reshape(-1, 2)
    expected_ids, expected = in_order_of_appearance(ids, grads)
    distinct, sums = segment_sum(ids, grads)
    assert np.array_equal(distinct, expected_ids)
    assert np.array_equal(sums, expected)


@given(st.permutations([3] * 8 + [5] * 7 + [9]), st.integers(0, 2**32 - 1))
def test_up_to_eight_rows_of_an_id_are_added_one_after_another(ids: list[int], seed: int) -> None:
    grads = np.random.default_rng(seed).standard_normal((16, 3), np.float32)
    expected = in_order_of_appearance(np.array(ids, np.uint64), grads)
    got = segment_sum(np.array(ids, np.uint64), grads)
    assert np.array_equal(got[1], expected[1])


def test_an_id_that_occurs_very_often_loses_no_more_than_a_few_roundings() -> None:
    n = 100_000
    grads = np.full((n, 1), 0.1, np.float32)
    _, sums = segment_sum(np.zeros(n, np.uint64), grads)
    exact = float(np.float32(0.1)) * n
    assert abs(float(sums[0, 0]) - exact) / exact < 1e-6


def test_the_same_input_gives_the_same_bits_whatever_else_is_in_the_batch() -> None:
    rng = np.random.default_rng(1)
    grads = rng.standard_normal((1000, 4), np.float32)
    alone = segment_sum(np.full(1000, 7, np.uint64), grads)[1]
    others = rng.integers(100, 200, 3000).astype(np.uint64)
    mixed = np.concatenate([others, np.full(1000, 7, np.uint64)])
    ids, sums = segment_sum(mixed, np.concatenate([rng.standard_normal((3000, 4), np.float32), grads]))
    assert np.array_equal(sums[ids == 7], alone)


def test_ascending_distinct_ids_come_back_without_a_copy() -> None:
    ids, grads = np.array([1, 5, 2**64 - 1], np.uint64), np.ones((3, 2), np.float32)
    got_ids, got = segment_sum(ids, grads)
    assert got_ids is ids
    assert got is grads


@pytest.mark.parametrize("ids", [[], [4], [4, 4], [9, 2**63, 0]])
def test_small_inputs(ids: list[int]) -> None:
    grads = np.ones((len(ids), 3), np.float32)
    distinct, sums = segment_sum(np.array(ids, np.uint64), grads)
    assert distinct.tolist() == sorted(set(ids))
    assert sums.sum() == 3 * len(ids)


def test_arguments_are_not_changed() -> None:
    ids, grads = np.array([4, 1, 4], np.uint64), np.ones((3, 2), np.float32)
    segment_sum(ids, grads)
    assert ids.tolist() == [4, 1, 4]
    assert (grads == 1).all()


@given(few_ids)
def test_inverse_puts_every_row_back(ids: np.ndarray) -> None:
    groups = group_by_id(ids)
    assert np.array_equal(groups.ids[groups.inverse], ids)


@given(few_ids)
def test_minimum_is_each_ids_smallest_value(ids: np.ndarray) -> None:
    values = np.arange(len(ids), dtype=np.uint64)[::-1].copy()
    groups = group_by_id(ids)
    expected = [min(values[ids == row_id].tolist()) for row_id in groups.ids]
    assert groups.minimum(values).tolist() == expected


@pytest.mark.parametrize("n", [8191, 8192, 30_000])
@pytest.mark.parametrize(
    "bits",
    [
        pytest.param(64, id="all bits"),
        pytest.param(9, id="small, many equal"),
        pytest.param(20, id="two digits"),
        pytest.param(0, id="one id"),
    ],
)
@pytest.mark.parametrize("run", [1, 8, 1000])
def test_many_ids_are_sorted_as_numpy_does_equal_ones_in_order_of_appearance(n: int, bits: int, run: int) -> None:
    rng = np.random.default_rng(n + bits)
    ids = rng.integers(0, 1 << bits, n, dtype=np.uint64, endpoint=False) if bits < 64 else rng.integers(0, 2**64, n, dtype=np.uint64)
    ids[: n // run * run] = np.sort(ids[: n // run * run].reshape(-1, run), axis=1).reshape(-1)
    groups = group_by_id(ids)
    assert groups.order is not None
    assert (groups.order == np.argsort(ids, kind="stable")).all()
    assert (groups.ids[groups.inverse] == ids).all()


def test_ids_that_differ_in_their_highest_bits_only_are_sorted() -> None:
    ids = np.arange(20_000, dtype=np.uint64)[::-1] << np.uint64(48)
    assert (group_by_id(ids).ids == np.sort(ids)).all()
