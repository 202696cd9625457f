"""The row index behaves as a dict of id to version, whatever the order of puts, erases and rebuilds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paramserver.index import RowIndex

IDS = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1))
STEP = st.tuples(st.sampled_from(["put", "erase"]), st.lists(IDS, unique=True, max_size=30))


def u64(values: object) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@given(st.lists(STEP, max_size=30), st.integers(0, 2**64 - 1), st.booleans(), st.integers(1, 20))
def test_an_index_is_a_dict(steps: list[tuple[str, list[int]]], after: int, first: bool, limit: int) -> None:
    index, model = RowIndex(), {}
    for number, (verb, ids) in enumerate(steps, start=1):
        if verb == "put":
            versions = [number * 1000 + place for place in range(len(ids))]
            index.put(u64(ids), u64(versions))
            model.update(zip(ids, versions, strict=True))
        else:
            assert index.erase(u64(ids)) == sum(model.pop(row, None) is not None for row in ids)
        seen = sorted({row for _, batch in steps for row in batch})
        assert index.get(u64(seen)).tolist() == [model.get(row, 0) for row in seen]
        assert len(index) == len(model)
    found, versions = index.arrays()
    assert dict(zip(found.tolist(), versions.tolist(), strict=True)) == model
    expected = sorted(row for row in model if row > after or (first and row == after))[:limit]
    assert index.sorted_ids(after, first, limit).tolist() == expected


def test_growth_keeps_every_row() -> None:
    index, ids = RowIndex(), np.random.default_rng(5).permutation(50_000).astype(np.uint64) * np.uint64(2**40)
    for start in range(0, len(ids), 777):
        index.put(ids[start : start + 777], ids[start : start + 777] + np.uint64(1))
    assert len(index) == 50_000
    assert (index.get(ids) == ids + np.uint64(1)).all()
    assert not index.get(ids + np.uint64(1)).any()
    assert index.size_bytes <= 16 * 2**17


def test_erased_places_are_used_again() -> None:
    index = RowIndex()
    for round_ in range(50):
        ids = np.arange(600, dtype=np.uint64) + np.uint64(1000 * round_)
        index.put(ids, ids + np.uint64(1))
        assert index.erase(ids) == 600
    assert len(index) == 0
    assert index.size_bytes <= 16 * 2**11


@pytest.mark.parametrize("bad", [0, 2**64 - 1])
def test_versions_that_mean_empty_or_erased_are_never_stored(bad: int) -> None:
    with pytest.raises(AssertionError):
        RowIndex().put(u64([1]), u64([bad]))


def test_ids_of_one_shard_do_not_cluster() -> None:
    """Routing and the index must not use the same bits: with the ids of one of 64 shards, lookups would take thousands of rounds."""
    from kvemb.hashing import shard_of

    ids = np.arange(1 << 20, dtype=np.uint64)
    ids = ids[shard_of(ids, 64) == 3]
    index = RowIndex()
    index.put(ids, ids + np.uint64(1))
    home = index._home(ids)
    assert len(np.unique(home)) > 0.6 * len(ids)
