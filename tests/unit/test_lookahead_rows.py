"""The rows of a batch: each id pulled once, each lookup its own rows; and what each consistency makes of them."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb import init, optim
from kvemb.errors import NodeUnavailableError
from kvemb.schema.table_def import TableDef
from trainer.lookahead.consistency import Bounded, Consistency, Exact, behind
from trainer.lookahead.pool_sizes import Sizes
from trainer.lookahead.rows_ahead import RowsAhead, prefetched_of_all
from trainer.report.step_report import StalenessLog

ids_of = st.lists(st.integers(0, 20), max_size=30).map(lambda ids: np.array(ids, np.uint64))


def table(name: str, id_dtype: str = "int64") -> Any:
    return SimpleNamespace(name=name, definition=TableDef(name, 2, optim.sgd(0.1), init.zeros(), id_dtype=id_dtype))


def test_equal_ids_of_several_tables_are_made_unique_once_wherever_they_lie() -> None:
    ids = np.array([7, 3, 7], np.uint64)
    others = np.array([7, 5, 7], np.uint64)  # which begin and end alike
    rows = RowsAhead([(table("a"), ids), (table("b"), ids.copy()), (table("c"), others)])
    rows.pull(Storage())
    a, b, c = (rows.by_table[name][0].found for name in "abc")
    assert a.ids is b.ids
    assert a.inverse is b.inverse
    assert c.ids.tolist() == [5, 7]


class Storage:
    """Row i is [i, i], at version `version`; tells the ids that it was asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.waited: list[bool] = []
        self.version = 1
        self.failure: Exception | None = None
        self.progress_now = [(1, 0)]

    def pull_versions(self, ids: Mapping[str, Any], *, stored: bool = True) -> dict[str, Any]:
        self.asked.append(dict(ids))
        self.waited.append(stored)
        if self.failure is not None:
            raise self.failure
        return {
            name: (np.repeat(of.astype(np.float32)[:, None], 2, axis=1), np.full(len(of), self.version, np.uint64))
            for name, of in ids.items()
        }

    def progress(self) -> list[tuple[int, int]]:
        return self.progress_now


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), ids_of), max_size=6))
def test_every_lookup_finds_its_own_rows_and_no_id_is_pulled_twice(lookups: list[tuple[str, Any]]) -> None:
    tables = {name: table(name) for name in "ab"}
    storage, rows = Storage(), RowsAhead([(tables[name], ids) for name, ids in lookups])
    rows.pull(storage)
    assert len(storage.asked) == bool(lookups)
    for asked in storage.asked:
        for ids in asked.values():
            assert ids.dtype == np.int64
            assert len(np.unique(ids)) == len(ids)
    for name in {name for name, _ in lookups}:
        expected = [ids for other, ids in lookups if other == name]
        for ids, ahead in zip(expected, rows.by_table[name], strict=True):
            found = ahead.found
            assert np.array_equal(ahead.asked, ids)
            assert np.array_equal(found.ids[found.inverse], ids)
            assert np.array_equal(found.rows[found.inverse][:, 0], ids.astype(np.float32))
            assert np.array_equal(found.ids, np.unique(ids)), "distinct, ascending, and no others"


def test_ids_are_copied_and_those_of_one_memory_are_one_copy() -> None:
    ids = np.array([3, 1, 3], np.uint64)
    rows = RowsAhead([(table("a"), ids), (table("b"), ids)])
    ids[:] = 9
    storage = Storage()
    rows.pull(storage)
    assert storage.asked[0]["a"].tolist() == [1, 3]
    assert storage.asked[0]["a"].base is storage.asked[0]["b"].base
    assert rows.by_table["a"][0].asked is rows.by_table["b"][0].asked


def test_changed_rows_take_the_place_of_those_held_in_every_lookup() -> None:
    rows = RowsAhead([(table("a"), np.array([5, 1], np.uint64)), (table("a"), np.array([5, 7], np.uint64))])
    rows.pull(Storage())
    changed = np.array([7, 5, 99], np.uint64), np.array([[70, 70], [50, 50], [9, 9]], np.float32), np.array([4, 4, 4], np.uint64)
    rows.change({"a": changed, "other": changed})
    first, second = (ahead.found for ahead in rows.by_table["a"])
    assert (first.rows[:, 0].tolist(), first.versions.tolist()) == ([1, 50], [1, 4])
    assert (second.rows[:, 0].tolist(), second.versions.tolist()) == ([50, 70], [4, 4])
    ids, versions = rows.prefetched()["a"]
    assert (ids.tolist(), versions.tolist()) == ([1, 5, 7], [1, 4, 4])


def test_a_row_that_batches_hold_in_different_versions_is_registered_with_none() -> None:
    storage, batches = Storage(), [RowsAhead([(table("a", "uint64"), np.array(ids, np.uint64))]) for ids in ([1, 2], [2, 3], [4])]
    for storage.version, batch in enumerate(batches, start=6):
        batch.pull(storage)
    ids, versions = prefetched_of_all(batches)["a"]
    assert ids.dtype == np.uint64
    assert (ids.tolist(), versions.tolist()) == ([1, 2, 3, 4], [6, 2**64 - 1, 7, 8])
    assert prefetched_of_all([]) == {}


def batch() -> RowsAhead:
    return RowsAhead([(table("a"), np.array([1, 2], np.uint64))])


def test_stale_rows_are_used_as_they_are() -> None:
    storage, rows = Storage(), batch()
    stale = Consistency(storage)
    stale.pull(rows)
    stale.use(rows)
    assert (len(storage.asked), stale.hold([rows])) == (1, None)


