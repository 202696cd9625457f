"""Rows in a serving client's cache: none gives way to an older one, and what the feed tells is never missed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvemb.arrays.record_cache import CacheBudget
from kvemb.serve.cached_rows import CachedRows

F4 = np.dtype(np.float32)


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def cache() -> CachedRows:
    return CachedRows(1, F4, CacheBudget(1 << 20))


def put(rows: CachedRows, version: int, *, began_s: float, answered_s: float, seen: int | None = None, row_id: int = 7) -> int:
    """Put a row whose weight is its version; return the version that the look-up answers with."""
    weights, versions = np.full((1, 1), version, np.float32), u64(version)
    seen = rows.n_changes if seen is None else seen
    rows.put(u64(row_id), weights, versions, began_s=began_s, answered_s=answered_s, seen=seen)
    assert weights[0, 0] == versions[0]
    return int(versions[0])


def kept(rows: CachedRows, not_before_s: float = 0.0, row_id: int = 7) -> tuple[int, bool]:
    """The version that is kept, -1 for none, and whether it is good."""
    at = rows.peek(u64(row_id))
    return (int(rows.versions(at)[0]) if at[0] >= 0 else -1), bool(rows.find(u64(row_id), not_before_s)[1][0])


def test_a_pull_that_was_overtaken_does_not_bring_an_older_row_back() -> None:
    rows = cache()
    assert put(rows, 6, began_s=2, answered_s=3) == 6
    assert put(rows, 5, began_s=1, answered_s=4) == 6
    assert kept(rows) == (6, True)


def test_a_change_that_is_told_while_a_row_is_on_its_way_makes_it_old() -> None:
    rows = cache()
    seen = rows.n_changes
    rows.tell(u64(7), u64(6))
    put(rows, 5, began_s=1, answered_s=2, seen=seen)
    assert kept(rows) == (5, False)
    put(rows, 6, began_s=3, answered_s=4)
    assert kept(rows) == (6, True)


def test_a_change_that_the_row_has_already_leaves_it_good_and_a_later_one_makes_it_old() -> None:
    rows = cache()
    put(rows, 6, began_s=1, answered_s=2)
    rows.tell(u64(7), u64(6))
    assert kept(rows) == (6, True)
    rows.tell(u64(8), u64(9))
    assert kept(rows) == (6, True)
    rows.tell(u64(7), u64(7))
    assert kept(rows) == (6, False)


def test_of_a_row_and_its_absence_in_pulls_that_overlap_neither_is_believed() -> None:
    for first, second in ((5, 0), (0, 5)):
        rows = cache()
        put(rows, first, began_s=1, answered_s=3)
        assert put(rows, second, began_s=2, answered_s=4) == second
        assert kept(rows) == (first, False)
        put(rows, second, began_s=5, answered_s=6)
        assert kept(rows) == (second, True)


def test_a_row_is_good_until_its_age_and_after_a_load_no_row_is() -> None:
    rows = cache()
    put(rows, 5, began_s=1, answered_s=2)
    assert kept(rows, 2.0) == (5, True)
    assert kept(rows, 2.1) == (5, False)
    seen = rows.n_changes
    rows.tell_all()
    assert kept(rows) == (5, False)
    put(rows, 6, began_s=3, answered_s=4, seen=seen, row_id=8)
    assert kept(rows, row_id=8) == (6, False)


STEPS = st.lists(
    st.one_of(st.tuples(st.just("apply"), st.integers(0, 9)), st.tuples(st.sampled_from(["begin", "end", "tell"]), st.just(0))),
    min_size=8,
)


@given(STEPS)
def test_no_interleaving_of_pulls_and_changes_shows_a_row_going_back_or_good_when_it_is_not(steps: list[tuple[str, int]]) -> None:
    """Ten rows change in storage; two pulls of all of them may be on their way; changes are told in order, each some time after."""
    rows, ids, now_s = cache(), np.arange(10, dtype=np.uint64), 0.0
    stored, told, told_of = np.ones(10, np.uint64), list[tuple[int, int]](), np.ones(10, np.uint64)
    pulls: list[tuple[float, np.ndarray, int]] = []
    shown = np.zeros(10, np.uint64)
    for step, row in steps:
        now_s += 1.0
        if step == "apply":
            stored[row] += np.uint64(1)
            told.append((row, int(stored[row])))
        elif step == "begin" and len(pulls) < 2:
            pulls.append((now_s, stored.copy(), rows.n_changes))
        elif step == "end" and pulls:
            began_s, versions, seen = pulls.pop()
            weights = versions.astype(np.float32)[:, None]
            rows.put(ids, weights, versions, began_s=began_s, answered_s=now_s, seen=seen)
        elif step == "tell" and told:
            changed, version = told.pop(0)
            told_of[changed] = version
            rows.tell(ids[changed : changed + 1], u64(version))
        at = rows.peek(ids)
        _, good = rows.find(ids, 0.0)
        assert at[0] >= 0 or not good.any()
        if at[0] >= 0:
            versions = rows.versions(at)
            assert (versions >= shown).all()
            assert (rows.rows(at)[:, 0] == versions).all()
            assert (versions >= told_of)[good].all(), "a change that was told is missed by a row that is good"
            shown = versions
