"""Write-behind on storage in memory: rows are written late, never wrongly, and never needed by anybody before they are."""

import numpy as np
import pytest
from memory_store import MemoryStore, memory_node

from kvemb.errors import FencedError, NodeUnavailableError, StorageError
from kvemb.index import record_cache
from kvemb.net.deadline import Deadline
from kvemb.schema.record import make_version
from kvemb.stores.row_io import WritePart, WriteResult
from paramserver.engine.write_behind import Bound
from paramserver.model.batch import APPLY, ASSIGN, ERASE, Batch
from tests.unit.mortal_shard import (
    EPOCH,
    Saved,
    drawn_batch,
    journal_of,
)
from tests.unit.test_ps_write_behind_crashes import BehindLife
from tests.unit.write_behind_shard import (
    ADAM,
    FOREVER,
    Faulty,
    Shard,
    Spoil,
    batch,
    delete,
    half_answered,
    make_store,
    never,
    put,
    read,
    shard,
    unanswered,
)

__all__ = ["shard"]  # the fixture

# --- storage that fails --------------------------------------------------------------------------------------------------------


# --- what is written when ------------------------------------------------------------------------------------------------------


def test_cold_rows_are_written_at_once_and_hot_ones_are_not(shard: Shard) -> None:
    shard.run([2, 3, 4, 5])
    assert shard.k_of([0, 1, 2, 3, 4, 5]) == [1, 1, 1, 1, 2, 2]
    assert (shard.store.n_written, shard.behind.n_rows) == (6, 2)
    shard.engine.write_dirty(never)
    assert shard.k_of([0, 1, 2, 3, 4, 5]) == [1, 1, 2, 2, 2, 2]
    assert (shard.store.n_written, shard.store.n_writes, shard.behind.n_rows) == (8, 3, 0)


def test_rows_that_every_batch_changes_are_written_once_for_all_of_them() -> None:
    shard, plain = Shard(Bound(3, 1e6)), Shard(None)
    for one in (shard, plain):
        for _ in range(9):  # the first creates, batches 2 to 5 and 6 to 9 are written together
            one.run([0, 1, 2, 3])
    assert (shard.store.n_written, plain.store.n_written) == (12, 36)
    assert shard.k_of([0, 3]) == [9, 9]
    assert shard.records([0, 1, 2, 3]).tobytes() == plain.records([0, 1, 2, 3]).tobytes()


def test_the_oldest_row_decides(shard: Shard) -> None:
    shard.behind._bound = Bound(10, 2.0)
    assert shard.behind.due_in_s() is None
    shard.run([0])
    shard.now_s = 1.5
    shard.run([1])
    assert shard.behind.due_in_s() == 0.5
    assert not shard.behind.due(shard.engine.k)
    shard.now_s = 2.0
    assert shard.behind.due(shard.engine.k)
    shard.run([2])
    assert shard.k_of([0, 1, 2, 3]) == [2, 3, 4, 1]
    assert shard.behind.due_in_s() is None


def test_a_row_may_be_asked_for(shard: Shard) -> None:
    shard.run([0])
    assert shard.behind.owes(2)
    assert not shard.behind.owes(1)
    shard.behind.ask()
    assert shard.woken.is_set()
    assert shard.behind.due_in_s() == 0
    shard.engine.write_dirty(never)
    assert not shard.behind.owes(2)
    shard.run([0])
    assert shard.behind.due_in_s() == FOREVER.age_s


@pytest.mark.parametrize("kind", [ASSIGN, ERASE])
def test_an_assign_or_erase_finds_everything_written(kind: str, shard: Shard) -> None:
    shard.run([0, 1, 2])
    shard.run([1], kind)
    assert shard.behind.n_rows == 0
    assert shard.k_of([0, 1, 2, 3]) == [2, 3 if kind == ASSIGN else 0, 2, 1]


def test_a_step_without_rows_leaves_dirty_rows_alone(shard: Shard) -> None:
    shard.run([0])
    shard.engine.run(Batch(ERASE, ()), make_version(1, 3), never)
    shard.run([])
    assert (shard.engine.k, shard.behind.n_rows, shard.k_of([0])) == (4, 1, [1])


def test_replay_writes_every_row_at_once() -> None:
    entries = journal_of([drawn_batch(APPLY, {"momentum": {0, 1}}, seed) for seed in range(4)])
    life = BehindLife(make_store(), Saved(), epoch=EPOCH + 1, cache_bytes=1 << 20, bound=FOREVER)
    life.recover(entries)
    assert life.engine.behind is not None
    assert life.engine.behind.n_rows == 0


# --- room in the cache ---------------------------------------------------------------------------------------------------------