@pytest.mark.parametrize(("now", "pulls"), [([(1, 12), (1, 5)], 1), ([(1, 13), (1, 5)], 2), ([(1, 10), (1, 9)], 2), ([(2, 10), (1, 5)], 2)])
def test_bounded_pulls_again_what_a_shard_has_left_behind(now: list[tuple[int, int]], pulls: int) -> None:
    storage, rows = Storage(), batch()
    bounded = Bounded(storage, k=2)
    storage.progress_now = [(1, 10), (1, 5)]
    bounded.pull(rows)
    storage.progress_now = now
    bounded.use(rows)
    assert len(storage.asked) == pulls
    assert behind(rows.as_of, now) <= 2
    assert f"the rows of {pulls - 1} of 1 batches" in str(bounded)


class Job:
    """A sync job as `Exact` sees it."""

    def __init__(self) -> None:
        self.state = self.changes = 0
        self.storage = Storage()
        self.all_stored = True
        self.exact = Exact(self.storage, lambda: self.state, lambda: self.changes, lambda: self.all_stored)

    def begin_step(self, *coming: RowsAhead) -> Any:
        self.state += 1 + self.state % 2
        prefetched = self.exact.hold(coming)
        self.changes += 1
        return prefetched

    def end_step(self, changed: Any) -> None:
        self.changes += 1
        self.state += 1
        self.exact.released(changed)

    @property
    def n_pulls(self) -> int:
        return len(self.storage.asked)


CHANGED = {"a": (np.array([2], np.uint64), np.full((1, 2), 8, np.float32), np.array([3], np.uint64))}


def test_exact_uses_what_was_pulled_between_steps_or_brought_up_to_date() -> None:
    job = Job()
    prefetched, not_prefetched = batch(), batch()
    for rows in (prefetched, not_prefetched):
        job.exact.pull(rows)
        job.exact.use(rows)
    assert job.n_pulls == 2, "pulled since the last release"
    registered = job.begin_step(prefetched)
    assert registered["a"][0].tolist() == [1, 2]
    in_step = batch()
    job.exact.pull(in_step)
    job.end_step(CHANGED)
    job.exact.use(prefetched)
    assert job.n_pulls == 3
    assert prefetched.by_table["a"][0].found.rows[:, 0].tolist() == [1, 8]
    for rows in (not_prefetched, in_step):
        job.exact.use(rows)
    assert job.n_pulls == 5


def test_exact_pulls_again_when_the_shards_could_not_say_or_the_step_failed() -> None:
    job = Job()
    rows = batch()
    job.exact.pull(rows)
    job.begin_step(rows)
    job.end_step(None)
    job.exact.use(rows)
    assert job.n_pulls == 2
    job.begin_step(rows)  # a step that never ends
    job.exact.use(rows)
    job.exact.use(rows)
    assert job.n_pulls == 4, "whenever it is looked at, it may have changed"


def test_exact_pulls_again_when_this_connection_changed_rows_otherwise() -> None:
    job = Job()
    rows = batch()
    job.exact.pull(rows)
    job.changes += 2  # an assign
    assert not job.exact.fit(rows)
    job.exact.use(rows)
    assert job.exact.fit(rows)
    assert job.n_pulls == 2
    job.begin_step(rows)
    job.changes += 1  # a push of another thread
    job.end_step(CHANGED)
    job.exact.use(rows)
    assert job.n_pulls == 3
    job.begin_step(rows)
    job.end_step(CHANGED)
    job.exact.use(rows)
    assert job.n_pulls == 3


def test_rows_pulled_while_storage_lacks_a_step_are_exact_only_once_they_were_registered() -> None:
    job = Job()
    registered, unregistered = batch(), batch()
    job.all_stored = False  # a step was released and is on its way to storage
    for rows in (registered, unregistered):
        job.exact.pull(rows)
        assert not job.exact.fit(rows)
    assert job.storage.waited == [False, False], "pulls ahead do not wait for it"
    job.begin_step(registered)
    job.end_step(CHANGED)
    job.exact.use(registered)
    assert job.n_pulls == 2
    assert registered.by_table["a"][0].found.rows[:, 0].tolist() == [1, 8]
    job.exact.use(unregistered)
    assert job.storage.waited[2:] == [True], "what is used at once waits for storage"
    assert job.exact.fit(unregistered)


def test_a_pull_ahead_that_fails_is_made_again_when_its_batch_comes() -> None:
    job = Job()
    rows = batch()
    job.storage.failure = NodeUnavailableError("away")
    job.exact.pull(rows)
    assert not rows.pulled
    assert job.begin_step(rows) == {}, "nothing is prefetched"
    job.end_step({})
    with pytest.raises(NodeUnavailableError, match="away"):
        job.exact.use(rows)
    job.storage.failure = None
    job.exact.use(rows)
    assert job.exact.fit(rows)
    assert rows.by_table["a"][0].found.rows[:, 0].tolist() == [1, 2]


def test_staleness_is_told_as_acks_settle() -> None:
    log = StalenessLog()
    acks = [SimpleNamespace(staleness=None) for _ in range(3)]
    for ack in acks:
        log.add(ack)
    assert (log.last, log.mean.n, str(log.mean)) == (None, 0, "not measured yet")
    acks[0].staleness = SimpleNamespace(changed_fraction=0.5, batches_elapsed=4)
    acks[2].staleness = SimpleNamespace(changed_fraction=0.0, batches_elapsed=1)
    assert log.last is acks[2].staleness
    assert (log.mean.changed_fraction, log.mean.batches_elapsed, log.mean.most_elapsed, log.mean.n) == (0.25, 2.5, 4, 2)


def test_sizes_say_what_was_told_and_what_was_chosen() -> None:
    assert str(Sizes(3, "auto")) == "threads_num 3, capacity 4 (auto)"
