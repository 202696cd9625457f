"""Recovery: whatever was stored when a shard died, and from wherever its saved state goes on, the rows end up with the same bits.

A shard is killed after any number of row writes of any batch, and again in the middle of its recovery; the journal is in memory here.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore, memory_node

import kvemb.init
import kvemb.optim
from kvemb.config import StorageConfig
from kvemb.errors import FencedError, JournalBehindError, JournalDamagedError, LostRowError, NodeUnavailableError, StorageError
from kvemb.index.record_cache import CacheBudget
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from paramserver.engine import batch_pieces
from paramserver.engine.engine import Engine
from paramserver.ingest.barrier import Membership
from paramserver.ingest.sessions import Sessions
from paramserver.journal import BatchEntry, Entry, Position, SessionEntry, Watermark, encode_entry
from paramserver.model.batch import APPLY, ASSIGN, ERASE, Batch, CheckedRows
from paramserver.model.tables import Tables, TableState
from paramserver.recovery.replay import Recovered, Recovery

_NUMBERS = count()
EPOCH = 3
MOMENTUM = TableDef("momentum", 2, kvemb.optim.sgd(0.5, momentum=0.9), kvemb.init.normal(std=1.0), seed=4)
HALF = TableDef("half", 3, kvemb.optim.adam(lr=0.1), kvemb.init.uniform(), dtype="float16")
TABLES = {table.name: table for table in (MOMENTUM, HALF)}
IDS = np.arange(5, dtype=np.uint64)
NOTHING = np.empty(0, np.uint64)


class KilledError(Exception):
    """The shard died."""


class MortalStore(MemoryStore):
    """Storage in memory; the process dies when it has changed so many more rows (None: it lives)."""

    left: int | None = None

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        return self._until_death(parts, lambda some: MemoryStore.write(self, some, deadline))

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[np.ndarray]:
        return self._until_death(parts, lambda some: MemoryStore.erase(self, some, deadline))

    def _until_death(self, parts: Sequence[WritePart], act: Callable[[list[WritePart]], Any]) -> Any:
        if self.left is None or self.left >= sum(len(part.keys) for part in parts):
            self.left = None if self.left is None else self.left - sum(len(part.keys) for part in parts)
            return act(list(parts))
        for part in parts:
            some = slice(0, self.left)
            tokens = None if part.tokens is None else part.tokens[some]
            act([WritePart(RowKeys(part.keys.tag, part.keys.ids[some]), part.records[some], tokens)])
            self.left -= min(self.left, len(part.keys))
        raise KilledError


class MemoryJournal:
    """Entries in a list; position i is behind the i-th of them."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._payloads = [b"".join(bytes(piece) for piece in encode_entry(entry)) for entry in entries]
        self.start = Position(1, 0)

    def read(self, start: Position) -> Iterator[tuple[Position, memoryview]]:
        for at in range(start.offset, len(self._payloads)):
            yield Position(1, at + 1), memoryview(self._payloads[at])


def find(name: str, schema: int) -> TableDef:
    return TABLES[name]


def make_store() -> MortalStore:
    number = next(_NUMBERS)
    store = MortalStore(StorageConfig("memory", (f"replay-{number}-a:1", f"replay-{number}-b:1")), role="shard:0")
    store.provision(b"c" * 16, b"g" * 8, Deadline.after(5))
    store.open(Deadline.after(5))
    return store


def rows(table: TableDef, kind: str, ids: Sequence[int], seed: int) -> CheckedRows:
    values = np.random.default_rng(seed).standard_normal((len(ids), table.dim)).astype(np.float32)
    hyper = table.optimizer.check_hyper({})
    return CheckedRows(table, np.array(sorted(ids), np.uint64), values[:, : 0 if kind == ERASE else None], NOTHING, hyper)


def never(error: StorageError, pause_s: float) -> None:
    raise error


class Life:
    """One process of the shard, from a saved state on."""

    def __init__(self, store: MortalStore, saved: "Saved", *, epoch: int, cache_bytes: int) -> None:
        budget = CacheBudget(cache_bytes)
        self.tables = Tables([TableState(TABLES[name], step, arrays, budget) for name, (step, arrays) in saved.tables.items()], budget)
        self.engine = Engine(store, self.tables, epoch=epoch, k=saved.k, timeout_s=5)
        self.sessions, self.members = Sessions(True), Membership(2)
        self.saved = saved

    def recover(self, entries: Sequence[Entry]) -> Recovered:
        recovery = Recovery(MemoryJournal(entries), Position(1, self.saved.k), self.saved.k, find).scan()  # type: ignore[arg-type]
        return recovery.run(self.engine, self.tables, self.sessions, self.members, never)

    def step(self, table: TableDef) -> int:
        return self.tables.state(table).step

    def save(self) -> "Saved":
        tables = {state.definition.name: (state.step, state.arrays()) for state in self.tables.all()}
        return Saved(self.engine.k, tables)