def test_dirty_rows_keep_their_place_when_the_cache_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_cache, "MIN_ROWS", 4)
    shard = Shard(cache_bytes=1)
    shard.run([0, 1, 2, 3])
    shard.run([0, 1, 2])
    expected = shard.records([0, 1, 2]).tobytes()
    for first in range(10, 100, 5):
        shard.run(list(range(first, first + 5)))
    cache = shard.tables.state(ADAM).cache
    assert (cache.find(np.array([0, 1, 2], np.uint64)) >= 0).all()
    assert shard.records([0, 1, 2]).tobytes() == expected
    shard.run([0, 3])  # 3 was given up, 0 is as it was
    shard.run([3])
    shard.run([99])
    shard.engine.write_dirty(never)
    assert read(shard.store, ADAM, np.array([0, 1, 2], np.uint64))[2].tobytes() == shard.records([0, 1, 2]).tobytes()


def test_more_bytes_than_one_write_takes_are_written_in_several(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.engine.write_behind._WRITE_BYTES", 2 * ADAM.record.size_bytes)
    shard.run([0, 1, 2])
    shard.engine.write_dirty(never)
    assert shard.k_of([0, 1, 2, 3]) == [2, 2, 2, 1]
    assert shard.store.n_writes == 3


# --- storage fails -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", [unanswered, half_answered])
def test_a_write_without_an_answer_is_tried_again_until_all_is_there(spoil: Spoil, shard: Shard) -> None:
    shard.run([0, 1, 2, 3])
    expected, pauses = shard.records([0, 1, 2, 3]).tobytes(), []
    shard.store.spoil = spoil
    shard.engine.write_dirty(lambda error, pause_s: pauses.append(pause_s))
    assert pauses == [0.05]
    assert shard.behind.n_rows == 0
    assert shard.store.n_written == 12, "by the first batch, without an answer, and again; what had arrived is recognized then"
    assert read(shard.store, ADAM, np.arange(4, dtype=np.uint64))[2].tobytes() == expected
    shard.run([0, 1])  # the tokens are right again
    shard.engine.write_dirty(never)
    assert shard.k_of([0, 1, 2, 3]) == [3, 3, 2, 2]


@pytest.mark.parametrize("spoil", [unanswered, half_answered])
def test_a_batch_that_fails_does_not_lose_the_dirty_rows_it_names(spoil: Spoil, shard: Shard) -> None:
    shard.run([0, 1, 2])
    shard.store.spoil = spoil
    errors: list[StorageError] = []
    version = make_version(1, 3)
    shard.engine.run(batch(APPLY, [0, 1, 10, 11]), version, lambda error, pause_s: errors.append(error))
    assert len(errors) == 1
    assert shard.behind.n_rows == 3
    plain = Shard(None)
    for ids in ([0, 1, 2, 3], [0, 1, 2], [0, 1, 10, 11]):
        plain.run(ids)
    every = [0, 1, 2, 3, 10, 11]
    shard.engine.write_dirty(never)
    assert read(shard.store, ADAM, np.array(every, np.uint64))[2].tobytes() == plain.records(every).tobytes()


def test_a_batch_that_is_given_up_leaves_clean_rows_clean(shard: Shard) -> None:
    shard.run([0])
    shard.store.spoil = unanswered
    with pytest.raises(NodeUnavailableError):
        shard.run([0, 1, 10])
    assert shard.behind.n_rows == 1


def test_rows_stay_dirty_when_writing_is_given_up(shard: Shard) -> None:
    shard.run([0])
    for node in map(memory_node, shard.store.addresses):
        node.down = True
    with pytest.raises(NodeUnavailableError):
        shard.engine.write_dirty(never)
    assert (shard.behind.n_rows, shard.behind.owes(2)) == (1, True)
    for node in map(memory_node, shard.store.addresses):
        node.down = False
    shard.engine.write_dirty(never)
    assert shard.k_of([0]) == [2]


def test_what_stands_in_the_way_is_written_over_unless_it_is_of_a_later_epoch(shard: Shard) -> None:
    shard.run([0, 1])
    expected = shard.records([0, 1])
    put(shard.store, 0, 1)
    delete(shard.store, 1)
    shard.engine.write_dirty(never)
    assert read(shard.store, ADAM, np.arange(2, dtype=np.uint64))[2].tobytes() == expected.tobytes()
    shard.run([0, 1])
    put(shard.store, 1, make_version(2, 1))
    with pytest.raises(FencedError, match=r"id 1: version \(2, 1\) in storage is of a later epoch than ours \(1\)"):
        shard.engine.write_dirty(never)


def test_rows_that_never_cease_to_change_end_the_shard(shard: Shard) -> None:
    shard.run([0])

    def meddled(store: Faulty, parts: list[WritePart]) -> list[WriteResult]:
        put(store, 0, 1)
        store.spoil = meddled
        return MemoryStore.write(store, parts, Deadline.after(5))

    shard.store.spoil = meddled
    with pytest.raises(StorageError, match="1 rows were changed between every read and write of 16 tries"):
        shard.engine.write_dirty(never)
