"""The draws of algorithm 2: the tables that lanes are looked up in, and whether lanes are independent of one another and evenly spread.

Every bound is one of a deterministic computation: where a test passes it passes always. It says how far, in standard deviations of an
ideal generator, the worst of so many statistics may lie.
"""

import hashlib
import math

import numpy as np
import pytest

from kvemb import init
from kvemb.arrays.hashing import digest64
from kvemb.arrays.rounding import round_nearest, to_float32
from kvemb.init.first_draws import Distribution, quantiles_of, row_states

NORMAL = init.normal(0.0, 1.0)
LANE = init.uniform(-0.5, 65535.5)  # value i + 0 of lane i, exactly: the 16 bits themselves


def normals(ids, dim):
    return NORMAL.rows(np.asarray(ids, np.uint64), dim, table="user", seed=7)


def lanes(ids, dim):
    drawn = LANE.rows(np.asarray(ids, np.uint64), dim, table="user", seed=7)
    assert (drawn == np.rint(drawn)).all()
    return drawn.astype(np.int64)


def sigmas_from_even(values, n_bins):
    """How many standard deviations chi square of these counts is from that of equally likely bins."""
    counts = np.bincount(values, minlength=n_bins)
    expected = values.size / n_bins
    return abs(((counts - expected) ** 2).sum() / expected - (n_bins - 1)) / math.sqrt(2 * (n_bins - 1))


# --- the tables ---


@pytest.mark.parametrize(
    ("family", "digest"),
    [
        ("uniform", "47dd073c4afc2aae9fea81e3ba80bca38e2157ed9eeb758bc30532742d287e3e"),
        ("normal", "1cfbba1e07e34386a57626f82aeb43e6ed54ba70a3ea6b7d964dc66a841074a8"),
        ("truncated_normal", "6b075029120987c39b76f11bec072a269f3100b8d6fbed67643c8b17946dfe39"),
    ],
)
def test_the_quantiles_are_these_bits(family, digest):
    values = quantiles_of(Distribution(family, 0.0, 1.0))
    assert hashlib.sha256(values.astype("<f4").tobytes()).hexdigest() == digest


@pytest.mark.parametrize("family", ["uniform", "normal", "truncated_normal"])
def test_the_quantiles_ascend_are_symmetric_and_cannot_be_written(family):
    values = quantiles_of(Distribution(family, 0.0, 1.0))
    assert values.shape == (65536,)
    assert (np.diff(values) > 0).all()
    middle = 0.5 if family == "uniform" else 0.0
    np.testing.assert_array_equal(values - middle, (middle - values)[::-1])
    assert not values.flags.writeable


def test_the_moments_of_a_normal_are_what_its_docstring_says():
    values = quantiles_of(Distribution("normal", 0.0, 1.0)).astype(np.float64)
    assert values.mean() == 0.0
    assert 0.99997 < values.var() < 1.0
    assert 2.999 < (values**4).mean() / values.var() ** 2 < 3.0
    assert 4.32 < values.max() < 4.33


# --- every value as likely as the others ---


def test_every_value_of_a_column_is_equally_likely():
    rows = lanes(np.arange(1 << 19), 65)
    for column in (0, 1, 4, 64):
        drawn = rows[:, column]
        assert sigmas_from_even(drawn, 1 << 16) < 4, column
        assert sigmas_from_even(drawn & 0xFF, 1 << 8) < 4, column
        assert sigmas_from_even(drawn >> 8, 1 << 8) < 4, column


@pytest.mark.parametrize("low_bit", [0, 8, 24, 32, 48, 56])
def test_values_are_equally_likely_whichever_bits_of_the_ids_differ(low_bit):
    ids = np.arange(1 << 8, dtype=np.uint64) << np.uint64(low_bit)  # for bit 56: ids that differ in their highest byte only
    assert sigmas_from_even(lanes(ids, 1024).ravel() >> 8, 1 << 8) < 4


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 7, 16, 33, 64, 65, 127, 300])
def test_moments_of_a_sample_are_those_of_the_distribution(dim):
    sample = normals(np.arange(600_000 // dim), dim).astype(np.float64)
    n = sample.size
    assert abs(sample.mean()) < 4 / math.sqrt(n)
    assert abs(sample.var() - 1) < 4 * math.sqrt(2 / n) + 3e-5
    assert abs((sample**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((sample**4).mean() - 3) < 4 * math.sqrt(96 / n) + 2e-3


# --- independent of one another ---


def test_the_columns_of_a_row_are_uncorrelated_in_value_and_in_size():
    sample = normals(np.arange(60_000), 72)
    for each in (sample, np.abs(sample)):
        off = np.corrcoef(each, rowvar=False) - np.eye(72)
        assert np.abs(off).max() < 5 / math.sqrt(60_000)  # 2,556 pairs: an ideal generator's worst is about 3.6


def test_two_columns_of_one_word_are_independent():
    drawn = lanes(np.arange(1 << 20), 4) >> 10
    for one in range(4):
        for other in range(one):
            assert sigmas_from_even(drawn[:, one] << 6 | drawn[:, other], 1 << 12) < 4


def test_rows_of_ids_that_differ_in_one_bit_are_uncorrelated():
    ids = np.random.default_rng(0).integers(0, 2**64, 2_000, dtype=np.uint64)
    one = normals(ids, 64)
    for bit in range(64):
        other = normals(ids ^ np.uint64(1 << bit), 64)
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4.5 / math.sqrt(one.size), bit
        assert (one == other).mean() < 1e-3, bit  # 1.5e-5 expected: values are 65,536


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 8, 64, 1 << 32])
def test_rows_of_neighbouring_ids_are_uncorrelated_whichever_columns_are_compared(distance):
    ids = np.arange(8_000, dtype=np.uint64)
    one, other = normals(ids, 68), normals(ids + np.uint64(distance), 68)
    for shift in range(9):
        moved = np.roll(other, shift, axis=1)
        assert abs(np.corrcoef(one.ravel(), moved.ravel())[0, 1]) < 4.5 / math.sqrt(one.size)


def test_no_two_of_a_million_rows_are_alike():
    made = lanes(np.arange(1_000_000), 4)
    words = made[:, 0] | made[:, 1] << 16 | made[:, 2] << 32 | made[:, 3] << 48
    assert len(np.unique(words)) == 1_000_000


def test_the_algorithms_share_no_state():
    ids = np.arange(100, dtype=np.uint64)
    assert not np.isin(row_states(ids, "t", 0, 1), row_states(ids, "t", 0, 2)).any()
    assert digest64("kvemb.init", 1, "id", "t", 0) != digest64("kvemb.init", 2, "id", "t", 0)


# --- storage dtypes ---


@pytest.mark.parametrize("algorithm", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [1, 6, 16, 301])
def test_values_are_rounded_to_the_nearest_of_the_storage_dtype(dtype, dim, algorithm):
    ids = np.arange(500, dtype=np.uint64)
    kinds = [
        init.normal(0.3, 1e-3),
        init.truncated_normal(),
        init.uniform(-7.0, 9.0),
        init.constant(0.1),
        init.zeros(),
        init.xavier_normal(),
    ]
    if dim > 1:
        kinds.append(init.columns((1, init.constant(1 / 3)), (dim - 1, init.normal())))
    for each in kinds:
        exact = each.rows(ids, dim, table="user", seed=7, algorithm=algorithm)
        got = each.rows(ids, dim, table="user", seed=7, dtype=dtype, algorithm=algorithm)
        np.testing.assert_array_equal(got, to_float32(round_nearest(exact, dtype), dtype))
