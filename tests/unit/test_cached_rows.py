"""Rows in a serving client's cache: none gives way to an older one, and what the feed tells is never missed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvemb.arrays.hashing import mix64
from kvemb.init import zeros
from kvemb.optim import sgd
from kvemb.schema.table_def import TableDef
from kvemb.serve import ServedFrom
from kvemb.serve.cached_rows import CachedRows
from kvemb.serve.served_tables import RowsFound, ServedTables

F4 = np.dtype(np.float32)


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def key(row_id: int) -> np.ndarray:
    return mix64(u64(row_id))


def cache() -> CachedRows:
    return CachedRows(1, F4, 1 << 20)


def put(rows: CachedRows, version: int, *, began_s: float, answered_s: float, seen: int | None = None, row_id: int = 7) -> int:
    """Put a row whose weight is its version; return the version that the look-up answers with."""
    weights, versions = np.full((1, 1), version, np.float32), u64(version)
    seen = rows.n_changes if seen is None else seen
    rows.put(key(row_id), weights, versions, began_s=began_s, answered_s=answered_s, seen=seen)
    assert weights[0, 0] == versions[0]
    return int(versions[0])


def kept(rows: CachedRows, not_before_s: float = 0.0, row_id: int = 7) -> tuple[int, bool]:
    """The version that is kept, -1 for none, and whether it is good."""
    records, there = rows.peek(key(row_id))
    return (int(rows.versions(records)[0]) if there[0] else -1), bool(rows.find(key(row_id), not_before_s)[1][0])


def test_a_pull_that_was_overtaken_does_not_bring_an_older_row_back() -> None:
    rows = cache()
    assert put(rows, 6, began_s=2, answered_s=3) == 6
    assert put(rows, 5, began_s=1, answered_s=4) == 6
    assert kept(rows) == (6, True)


def test_a_change_that_is_told_while_a_row_is_on_its_way_makes_it_old() -> None:
    rows = cache()
    seen = rows.n_changes
    rows.tell(key(7), u64(6))
    put(rows, 5, began_s=1, answered_s=2, seen=seen)
    assert kept(rows) == (5, False)
    put(rows, 6, began_s=3, answered_s=4)
    assert kept(rows) == (6, True)


def test_a_change_that_the_row_has_already_leaves_it_good_and_a_later_one_makes_it_old() -> None:
    rows = cache()
    put(rows, 6, began_s=1, answered_s=2)
    rows.tell(key(7), u64(6))
    assert kept(rows) == (6, True)
    rows.tell(key(8), u64(9))
    assert kept(rows) == (6, True)
    rows.tell(key(7), u64(7))
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
    rows, ids, now_s = cache(), mix64(np.arange(10, dtype=np.uint64)), 0.0
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
        records, there = rows.peek(ids)
        _, good = rows.find(ids, 0.0)
        assert there[0] or not good.any()
        if there[0]:
            versions = rows.versions(records)
            assert (versions >= shown).all()
            assert (rows.rows(records)[:, 0] == versions).all()
            assert (versions >= told_of)[good].all(), "a change that was told is missed by a row that is good"
            shown = versions


def test_of_eight_places_the_one_used_longest_ago_is_given_up_and_the_key_0_is_kept_like_any_other() -> None:
    rows = CachedRows(1, F4, 0)
    assert not rows.peek(u64(0))[1].any()  # though a place that was never used looks like it
    for at in range(8):  # all in one set
        rows.put(u64(at), np.full((1, 1), at, np.float32), u64(at + 1), began_s=1, answered_s=2, seen=0)
    assert rows.find(np.array([0, 1, 2, 4, 5, 6, 7], np.uint64), 0.0)[1].all()
    rows.put(u64(8), np.full((1, 1), 8, np.float32), u64(9), began_s=1, answered_s=2, seen=0)
    records, there = rows.peek(np.arange(9, dtype=np.uint64))
    assert there.tolist() == [True] * 3 + [False] + [True] * 5
    assert rows.rows(records[there])[:, 0].tolist() == [0, 1, 2, 4, 5, 6, 7, 8]


def test_in_a_degraded_answer_an_id_that_had_no_row_once_has_none_of_the_cache_and_rows_have_the_old_ones() -> None:
    tables = ServedTables(1, 0, max_age_s=0)
    served = tables.add(TableDef("t", dim=1, optimizer=sgd(lr=1.0), initializer=zeros()))

    def asked() -> RowsFound:
        ids = u64(1, 2)
        return RowsFound(served, ids, mix64(ids), np.full((2, 1), np.nan, F4), u64(0, 0), np.zeros(2, np.uint8), left=np.arange(2))

    tables.keep(asked(), u64(1, 2), np.array([[5], [0]], F4), u64(3, 0), began_s=1)  # 1 has a row, 2 has none yet
    found = asked()
    tables.find_old(found, 9)
    assert (found.left.tolist(), found.rows[0, 0], found.sources.tolist()) == ([1], 5, [ServedFrom.OLD, 0])
