"""A table's state: a batch's rows are looked up in the index once, and the kept places are never out of date."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvemb.arrays import row_index
from kvemb.arrays.hash_probe import Homes, probe
from kvemb.arrays.record_cache import CacheBudget
from kvemb.errors import StorageError
from kvemb.schema.record import make_version
from paramserver.apply.applier import part_staleness
from paramserver.engine.engine import Engine
from paramserver.ingest.work_queue import merge_pushes
from paramserver.model.batch import APPLY, Batch, CheckedRows, PartTicket, Push, ReceivedPart
from paramserver.model.tables import Tables, TableState
from tests.unit.engine_storage import SGD, engine_on, make_store, rows


def u64(ids: Sequence[int]) -> np.ndarray:
    return np.array(ids, np.uint64)


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ids each look-up in an index was for."""
    counts: list[int] = []

    def counted(homes: Homes, tags: np.ndarray, pairs: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts.append(len(ids))
        return probe(homes, tags, pairs, ids)

    monkeypatch.setattr(row_index, "probe", counted)
    return counts


def apply(engine: Engine, *pushed: CheckedRows) -> tuple[float, int]:
    """Do what the apply thread does with one push."""
    part = ReceivedPart(pushed, PartTicket(1, 0, 0))
    push = Push("a", 1, 1, (part,))
    stale = part_staleness(part, engine._tables)
    engine.run(merge_pushes([push], sync=False), make_version(engine.epoch, engine.k + 1), lambda error, pause_s: None)
    return stale


def test_a_push_on_its_own_looks_its_rows_up_once(looked_up: list[int]) -> None:
    engine, pushed = engine_on(make_store()), rows(SGD, [1, 5, 9])
    seen = CheckedRows(SGD, pushed.ids, pushed.rows, u64([0, 0, 0]), pushed.hyper)
    assert apply(engine, seen) == (0.0, 0)
    looked_up.clear()
    assert apply(engine, seen) == (1.0, 1)
    cache_find = 1  # the cache has an index of its own
    assert looked_up == [3] * (1 + cache_find)


def test_rows_that_came_or_went_since_they_were_looked_up_are_noticed() -> None:
    table, ids = TableState(SGD), u64([3, 4])
    assert table.versions(ids, keep=True).tolist() == [0, 0]
    table.applied(u64([4, 5]), 7)
    assert table.versions(ids, keep=True).tolist() == [0, 7]
    assert table.erased(u64([4]), 8) == 1
    table.applied(ids, 8)
    assert table.versions(u64([3, 4, 5])).tolist() == [8, 8, 7]
    assert table.n_rows == 3


def test_rows_kept_of_a_batch_that_failed_are_not_taken_for_those_of_the_next() -> None:
    store = make_store()
    engine = engine_on(store)
    failed = rows(SGD, [1, 2])
    store.spoil = lambda parts: (_ for _ in ()).throw(StorageError("full"))
    with pytest.raises(StorageError):
        engine.run(Batch(APPLY, (failed,)), make_version(1, 1), lambda error, pause_s: None)
    apply(engine, rows(SGD, [2, 3]))
    assert engine._tables.state(SGD).versions(u64([1, 2, 3])).tolist() == [0, make_version(1, 1), make_version(1, 1)]
    engine.run(Batch(APPLY, (failed,)), make_version(1, 2), lambda error, pause_s: None)
    assert engine._tables.state(SGD).versions(u64([1, 2, 3])).tolist() == [make_version(1, 2), make_version(1, 2), make_version(1, 1)]


def test_what_is_kept_ends_with_its_batch() -> None:
    """The same array with other ids in it is another batch."""
    table, ids = TableState(SGD), u64([3, 4])
    table.versions(ids, keep=True)
    table.applied(ids, 7)
    ids += np.uint64(10)
    assert table.versions(ids, keep=True).tolist() == [0, 0]
    table.applied(ids, 8)
    assert table.versions(u64([3, 4, 13, 14])).tolist() == [7, 7, 8, 8]


def test_a_table_that_is_dropped_gives_its_share_of_the_cache_back() -> None:
    budget = CacheBudget(1 << 20)
    tables = Tables([], budget)
    tables.state(SGD).cache.put(u64([1, 2]), np.zeros((2, SGD.record.size_bytes), np.uint8), None)
    assert budget.used_bytes > 0
    tables.forget(SGD)
    assert budget.used_bytes == 0
