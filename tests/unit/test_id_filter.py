"""Filters: an id that was added passes, and of the others few do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb.arrays.hashing import mix64
from kvemb.arrays.id_filter import IdFilter, filter_of, filter_words, group_words, passes


def u64(values: object) -> np.ndarray:
    return np.array(list(values), np.uint64)  # type: ignore[call-overload]


@given(st.lists(st.integers(0, 2**64 - 1), unique=True, min_size=1), st.sampled_from([1, 2, 8, 64]), st.integers(0, 63))
def test_a_filter_lets_every_key_of_its_group_pass(keys: list[int], group_rows: int, shift: int) -> None:
    some = u64(dict.fromkeys(key >> shift for key in keys))
    n_words, groups = group_words(group_rows), np.arange(len(some)) // group_rows
    words = filter_of(some, group_rows)
    assert len(words) == n_words * (groups[-1] + 1)
    assert passes(words[filter_words(some, groups * n_words, n_words)], some).all()


@pytest.mark.parametrize("shift", [0, 40])
def test_of_keys_that_are_not_in_its_group_a_filter_stops_nearly_all(shift: int) -> None:
    """Also where they differ in their upper bits alone, or side by side."""
    keys = np.random.default_rng(1).permutation(np.arange(1 << 17, dtype=np.uint64)) << np.uint64(shift)
    words = filter_of(keys[: 1 << 16], 64)
    at = filter_words(keys[1 << 16 :], np.arange(1 << 16) // 64 * 8, 8)
    assert 0.02 < passes(words[at], keys[1 << 16 :]).mean() < 0.05


@given(st.lists(st.integers(0, 2**64 - 1)), st.integers(8, 256))
def test_every_id_that_was_added_passes(ids: list[int], size_bytes: int) -> None:
    some = IdFilter(size_bytes)
    for at in range(0, len(ids), 7):
        some.add(u64(ids[at : at + 7]))
    assert some.may_have(u64(ids)).all()
    assert some.n_added <= len(ids)


@pytest.mark.parametrize("shift", [0, 16, 40])
def test_of_ids_that_were_not_added_two_bytes_each_stop_more_than_98_in_100(shift: int) -> None:
    ids = np.arange(1 << 20, dtype=np.uint64) << np.uint64(shift)
    some = IdFilter(2 * (1 << 19))
    keys = mix64(ids)
    some.add(keys[::2])
    assert abs(some.n_added - (1 << 19)) < (1 << 19) // 100
    assert some.may_have(keys[1::2]).mean() < 0.02
