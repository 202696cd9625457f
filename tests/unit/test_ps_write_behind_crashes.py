"""A shard that writes behind may die at any row write, and lags within its bound: rows end with the bits they have without it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore

from kvemb.index import record_cache
from paramserver.engine.write_behind import Bound, WriteBehind
from paramserver.journal import BatchEntry, Entry
from paramserver.model.batch import Batch
from tests.unit.lonely_engine import NO_REPAIR
from tests.unit.mortal_shard import (
    BATCHES,
    EPOCH,
    IDS,
    PIECES,
    TABLES,
    KilledError,
    Life,
    MortalStore,
    Saved,
    cut_at,
    journal_of,
    known,
    live_on,
    stored,
)
from tests.unit.write_behind_shard import FOREVER, Faulty, half_answered, make_store, never, patient, read, unanswered


class BehindLife(Life):
    """A life that writes behind."""

    def __init__(self, store: MortalStore, saved: Saved, *, epoch: int, cache_bytes: int, bound: Bound) -> None:
        super().__init__(
            store,
            saved,
            epoch=epoch,
            cache_bytes=cache_bytes,
            behind=lambda tables: WriteBehind(store, tables, bound, epoch=epoch, timeout_s=5, repair=NO_REPAIR, wake=lambda: None),
        )

    def save(self) -> Saved:
        self.engine.write_dirty(never)
        return super().save()


@settings(max_examples=200, deadline=None)
@given(BATCHES, PIECES, st.data())
def test_rows_end_with_the_bits_they_have_without_it_whenever_the_shard_dies(
    batches: list[Batch], most_bytes: int, data: st.DataObject
) -> None:
    entries = journal_of(batches)
    whole = make_store()
    undisturbed = Life(whole, Saved(), epoch=EPOCH, cache_bytes=0)
    live_on(undisturbed, entries)

    store, room, before = make_store(), data.draw(st.integers(1, 8), label="room"), record_cache.MIN_ROWS
    record_cache.MIN_ROWS = room  # from no room for one batch to room for all rows
    try:
        saved, n_begun, epoch = Saved(), 0, EPOCH
        for _ in range(data.draw(st.integers(0, 3), label="deaths")):
            with cut_at(most_bytes):
                saved, n_begun = die_once(store, data, entries, (saved, n_begun), epoch)
            epoch += 1
        with cut_at(most_bytes):
            life = BehindLife(store, saved, epoch=epoch, cache_bytes=1, bound=FOREVER)
        life.recover(entries)
        assert life.engine.behind is not None
        assert life.engine.behind.n_rows == 0
        assert stored(store) == stored(whole)
        assert known(life) == known(undisturbed)
    finally:
        record_cache.MIN_ROWS = before


def die_once(store: MortalStore, data: st.DataObject, entries: list[Entry], left: tuple[Saved, int], epoch: int) -> tuple[Saved, int]:
    """Live from what a life left until death, some row write or other, or the last batch.

    Returns:
        The state saved last, and how many batches have been begun in all lives: those are in the journal.
    """
    saved, n_begun = left
    n_journaled = data.draw(st.integers(n_begun, len(entries)), label="journaled")
    bound = Bound(data.draw(st.integers(1, 4), label="batches"), 1e6)
    life = BehindLife(store, saved, epoch=epoch, cache_bytes=1, bound=bound)
    store.left = data.draw(st.integers(0, 25), label="row writes")
    try:
        life.recover(entries[:n_journaled])
        for entry in entries[n_journaled:]:
            n_journaled += 1
            assert isinstance(entry, BatchEntry)
            if data.draw(st.integers(0, 3), label="save") == 0:
                saved = life.save()
            life.engine.run(entry.batch, entry.version, never)
    except KilledError:
        pass
    finally:
        store.left = None
    return saved, n_journaled


@settings(max_examples=200, deadline=None)
@given(BATCHES, PIECES, st.data())
def test_without_a_crash_storage_lags_within_the_bound_and_ends_the_same(
    batches: list[Batch], most_bytes: int, data: st.DataObject
) -> None:
    entries = journal_of(batches)
    whole = make_store()
    undisturbed = Life(whole, Saved(), epoch=EPOCH, cache_bytes=0)
    n_batches, room, before = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8)), record_cache.MIN_ROWS
    store = Faulty.made()
    record_cache.MIN_ROWS = room
    try:
        with cut_at(most_bytes):
            life = BehindLife(store, Saved(), epoch=EPOCH, cache_bytes=1, bound=Bound(n_batches, 1e6))  # type: ignore[arg-type]
        indexes = [known(life)] * (n_batches + 1)
        for entry in entries:
            assert isinstance(entry, BatchEntry)
            live_on(undisturbed, [entry])
            store.spoil = data.draw(st.sampled_from([None, None, unanswered, half_answered]))
            life.engine.run(entry.batch, entry.version, patient)
            indexes = [*indexes[1:], known(life)]
            assert_not_older(store, indexes[0], indexes[-1])
            if data.draw(st.integers(0, 3)) == 0:
                life.engine.write_dirty(patient)
                assert stored(store) == stored(whole)
        life.engine.write_dirty(patient)
        assert stored(store) == stored(whole)
        assert known(life) == known(undisturbed)
    finally:
        record_cache.MIN_ROWS = before


def assert_not_older(store: MemoryStore, least: dict[str, tuple[int, list[int]]], now: dict[str, tuple[int, list[int]]]) -> None:
    """Every row that exists is in storage, between its version as of some batches ago and the one of the index."""
    for name, table in TABLES.items():
        found, versions, _ = read(store, table, IDS)
        exist = np.array(now[name][1]) > 0
        assert found.tolist() == exist.tolist()
        assert (versions >= np.array(least[name][1]))[exist].all()
        assert (versions <= np.array(now[name][1])).all()
