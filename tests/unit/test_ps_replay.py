"""Recovery: with any rows stored when a shard died, and from any saved state, the rows end up with the same bits.

A shard is killed after any number of row writes of any batch, and again in the middle of its recovery; the journal is in memory here.
"""

import logging
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import memory_node

from kvemb.config import StorageConfig
from kvemb.errors import FencedError, JournalBehindError, JournalDamagedError, LostRowError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.record import make_version
from kvemb.stores.row_io import ReadPart, ReadResult
from paramserver.journal import BatchEntry, Entry, Position, SessionEntry, Watermark
from paramserver.model.batch import APPLY, ERASE, Batch
from paramserver.recovery.replay import Recovery
from tests.matrix import examples
from tests.unit.mortal_shard import (
    BATCHES,
    EPOCH,
    MOMENTUM,
    NUMBERS,
    PIECES,
    Life,
    MemoryJournal,
    MortalStore,
    Saved,
    cut_at,
    die_in,
    drawn_batch,
    find,
    journal_of,
    known,
    live_on,
    make_store,
    never,
    stored,
)


@settings(max_examples=examples(100), deadline=None)
@given(BATCHES, PIECES, st.data())
def test_any_death_at_any_row_write_is_recovered_from_to_the_same_bits(batches: list[Batch], most_bytes: int, data: st.DataObject) -> None:
    entries = journal_of(batches)
    whole = make_store()
    undisturbed = Life(whole, Saved(), epoch=EPOCH, cache_bytes=0)
    states = live_on(undisturbed, entries)
    with cut_at(most_bytes):
        die_and_recover(undisturbed, whole, entries, states, data)


def die_and_recover(undisturbed: Life, whole: MortalStore, entries: list[Entry], states: list[Saved], data: st.DataObject) -> None:
    """Live, die, recover, and compare with a life that nothing happened to."""
    store = make_store()
    cache_bytes = data.draw(st.sampled_from([0, 1 << 20]))
    n_applied = data.draw(st.integers(0, len(entries)))
    life = Life(store, Saved(), epoch=EPOCH, cache_bytes=cache_bytes)
    live_on(life, entries[:n_applied])
    if n_applied < len(entries):
        die_in(store, data, lambda: live_on(life, entries[n_applied : n_applied + 1]))
    epoch = EPOCH
    for _ in range(data.draw(st.integers(0, 2))):
        epoch += 1
        again = Life(store, states[data.draw(st.integers(0, n_applied))], epoch=epoch, cache_bytes=cache_bytes)
        die_in(store, data, lambda again=again: again.recover(entries))  # type: ignore[misc]
    last = Life(store, states[data.draw(st.integers(0, n_applied))], epoch=epoch + 1, cache_bytes=cache_bytes)
    last.recover(entries)
    assert stored(store) == stored(whole)
    assert known(last) == known(undisturbed)
    for life in (last, undisturbed):  # and life goes on
        for kind in (APPLY, ERASE, APPLY):
            life.engine.run(drawn_batch(kind, {"momentum": {0, 1}, "half": {1, 2}}, 7), make_version(epoch + 1, life.engine.k + 1), never)
    assert stored(store) == stored(whole)


def applied(n: int, ids: Sequence[int] = (0, 1)) -> list[Entry]:
    return journal_of([drawn_batch(APPLY, {"momentum": set(ids)}, seed) for seed in range(n)])


def test_a_row_that_was_created_again_behind_an_erase_is_not_taken_away_in_between() -> None:
    store, kinds = make_store(), (APPLY, ERASE, APPLY)
    entries = journal_of([drawn_batch(kind, {"momentum": {0, 1} if kind == ERASE else {0}}, 1) for kind in kinds])
    states = live_on(Life(store, Saved(), epoch=EPOCH, cache_bytes=0), entries)
    store.left = 0  # a process that changes a row now dies
    for state in states:
        Life(store, state, epoch=EPOCH + 1, cache_bytes=0).recover(entries)