class Saved:
    """What a saved state holds of rows."""

    def __init__(self, k: int = 0, tables: dict[str, tuple[int, tuple[Any, Any]]] | None = None) -> None:
        self.k, self.tables = k, tables or {}


def live_on(life: Life, entries: Sequence[Entry]) -> list[Saved]:
    """Apply batches as a shard does that nothing happens to; return its state before each, and at the end."""
    states = []
    for entry in entries:
        assert isinstance(entry, BatchEntry)
        states.append(life.save())
        life.engine.run(entry.batch, entry.version, never)
    return [*states, life.save()]


def journal_of(batches: Sequence[Batch]) -> list[Entry]:
    """The entries of batches 1, 2, 3, …"""
    steps = dict.fromkeys(TABLES, 0)
    entries: list[Entry] = []
    for k, batch in enumerate(batches, 1):
        before = tuple(steps[one.definition.name] for one in batch.tables)
        entries.append(BatchEntry(make_version(EPOCH, k), batch, before, ()))
        if batch.kind == APPLY:
            steps.update({one.definition.name: step + 1 for one, step in zip(batch.tables, before, strict=True)})
    return entries


def stored(store: MemoryStore) -> dict[str, bytes]:
    """Every table's rows, bit for bit."""
    found = {}
    for name, table in TABLES.items():
        size = table.record.size_bytes
        got = MemoryStore.read(store, [ReadPart(RowKeys(table.tag, IDS), size, size)], Deadline.after(5))[0].in_key_order()
        found[name] = got.found.tobytes() + np.where(got.found[:, None], got.records, 0).tobytes()
    return found


def known(life: Life) -> dict[str, tuple[int, list[int]]]:
    """Every table's step and index."""
    return {name: (life.step(table), life.tables.state(table).versions(IDS).tolist()) for name, table in TABLES.items()}


def _batch(kind: str, parts: dict[str, set[int]], seed: int) -> Batch:
    return Batch(kind, tuple(rows(TABLES[name], kind, sorted(ids), seed) for name, ids in sorted(parts.items())))


IDS_OF_A_BATCH = st.sets(st.sampled_from(IDS.tolist()), max_size=4)
PARTS = st.dictionaries(st.sampled_from(sorted(TABLES)), IDS_OF_A_BATCH, min_size=1)
KINDS = st.sampled_from([APPLY, APPLY, ASSIGN, ERASE, ERASE])
BATCHES = st.lists(st.builds(_batch, KINDS, PARTS, st.integers(0, 99)), min_size=1, max_size=9)


PIECES = st.sampled_from([128, 300, batch_pieces.MOST_BYTES])  # one row, two, or all of a batch


@contextmanager
def cut_at(most_bytes: int) -> Iterator[None]:
    """Let engines made meanwhile cut batches in pieces of so many bytes."""
    before, batch_pieces.MOST_BYTES = batch_pieces.MOST_BYTES, most_bytes
    try:
        yield
    finally:
        batch_pieces.MOST_BYTES = before


@settings(max_examples=100, deadline=None)
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
            life.engine.run(_batch(kind, {"momentum": {0, 1}, "half": {1, 2}}, 7), make_version(epoch + 1, life.engine.k + 1), never)
    assert stored(store) == stored(whole)


def die_in(store: MortalStore, data: st.DataObject, act: Callable[[], Any]) -> None:
    """Let the process die after a number of row writes, if it makes so many."""
    store.left = data.draw(st.integers(0, 12))
    try:
        act()
    except KilledError:
        pass
    finally:
        store.left = None


def applied(n: int, ids: Sequence[int] = (0, 1)) -> list[Entry]:
    return journal_of([_batch(APPLY, {"momentum": set(ids)}, seed) for seed in range(n)])


def test_a_row_that_was_created_again_behind_an_erase_is_not_taken_away_in_between() -> None:
    store, kinds = make_store(), (APPLY, ERASE, APPLY)
    entries = journal_of([_batch(kind, {"momentum": {0, 1} if kind == ERASE else {0}}, 1) for kind in kinds])
    states = live_on(Life(store, Saved(), epoch=EPOCH, cache_bytes=0), entries)
    store.left = 0  # whoever changes a row now dies
    for state in states:
        Life(store, state, epoch=EPOCH + 1, cache_bytes=0).recover(entries)


