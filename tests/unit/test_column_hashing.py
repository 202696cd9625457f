"""Hashing to buckets: XXH64 of the value's bytes, whichever way the value comes, the same for ever."""

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvemb.errors import InvalidInputError
from trainer.columns.feature_values import hash_buckets, hash_integers, hash_texts


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_an_integer_is_hashed_as_its_eight_little_endian_bytes(values: list[int]) -> None:
    expected = [xxhash.xxh64_intdigest(struct.pack("<q", value)) for value in values]
    assert hash_integers(np.array(values, np.int64)).tolist() == expected


@given(st.lists(st.text(st.characters(codec="utf-8"))))
def test_text_is_hashed_as_its_utf8_bytes(values: list[str]) -> None:
    expected = [xxhash.xxh64_intdigest(value.encode()) for value in values]
    assert hash_texts(values).tolist() == expected
    assert hash_texts([value.encode() for value in values]).tolist() == expected


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint32", "uint64", ">i8"])
def test_an_integer_has_one_bucket_whatever_its_dtype(dtype: str) -> None:
    values = np.array([0, 1, 7, 100])
    assert np.array_equal(hash_buckets(values.astype(dtype), 997), hash_buckets(values, 997))


def test_buckets_never_change() -> None:
    """Golden values: a model trained with others would be lost."""
    assert hash_buckets(np.array([0, 1, -1, 2**40]), 10**9).tolist() == [395291579, 449061269, 912002761, 722610771]
    assert hash_buckets(np.array(["", "a", "naïve", "日本"], object), 10**9).tolist() == [77376921, 359012955, 256335334, 455835563]


def test_buckets_cover_the_whole_range_and_nothing_else() -> None:
    buckets = hash_buckets(np.arange(10_000), 7)
    assert buckets.dtype == np.int64
    assert np.bincount(buckets, minlength=7).min() > 1000
    assert len(np.bincount(buckets)) == 7
    assert hash_buckets(np.arange(100), 2**63 - 1).min() >= 0
    assert hash_buckets(np.arange(5), 1).tolist() == [0] * 5


def test_nothing_to_hash_is_fine() -> None:
    assert hash_buckets(np.empty(0, np.int64), 3).shape == (0,)
    assert hash_buckets(np.empty(0, object), 3).shape == (0,)


@pytest.mark.parametrize("value", [1.5, None, ["nested"], "\ud800"])
def test_what_is_no_text_is_refused(value: object) -> None:
    values = np.empty(2, object)
    values[:] = ["fine", value]
    with pytest.raises(InvalidInputError):
        hash_buckets(values, 10)
