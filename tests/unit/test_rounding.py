"""Storage dtypes: exact reading, nearest and stochastic rounding. torch-free references: NumPy's float16, and float64
arithmetic."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb.arrays.rounding import round_nearest, round_stochastic, storage_dtype, to_float32
from kvemb.errors import InvalidInputError

NARROW = ("float16", "bfloat16")
LARGEST = {"float16": 65504.0, "bfloat16": float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])}
FLOAT32_BITS = st.integers(0, 2**32 - 1)
N_BITS = 1 << 16


def as_float32(bits):
    return np.array(bits, np.uint32).view(np.float32)


def grid(name):
    """Every finite value of the dtype, ascending, -0.0 left out."""
    values = to_float32(np.arange(N_BITS, dtype=np.uint16).view(storage_dtype(name)), name)
    return np.unique(values[np.isfinite(values)])


def stochastic(weights, name, *, first_id=0, version=1, seed=0):
    ids = np.arange(first_id, first_id + len(weights), dtype=np.uint64)
    return round_stochastic(weights, name, ids=ids, versions=version, seed=seed)


def test_the_three_storage_dtypes_and_no_other():
    assert [storage_dtype(n).str for n in ("float32", "float16", "bfloat16")] == ["<f4", "<f2", "<u2"]
    for wrong in ("float64", "bf16", "", None):
        with pytest.raises(InvalidInputError, match="float32, float16, bfloat16"):
            storage_dtype(wrong)


def test_bfloat16_is_the_upper_half_of_a_float32():
    stored = np.arange(N_BITS, dtype="<u2").reshape(256, 256)
    read = to_float32(stored, "bfloat16")
    assert read.shape == (256, 256)
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read.view(np.uint32), stored.astype(np.uint32) << 16)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (2, 3)])
def test_reading_and_rounding_keep_any_shape(name, shape):
    stored = round_nearest(np.ones(shape, np.float32), name)
    assert stored.shape == shape
    assert stored.dtype == storage_dtype(name)
    np.testing.assert_array_equal(to_float32(stored, name), np.ones(shape, np.float32))
    if len(shape) == 2:
        np.testing.assert_array_equal(stochastic(np.ones(shape, np.float32), name), stored)


@pytest.mark.parametrize("name", NARROW)
def test_every_stored_value_survives_reading_and_rounding_bit_for_bit(name):
    stored = np.arange(N_BITS, dtype=np.uint16).view(storage_dtype(name))
    values = to_float32(stored, name)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(round_nearest(values, name).view(np.uint16)[number], stored.view(np.uint16)[number])
    rounded = stochastic(values[:, None], name)[:, 0]
    np.testing.assert_array_equal(rounded.view(np.uint16)[number], stored.view(np.uint16)[number])


@pytest.mark.parametrize("name", NARROW)
def test_nan_stays_nan_and_infinity_infinity_with_their_sign(name):
    # Quiet and signalling NaNs; payloads in the bits that are dropped too.
    weights = as_float32([[0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7F80FFFF, 0x7FFFFFFF, 0x7F800000, 0xFF800000]])
    for stored in (round_nearest(weights, name), stochastic(weights, name)):
        read = to_float32(stored, name)[0]
        assert np.isnan(read[:6]).all()
        assert read[6:].tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("name", NARROW)
def test_finite_weights_stay_finite_and_saturate(name):
    top = np.finfo(np.float32).max
    weights = np.repeat(np.array([[top, -top, LARGEST[name], -LARGEST[name]]], np.float32), 500, axis=0)
    for stored in (round_nearest(weights, name), stochastic(weights, name)):
        np.testing.assert_array_equal(to_float32(stored, name), np.sign(weights) * np.float32(LARGEST[name]))


@given(st.lists(FLOAT32_BITS, min_size=1, max_size=50))
def test_nearest_float16_is_ieee_rounding_with_saturation(bits):
    weights = as_float32(bits)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = weights.astype(np.float16)
    overflowed = np.isinf(expected) & np.isfinite(weights)
    expected[overflowed] = np.copysign(np.float16(65504), weights[overflowed])
    np.testing.assert_array_equal(round_nearest(weights, "float16"), expected)


@given(st.integers(0, 0x7F7E), st.integers(0, 0xFFFF), st.booleans())
def test_nearest_bfloat16_rounds_halves_to_even(upper, lower, negative):
    sign = 0x8000 if negative else 0
    up = lower > 0x8000 or (lower == 0x8000 and upper % 2 == 1)
    weights = as_float32([(sign | upper) << 16 | lower])
    assert round_nearest(weights, "bfloat16").tolist() == [sign | upper + up]


@pytest.mark.parametrize("name", NARROW)
@given(bits=st.lists(FLOAT32_BITS, min_size=1, max_size=50), version=st.integers(0, 2**64 - 1), seed=st.integers())
def test_stochastic_rounding_gives_one_of_the_two_neighbours(name, bits, version, seed):
    weights = as_float32(bits)
    weights = weights[np.isfinite(weights)]
    read = to_float32(stochastic(weights[:, None], name, version=version, seed=seed), name)[:, 0]
    values = grid(name)
    below = values[np.maximum(np.searchsorted(values, weights, side="right") - 1, 0)]
    above = values[np.minimum(np.searchsorted(values, weights, side="left"), len(values) - 1)]
    assert ((read == below) | (read == above)).all()
    assert (np.signbit(read) == np.signbit(weights)).all()


# Values between two stored ones: in a binade, at its edge, among float16's subnormals, at their edge, below the
# smallest.
BETWEEN = {
    "float16": [
        1 + 2**-13,
        1 - 2**-14,
        -0.3,
        1e-5,
        3.3e-7,
        2**-14 - 2**-26,
        2**-14 + 2**-27,
        2**-26,
        -(2**-25),
        65500.7,
    ],
    "bfloat16": [1 + 2**-10, 1 - 2**-11, -0.3, 1e-5, 1e-38, 2.0**-140, -(2.0**-145), 2.0**-126 - 2.0**-136, 3.1e38],
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("how", ["versions", "ids"])
def test_stochastic_rounding_is_unbiased(name, how):
    n = 40_000
    weights = np.tile(np.array(BETWEEN[name], np.float32), (n, 1))
    counter = np.arange(n, dtype=np.uint64)
    fixed = np.full(n, 77, np.uint64)
    ids, versions = (fixed, counter) if how == "versions" else (counter, fixed)
    read = to_float32(round_stochastic(weights, name, ids=ids, versions=versions, seed=3), name).astype(np.float64)
    spread = read.max(axis=0) - read.min(axis=0)
    assert (spread > 0).all()  # Both neighbours occur.
    # A two-valued draw has a standard deviation of at most half the spread; 5 of them of the mean.
    np.testing.assert_array_less(np.abs(read.mean(axis=0) - weights[0]), 5 * 0.5 * spread / np.sqrt(n))


@pytest.mark.parametrize("name", NARROW)
def test_updates_far_below_the_resolution_are_not_lost(name):
    # Rounding to nearest would leave 1.0 for ever.
    row, step, n_steps = np.ones((2_000, 1), np.float32), np.float32(2.0**-13), 256
    for version in range(n_steps):
        row = to_float32(stochastic(row + step, name, version=version), name)
    assert abs(row.mean() - (1 + n_steps * step)) < 0.004


@pytest.mark.parametrize("name", NARROW)
def test_a_replay_gives_the_same_bits_in_any_batch(name):
    rng = np.random.default_rng(5)
    weights = rng.normal(scale=1e-2, size=(3_000, 7)).astype(np.float32)
    ids = rng.integers(0, 2**64, 3_000, dtype=np.uint64)
    versions = rng.integers(0, 2**64, 3_000, dtype=np.uint64)
    whole = round_stochastic(weights, name, ids=ids, versions=versions, seed=9).view(np.uint16)
    order = rng.permutation(3_000)[:100]
    part = round_stochastic(weights[order], name, ids=ids[order], versions=versions[order], seed=9).view(np.uint16)
    np.testing.assert_array_equal(part, whole[order])
    strided = round_stochastic(np.asfortranarray(weights), name, ids=ids, versions=versions, seed=9).view(np.uint16)
    np.testing.assert_array_equal(strided, whole)
    one = round_stochastic(weights[:1], name, ids=ids[:1], versions=int(versions[0]), seed=9).view(np.uint16)
    np.testing.assert_array_equal(one, whole[:1])


@pytest.mark.parametrize("name", NARROW)
def test_seed_id_version_and_column_each_change_the_draw(name):
    weights = np.full((64, 64), 1 / 3, np.float32)
    ids, other_ids = np.arange(64, dtype=np.uint64), np.arange(64, 128, dtype=np.uint64)

    def draw(ids=ids, versions=1, seed=0):
        stored = round_stochastic(weights, name, ids=ids, versions=versions, seed=seed)
        return to_float32(stored, name) > weights

    base = draw()
    variants = [draw(ids=other_ids), draw(versions=2), draw(seed=1), np.roll(base, 1, axis=0), np.roll(base, 1, axis=1)]
    share = base.mean()
    for variant in variants:  # Independent draws agree in p**2 + (1 - p)**2 of 4096 places, give or take 5 sd.
        assert abs((variant == base).mean() - (share**2 + (1 - share) ** 2)) < 5 * 0.5 / 64


def test_the_bits_of_stochastic_rounding_never_change():
    weights = np.array([[0.1, -0.2, 3e-6], [1e-7, 1 / 3, -1e3]], np.float32)
    ids, versions = np.array([1, 2**64 - 1], np.uint64), np.array([2**48 + 5, 6], np.uint64)
    bits = {n: round_stochastic(weights, n, ids=ids, versions=versions, seed=42).view(np.uint16).tolist() for n in NARROW}
    assert bits == {
        "float16": [[11878, 45671, 51], [1, 13653, 58320]],
        "bfloat16": [[15821, 48716, 13897], [13271, 16043, 50298]],
    }


def test_float32_is_stored_as_it_is():
    weights = as_float32([[0x7FC00001, 0x00000001, 0x3F800001]])
    for stored in (round_nearest(weights, "float32"), stochastic(weights, "float32"), to_float32(weights, "float32")):
        np.testing.assert_array_equal(stored.view(np.uint32), weights.view(np.uint32))


def test_arguments_are_not_changed():
    weights, ids = np.full((3, 2), 1 / 3, np.float32), np.arange(3, dtype=np.uint64)
    versions = np.arange(3, dtype=np.uint64)
    for name in NARROW:
        round_stochastic(weights, name, ids=ids, versions=versions, seed=0)
        round_nearest(weights, name)
    assert (weights == np.float32(1 / 3)).all()
    assert ids.tolist() == versions.tolist() == [0, 1, 2]


WEIGHTS, IDS = np.zeros((2, 3), np.float32), np.zeros(2, np.uint64)


@pytest.mark.parametrize(
    ("weights", "ids", "versions", "message"),
    [
        (WEIGHTS.astype(np.float64), IDS, 1, "float32"),
        (WEIGHTS[0], IDS, 1, r"\[n, d\]"),
        (WEIGHTS, IDS[:1], 1, r"ids uint64 \[1\]"),
        (WEIGHTS, IDS.astype(np.int64), 1, "int64"),
        (WEIGHTS, IDS, -1, "versions"),
        (WEIGHTS, IDS, 2**64, "versions"),
        (WEIGHTS, IDS, IDS[:1], "versions"),
        (WEIGHTS, IDS, IDS.astype(np.int64), "int64"),
    ],
)
@pytest.mark.parametrize("name", ["float16", "float32"])
def test_arguments_of_the_wrong_shape_or_dtype_are_refused(name, weights, ids, versions, message):
    with pytest.raises(InvalidInputError, match=message):
        round_stochastic(weights, name, ids=ids, versions=versions, seed=0)


def test_reading_an_array_of_another_dtype_is_refused():
    with pytest.raises(InvalidInputError, match=r"<u2.*<f4"):
        to_float32(WEIGHTS, "bfloat16")
