"""Ids as callers give them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb.arrays.ids import normalize, to_caller
from kvemb.errors import InvalidInputError

INT64, UINT64 = st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1)


@given(st.lists(INT64))
def test_int64_ids_survive_the_round_trip(ids: list[int]) -> None:
    flat, shape = normalize(np.array(ids, np.int64), "int64", "t")
    assert shape == (len(ids),)
    assert flat.dtype == np.uint64
    assert to_caller(flat, "int64").tolist() == ids


@given(st.lists(UINT64))
def test_uint64_lists_survive_the_round_trip(ids: list[int]) -> None:
    flat, _ = normalize(ids, "uint64", "t")
    assert to_caller(flat, "uint64").tolist() == ids


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i8", ">u4"])
@pytest.mark.parametrize("id_dtype", ["int64", "uint64"])
def test_every_integer_dtype_means_its_value(dtype: str, id_dtype: str) -> None:
    flat, _ = normalize(np.array([0, 1, 127], dtype), id_dtype, "t")
    assert flat.tolist() == [0, 1, 127]


@pytest.mark.parametrize(
    ("ids", "shape"),
    [(5, ()), ([], (0,)), ([[], []], (2, 0)), (np.zeros((2, 3), np.int32), (2, 3)), (np.array([]), (0,))],
)
def test_any_shape_is_taken(ids: object, shape: tuple[int, ...]) -> None:
    flat, got = normalize(ids, "int64", "t")  # type: ignore[arg-type]
    assert got == shape
    assert flat.shape == (int(np.prod(shape)),)


def test_strided_and_reversed_arrays_are_read_in_their_own_order() -> None:
    ids = np.arange(24).reshape(4, 6)
    assert normalize(ids[::-1, ::2], "int64", "t")[0].tolist() == ids[::-1, ::2].reshape(-1).tolist()
    assert normalize(np.asfortranarray(ids), "int64", "t")[0].tolist() == list(range(24))


@pytest.mark.parametrize(
    ("ids", "id_dtype", "message"),
    [
        ([1.0], "int64", "float64"),
        (np.array([1.0, 2.0], np.float32), "int64", "float32"),
        (np.array([True]), "int64", "bool"),
        ([True, False], "int64", "bool"),
        ([1, True, 2**63], "uint64", "expected integers"),
        (["socket"], "int64", "hash_ids"),
        ([[1], [1, 2]], "int64", "cannot be read"),
        ([None], "int64", "expected integers"),
        (np.array([3, -4, -5]), "uint64", r"id -4 at position 1 .* 0 to 2\*\*64-1"),
        (np.array([1, 2**63], np.uint64), "int64", r"id 9223372036854775808 at position 1"),
        ([2**63], "int64", "9223372036854775808"),
        ([2**64], "uint64", "outside"),
        ([-1, 2**63], "uint64", "outside"),
        ([-1, 2**63], "int64", "outside"),
        ([1.5, 2**64], "uint64", "expected integers"),
    ],
)
def test_unusable_ids_are_refused(ids: object, id_dtype: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        normalize(ids, id_dtype, "user")  # type: ignore[arg-type]
    assert "'user'" in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "id_dtype", "named"),
    [
        ([3, 10, 11], "int64", "id 10 at position 1"),
        ([[3], [-1]], "int64", "id -1 at position 1"),
        ([2**63], "uint64", "id 9223372036854775808 at position 0"),
        (np.array([0, 200], np.uint8), "int64", "id 200 at position 1"),
    ],
)
def test_ids_of_a_dense_table_must_lie_below_num_ids(ids: object, id_dtype: str, named: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"table 't': {named} is outside 0 to 10 - 1.*num_ids"):
        normalize(ids, id_dtype, "t", 10)  # type: ignore[arg-type]


def test_the_ends_of_a_dense_table_are_inside() -> None:
    assert normalize([0, 9], "int64", "t", 10)[0].tolist() == [0, 9]
    assert normalize([], "int64", "t", 1)[0].tolist() == []
    assert normalize([2**64 - 1], "uint64", "t", 2**64)[0].tolist() == [2**64 - 1]
    assert normalize([2**63 - 1], "int64", "t", 2**63)[0].tolist() == [2**63 - 1]


PADDED = np.ma.masked_equal([[1, -1], [-1, 2]], -1)


@pytest.mark.parametrize("ids", [PADDED, [PADDED[0], PADDED[1]]])
def test_masked_ids_are_refused_for_they_would_lose_their_mask(ids: object) -> None:
    with pytest.raises(InvalidInputError, match=r"table 'user': ids: \d elements of a numpy.ma array are masked"):
        normalize(ids, "int64", "user")  # type: ignore[arg-type]


def test_a_masked_array_without_masked_elements_is_an_array() -> None:
    assert normalize(np.ma.masked_equal([1, 2], -1), "int64", "user")[0].tolist() == [1, 2]


def test_minus_one_is_refused_where_it_is_taken_for_padding() -> None:
    with pytest.raises(InvalidInputError, match=r"table 'user': id -1 at position 1 \(2 in all\).*padding.*allow_minus_one"):
        normalize([[3, -1], [-1, -2]], "int64", "user", minus_one=False)
    for dtype in (np.int8, np.int32):
        with pytest.raises(InvalidInputError, match="id -1"):
            normalize(np.array([-1], dtype), "int64", "user", minus_one=False)


@pytest.mark.parametrize("ids", [np.array([3, -1]).astype(np.uint64), [3, 2**64 - 1]])
def test_minus_one_as_an_unsigned_id_is_taken_for_padding_too(ids: object) -> None:
    with pytest.raises(InvalidInputError, match=r"table 'user': id 18446744073709551615 at position 1 \(1 in all\).*-1 as uint64.*padding"):
        normalize(ids, "uint64", "user", minus_one=False)  # type: ignore[arg-type]
    assert normalize(ids, "uint64", "user")[0].tolist() == [3, 2**64 - 1]  # type: ignore[arg-type]
    assert normalize(ids, "uint64", "user", 2**64, minus_one=False)[0].tolist() == [3, 2**64 - 1], "num_ids says that it is an id"  # type: ignore[arg-type]


def test_other_negative_ids_and_other_large_ones_are_no_padding() -> None:
    ids = [-2, -(2**63), -7455318800513058262]  # the last is hash_ids' of "socket"
    assert normalize(ids, "int64", "user", minus_one=False)[0].view(np.int64).tolist() == ids
    assert normalize([2**64 - 2, 2**63], "uint64", "user", minus_one=False)[0].tolist() == [2**64 - 2, 2**63]
