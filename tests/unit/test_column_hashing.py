"""Hashing to buckets: XXH64 of the value's bytes, whichever way the value comes, the same for ever."""

import itertools
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvemb.errors import InvalidInputError
from trainer.columns.feature_values import cross_bags, hash_buckets, hash_integers, hash_texts, list_bags


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
    crossed = cross_bags([list_bags([["a", ""], ["日本"]]), list_bags([[7], [-1]]), list_bags([["x"], ["y"]])], 10**9)
    assert crossed.values.tolist() == [434146048, 306928588, 354323543]


def plain_hash(value: int | str) -> int:
    return xxhash.xxh64_intdigest(struct.pack("<q", value) if isinstance(value, int) else value.encode())


def plain_cross(*values: int | str) -> int:
    """What the documentation says, in a loop."""
    made = plain_hash(values[0])
    for value in values[1:]:
        made = xxhash.xxh64_intdigest(struct.pack("<QQ", made, plain_hash(value)))
    return made


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(-3, 3), max_size=3),
            st.lists(st.sampled_from(["", "a", "日本"]), max_size=3),
            st.lists(st.integers(0, 2), max_size=2),
        ),
        max_size=5,
    )
)
def test_a_cross_is_every_combination_of_an_examples_values(examples: list[tuple[list[int], list[str], list[int]]]) -> None:
    parts = [list_bags(list(part)) for part in zip(*examples, strict=True)] or [list_bags([])] * 2
    made = cross_bags(parts, 10**15)
    expected = [[plain_cross(*each) % 10**15 for each in itertools.product(*example)] for example in examples]
    assert made.lengths.tolist() == [len(one) for one in expected]
    assert made.values.tolist() == [bucket for one in expected for bucket in one]


def test_a_cross_of_features_with_other_numbers_of_examples_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"same number of examples, got \[2, 1\]"):
        cross_bags([list_bags([[1], [2]]), list_bags([[1]])], 9)


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
