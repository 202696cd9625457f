"""Unique ids: right for every mix of duplicates, hashes that collide included."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvemb.arrays.ids
from kvemb.arrays.ids import unique


def require_unique(ids: NDArray[np.uint64]) -> None:
    before = ids.copy()
    found = unique(ids)
    inverse = np.arange(len(ids)) if found.inverse is None else found.inverse
    assert len(found.ids) == len(np.unique(ids))
    assert np.array_equal(found.ids[inverse], ids)
    assert np.array_equal(ids, before)


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 9), max_size=60))
def test_few_ids_are_sorted(ids: list[int]) -> None:
    require_unique(np.array(ids, np.uint64))


@pytest.mark.parametrize("n_ids", [1, 7, 5000, 10**7])
@pytest.mark.parametrize("n", [2047, 2048, 30_000])
def test_many_ids_are_hashed(n: int, n_ids: int) -> None:
    rng = np.random.default_rng(n_ids)
    require_unique(rng.integers(0, n_ids, n).astype(np.uint64))
    require_unique(rng.integers(0, n_ids, n).astype(np.uint64) << np.uint64(40))


@given(st.data())
def test_hashing_is_right_for_small_batches_too(data: st.DataObject) -> None:
    ids = np.array(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=60)), np.uint64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvemb.arrays.ids, "_HASH_FROM", 1)
        require_unique(ids)


def test_ids_that_collide_in_every_hash_are_sorted_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvemb.arrays.ids, "_FACTORS", (np.uint64(1), np.uint64(3)))  # small ids then all share a place
    require_unique(np.random.default_rng(0).integers(0, 3000, 5000).astype(np.uint64))


def test_unique_ids_come_back_as_they_are() -> None:
    ids = np.random.default_rng(0).permutation(5000).astype(np.uint64)
    found = unique(ids)
    assert found.inverse is None
    assert found.ids is ids