def test_a_long_recovery_says_in_the_log_how_far_it_has_come(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("paramserver.recovery.replay._SAY_EVERY_S", 0.0)
    caplog.set_level(logging.INFO, "paramserver")
    with cut_at(128):
        Life(make_store(), Saved(), epoch=EPOCH, cache_bytes=0).recover(applied(2))
    said = [record.getMessage() for record in caplog.records]
    assert said[:2] == [
        "recovering: looks through 0 entries of the journal, with 0 rows",
        "recovering: looks through 1 entry of the journal, with 2 rows",
    ]
    assert said[2:-1] == [f"recovering: {n} of the journal's 4 rows are applied" for n in range(1, 5)]
    assert said[-1].startswith("recovered from the journal in ")


def test_rows_that_are_stored_already_are_read_once_however_many_batches_changed_them() -> None:
    class Counting(MortalStore):
        n_read = 0

        def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
            self.n_read += sum(len(part.keys) for part in parts)
            return super().read(parts, deadline)

    store = Counting(StorageConfig("memory", (f"replay-{next(NUMBERS)}:1",)), role="shard:0")
    entries = journal_of([drawn_batch(APPLY, {"momentum": {0, 1, 2}}, seed) for seed in range(20)])
    live_on(Life(store, Saved(), epoch=EPOCH, cache_bytes=1 << 20), entries)
    before, store.n_read = stored(store), 0
    Life(store, Saved(), epoch=EPOCH + 1, cache_bytes=1 << 20).recover(entries)
    assert (store.n_read, stored(store)) == (3, before)


def test_a_row_that_is_missing_and_was_not_erased_is_lost() -> None:
    store, entries = make_store(), applied(3)
    states = live_on(Life(store, Saved(), epoch=EPOCH, cache_bytes=0), entries)
    keys = RowKeys(MOMENTUM.tag, np.array([1], np.uint64))
    for address in store.nodes.addresses:
        memory_node(address).values.pop(bytes(keys.encode()[0]), None)
    with pytest.raises(LostRowError, match=r"id 1: no row in storage, expected version \(3, 1\)"):
        Life(store, states[1], epoch=EPOCH + 1, cache_bytes=0).recover(entries)


def test_storage_that_is_ahead_of_the_journal_is_named() -> None:
    store, entries = make_store(), applied(3)
    states = live_on(Life(store, Saved(), epoch=EPOCH, cache_bytes=0), entries)
    with pytest.raises(JournalBehindError, match=r"lacks batches .* id 0 has version \(3, 3\) in storage, expected version \(3, 1\)"):
        Life(store, states[1], epoch=EPOCH + 1, cache_bytes=0).recover(entries[:2])


def test_a_row_of_a_newer_owner_fences_the_recovery() -> None:
    store, entries = make_store(), applied(2)
    states = live_on(Life(store, Saved(), epoch=EPOCH, cache_bytes=0), entries)
    other = Life(store, states[2], epoch=EPOCH + 2, cache_bytes=0)
    other.engine.run(drawn_batch(APPLY, {"momentum": {0}}, 1), make_version(EPOCH + 2, 3), never)
    with pytest.raises(FencedError, match="later epoch than ours"):
        Life(store, states[1], epoch=EPOCH + 1, cache_bytes=0).recover(entries)


def test_a_batch_that_is_missing_in_the_journal_is_noticed_before_anything_is_written() -> None:
    store, entries = make_store(), applied(3)
    life = Life(store, Saved(), epoch=EPOCH, cache_bytes=0)
    with pytest.raises(JournalDamagedError, match="from batch 1 to batch 3"):
        life.recover([entries[0], entries[2]])
    assert life.engine.k == 0


def test_a_state_of_fewer_steps_than_the_journal_s_is_refused() -> None:
    store, entries = make_store(), applied(2)
    states = live_on(Life(store, Saved(), epoch=EPOCH, cache_bytes=0), entries)
    states[1].tables["momentum"] = (0, states[1].tables["momentum"][1])
    with pytest.raises(JournalDamagedError, match=r"'momentum': the journal's batch \(3, 2\) is step 2, but the state has 0 steps"):
        Life(store, states[1], epoch=EPOCH + 1, cache_bytes=0).recover(entries)


def test_a_state_that_needs_discarded_segments_is_refused() -> None:
    journal = MemoryJournal([])
    journal.start = Position(4, 48)
    with pytest.raises(JournalDamagedError, match="needs the journal from segment 3 on, but it begins with 4"):
        Recovery(journal, Position(3, 48), 0, find)  # type: ignore[arg-type]
    Recovery(journal, Position(4, 48), 0, find)  # type: ignore[arg-type]


def test_hellos_goodbyes_and_watermarks_are_brought_back_in_their_order() -> None:
    batch, refused = drawn_batch(APPLY, {"momentum": {0}}, 1), Batch(ERASE, ())
    entries: list[Entry] = [
        SessionEntry("a", 1),
        SessionEntry("b", 2),
        BatchEntry(make_version(EPOCH, 1), batch, (0,), (Watermark("a", 1, 4), Watermark("b", 2, 1))),
        BatchEntry(make_version(EPOCH, 2), refused, (), (Watermark("a", 1, 5),)),
        SessionEntry("b", 0),
        SessionEntry("c", 3),
    ]
    life = Life(make_store(), Saved(), epoch=EPOCH + 1, cache_bytes=0)
    recovered = life.recover(entries)
    assert (recovered.batches, recovered.rows) == (2, 1)
    assert life.sessions.to_save() == [("a", 1, 5), ("b", 2, 1), ("c", 3, 0)]
    assert life.sessions.next_incarnation == 4
    assert (life.members.members, life.members.complete) == ((("a", 1), ("c", 3)), True)
    session = life.sessions.hello("a", 1)
    assert [session.known(sequence, 0).final.state for sequence in (4, 5)] == ["applied", "failed"]  # type: ignore[union-attr]


def test_a_trainer_that_was_dropped_from_a_sync_job_is_neither_awaited_nor_let_in_after_a_restart() -> None:
    life = Life(make_store(), Saved(), epoch=EPOCH, cache_bytes=0)
    life.recover([SessionEntry("a", 1), SessionEntry("b", 2), SessionEntry("b", 3), SessionEntry("b", 0)])  # the fence, then the goodbye
    assert (life.members.members, life.members.complete) == ((("a", 1),), True)
    with pytest.raises(FencedError, match="incarnation 2 was fenced by the newer incarnation 3, or dropped"):
        life.sessions.check_hello("b", 2)
    assert life.sessions.hello("b", 0).incarnation == 4


def test_a_recovery_waits_for_storage_and_can_be_given_up() -> None:
    store, entries = make_store(), applied(2)
    memory_node(store.nodes.addresses[0]).down = memory_node(store.nodes.addresses[1]).down = True
    with pytest.raises(NodeUnavailableError):
        Life(store, Saved(), epoch=EPOCH, cache_bytes=0).recover(entries)
    memory_node(store.nodes.addresses[0]).down = memory_node(store.nodes.addresses[1]).down = False
    life = Life(store, Saved(), epoch=EPOCH + 1, cache_bytes=0)
    life.recover(entries)
    assert life.engine.k == 2
