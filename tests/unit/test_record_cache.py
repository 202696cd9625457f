"""The cache of records: a record that it gives back is always the last one put, however little room it has."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvemb.arrays import record_cache
from kvemb.arrays.record_cache import MIN_ROWS, CacheBudget, RecordCache
from tests.matrix import examples

SIZE = 12


def ids_of(values: list[int]) -> np.ndarray:
    return np.array(values, np.uint64)


def records_for(ids: np.ndarray, stamp: int) -> np.ndarray:
    """A record that tells its id and when it was put."""
    out = np.zeros((len(ids), SIZE), np.uint8)
    out[:, :8] = ids.view(np.uint8).reshape(-1, 8)
    out[:, 8:] = np.array([stamp], np.uint32).view(np.uint8)
    return out


operation = st.tuples(st.sampled_from(["put", "put", "put found", "find", "forget"]), st.sets(st.integers(0, 60), min_size=1, max_size=25))


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(operation, max_size=40), st.integers(1, 40))
def test_a_row_that_is_found_is_the_row_last_put(operations: list[tuple[str, set[int]]], room: int) -> None:
    before, record_cache.MIN_ROWS = record_cache.MIN_ROWS, room
    try:
        budget = CacheBudget(1)
        cache = RecordCache(SIZE, budget)
        latest: dict[int, int] = {}
        for stamp, (kind, chosen) in enumerate(operations, start=1):
            ids = ids_of(sorted(chosen))
            if kind.startswith("put"):
                found = cache.find(ids) if kind == "put found" else None
                cache.put(ids, records_for(ids, stamp), ids + np.uint64(stamp), found)
                latest |= dict.fromkeys(chosen, stamp)
            elif kind == "forget":
                cache.forget(ids)
                assert (cache.find(ids) == -1).all()
            at = cache.find(ids_of(list(range(61))))
            assert (at >= 0).sum() <= room
            for row in np.flatnonzero(at >= 0):
                expected = records_for(ids_of([int(row)]), latest[int(row)])[0]
                np.testing.assert_array_equal(cache.records[at[row]], expected)
                assert cache.tokens[at[row]] == row + latest[int(row)]
            if kind.startswith("put"):
                assert (at >= 0).sum() >= min(len(chosen), room)
    finally:
        record_cache.MIN_ROWS = before


def test_rows_in_use_outlive_rows_that_are_not() -> None:
    cache = RecordCache(SIZE, CacheBudget(1))  # room for MIN_ROWS
    hot = ids_of(list(range(100)))
    cache.put(hot, records_for(hot, 1), None)
    for start in range(1000, 1000 + 20 * MIN_ROWS, 300):
        cold = ids_of(list(range(start, start + 300)))
        cache.put(cold, records_for(cold, 1), None)
        cache.find(hot)
    assert (cache.find(hot) >= 0).all()


def test_tables_share_one_budget_and_each_keeps_a_little() -> None:
    budget = CacheBudget(4 * MIN_ROWS * (SIZE + 48))
    first, second = RecordCache(SIZE, budget), RecordCache(SIZE, budget)
    many = ids_of(list(range(10 * MIN_ROWS)))
    first.put(many, records_for(many, 1), None)
    second.put(many, records_for(many, 1), None)
    assert (first.find(many) >= 0).sum() == 4 * MIN_ROWS
    assert (second.find(many) >= 0).sum() == MIN_ROWS
    assert budget.used_bytes == 5 * MIN_ROWS * (SIZE + 48)


def test_no_budget_keeps_nothing_and_counts_no_hits() -> None:
    budget = CacheBudget(0)
    cache = RecordCache(SIZE, budget)
    cache.put(ids_of([1]), records_for(ids_of([1]), 1), None)
    assert cache.find(ids_of([1])).tolist() == [-1]
    assert (budget.n_lookups, budget.n_hits) == (1, 0)


def test_tokens_are_forgotten_and_the_rows_are_kept() -> None:
    cache, ids = RecordCache(SIZE, CacheBudget(1 << 20)), ids_of([1, 2, 3])
    cache.put(ids, records_for(ids, 1), ids + np.uint64(1000))
    cache.forget_tokens(lambda held: held == 2)
    at = cache.find(ids)
    assert cache.tokens[at].tolist() == [1001, 0, 1003]
    np.testing.assert_array_equal(cache.records[at], records_for(ids, 1))