def test_a_long_recovery_says_in_the_log_how_far_it_has_come(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("paramserver.recovery.replay._SAY_EVERY_S", 0.0)
    caplog.set_level(logging.INFO, "paramserver")
    with cut_at(128):
        Life(make_store(), Saved(), epoch=EPOCH, cache_bytes=0).recover(applied(2))
    said = [record.getMessage() for record in caplog.records]
    assert said[:2] == [f"recovering: {n} entries of the journal, with {2 * n} rows, are looked through" for n in range(2)]
    assert said[2:] == [f"recovering: {n} of the journal's 4 rows are applied" for n in range(1, 5)]


def test_rows_that_are_stored_already_are_read_once_however_many_batches_changed_them() -> None:
    class Counting(MortalStore):
        n_read = 0

        def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
            self.n_read += sum(len(part.keys) for part in parts)
            return super().read(parts, deadline)

    store = Counting(StorageConfig("memory", (f"replay-{next(_NUMBERS)}:1",)), role="shard:0")
    entries = journal_of([_batch(APPLY, {"momentum": {0, 1, 2}}, seed) for seed in range(20)])
    live_on(Life(store, Saved(), epoch=EPOCH, cache_bytes=1 << 20), entries)
    before, store.n_read = stored(store), 0
    Life(store, Saved(), epoch=EPOCH + 1, cache_bytes=1 << 20).recover(entries)
    assert (store.n_read, stored(store)) == (3, before)


def test_a_row_that_is_missing_and_was_not_erased_is_lost() -> None:
    store, entries = make_store(), applied(3)
    states = live_on(Life(store, Saved(), epoch=EPOCH, cache_bytes=0), entries)
    keys = RowKeys(MOMENTUM.tag, np.array([1], np.uint64))
    for address in store.addresses:
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
    other.engine.run(_batch(APPLY, {"momentum": {0}}, 1), make_version(EPOCH + 2, 3), never)
    with pytest.raises(FencedError, match="later epoch than ours"):
        Life(store, states[1], epoch=EPOCH + 1, cache_bytes=0).recover(entries)


def test_a_batch_that_is_missing_in_the_journal_is_noticed_before_anything_is_written() -> None:
    store, entries = make_store(), applied(3)
    life = Life(store, Saved(), epoch=EPOCH, cache_bytes=0)
    with pytest.raises(JournalDamagedError, match="from batch 1 to batch 3"):
        life.recover([entries[0], entries[2]])
    assert life.engine.k == 0


def test_a_state_of_other_steps_than_the_journal_s_is_refused() -> None:
    store, entries = make_store(), applied(2)
    states = live_on(Life(store, Saved(), epoch=EPOCH, cache_bytes=0), entries)
    states[1].tables["momentum"] = (5, states[1].tables["momentum"][1])
    with pytest.raises(JournalDamagedError, match=r"'momentum': the journal's batch \(3, 2\) is step 2, but the state has 5 steps"):
        Life(store, states[1], epoch=EPOCH + 1, cache_bytes=0).recover(entries)


def test_a_state_that_needs_discarded_segments_is_refused() -> None:
    journal = MemoryJournal([])
    journal.start = Position(4, 48)
    with pytest.raises(JournalDamagedError, match="needs the journal from segment 3 on, but it begins with 4"):
        Recovery(journal, Position(3, 48), 0, find)  # type: ignore[arg-type]
    Recovery(journal, Position(4, 48), 0, find)  # type: ignore[arg-type]


def test_hellos_goodbyes_and_watermarks_are_brought_back_in_their_order() -> None:
    batch, refused = _batch(APPLY, {"momentum": {0}}, 1), Batch(ERASE, ())
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
    assert (recovered.batches, recovered.rows, recovered.entries) == (2, 1, 6)
    assert life.sessions.kept() == [("a", 1, 5), ("b", 2, 1), ("c", 3, 0)]
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
    memory_node(store.addresses[0]).down = memory_node(store.addresses[1]).down = True
    with pytest.raises(NodeUnavailableError):
        Life(store, Saved(), epoch=EPOCH, cache_bytes=0).recover(entries)
    memory_node(store.addresses[0]).down = memory_node(store.addresses[1]).down = False
    life = Life(store, Saved(), epoch=EPOCH + 1, cache_bytes=0)
    life.recover(entries)
    assert life.engine.k == 2
