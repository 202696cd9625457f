"""Write-behind on storage in memory: rows are written late, never wrongly, and never needed by anybody before they are."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore, memory_node

import kvemb.init
import kvemb.optim
from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.file_names import MANIFEST
from kvemb.checkpoint.format.manifest_json import encode_manifest
from kvemb.checkpoint.format.shard_fragment import SaveInfo, assemble
from kvemb.checkpoint.writer import read_fragment
from kvemb.config import StorageConfig
from kvemb.errors import DeadlineExceededError, FencedError, NodeUnavailableError, ShardUnavailableError, StorageError
from kvemb.index import record_cache
from kvemb.index.record_cache import CacheBudget
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import PushPart, PushReply
from kvemb.schema.record import make_version, split_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, WritePart, WriteResult
from paramserver.apply.applier import Applier
from paramserver.apply.committer import Committer, Handover
from paramserver.checkpoint import save_job
from paramserver.checkpoint.save_job import SaveOrder
from paramserver.checkpoint.saver import Saver
from paramserver.engine.engine import Engine
from paramserver.engine.repair_port import NO_BATCH
from paramserver.engine.write_behind import Bound, WriteBehind
from paramserver.ingest.ingest import Ingest
from paramserver.ingest.sessions import Sessions
from paramserver.journal import BatchEntry, Entry, Position
from paramserver.journal.fenced_log import FencedLog
from paramserver.model.batch import APPLY, ASSIGN, ERASE, Batch, CheckedRows
from paramserver.model.tables import Tables
from paramserver.model.timeline import Timeline
from paramserver.recovery.shard_parts import ShardParts
from paramserver.recovery.state_image import image
from paramserver.repair.repairer import Repairer
from paramserver.snapshot import WantedVersions
from paramserver.snapshot.snapshotter import from_storage
from tests.unit.forgetful_journal import ForgetfulJournal
from tests.unit.memory_nodes import unused_nodes
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
    drawn_batch,
    journal_of,
    known,
    live_on,
    stored,
)

ADAM = TableDef("adam", 2, kvemb.optim.adam(lr=0.1), kvemb.init.uniform())
FOREVER = Bound(10**6, 1e6)
Ids = Sequence[int]


def never(error: StorageError, pause_s: float) -> None:
    raise error


def patient(error: StorageError, pause_s: float) -> None:
    """Try again."""


def provisioned(store: MemoryStore) -> None:
    store.provision(b"c" * 16, b"g" * 8, Deadline.after(5))
    store.open(Deadline.after(5))


def nodes() -> StorageConfig:
    return StorageConfig("memory", unused_nodes())


def make_store() -> MortalStore:
    store = MortalStore(nodes(), role="shard:0")
    provisioned(store)
    return store


# --- crashes -------------------------------------------------------------------------------------------------------------------


class BehindLife(Life):
    """A life that writes behind."""

    def __init__(self, store: MortalStore, saved: Saved, *, epoch: int, cache_bytes: int, bound: Bound) -> None:
        super().__init__(store, saved, epoch=epoch, cache_bytes=cache_bytes)
        self.engine.behind = WriteBehind(store, self.tables, bound, epoch=epoch, timeout_s=5)

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


# --- storage that fails --------------------------------------------------------------------------------------------------------

Spoil = Callable[["Faulty", list[WritePart]], list[WriteResult]]


class Faulty(MemoryStore):
    """Storage in memory that counts the rows written, and whose next write can be spoilt."""

    spoil: Spoil | None = None
    n_written = n_writes = 0

    @staticmethod
    def made() -> "Faulty":
        store = Faulty(nodes(), role="shard:0")
        provisioned(store)
        return store

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        spoil, self.spoil = self.spoil, None
        self.n_written += sum(len(part.keys) for part in parts)
        self.n_writes += 1
        return super().write(parts, deadline) if spoil is None else spoil(self, list(parts))


def unanswered(store: Faulty, parts: list[WritePart]) -> list[WriteResult]:
    """All is written, and nobody hears of it."""
    MemoryStore.write(store, parts, Deadline.after(5))
    raise NodeUnavailableError("node x: connection reset")


def half_answered(store: Faulty, parts: list[WritePart]) -> list[WriteResult]:
    """Every other row is written, and nobody hears of it."""
    for part in parts:
        some = np.arange(0, len(part.keys), 2)
        tokens = None if part.tokens is None else part.tokens[some]
        MemoryStore.write(store, [WritePart(part.keys.take(some), part.records[some], tokens)], Deadline.after(5))
    raise DeadlineExceededError("node x: no answer")


class Shard:
    """Store, tables and an engine that writes behind."""

    def __init__(self, bound: Bound = FOREVER, cache_bytes: int = 1 << 20) -> None:
        self.store = Faulty.made()
        self.tables = Tables([], CacheBudget(cache_bytes))
        self.engine = Engine(self.store, self.tables, epoch=1, k=0, timeout_s=5)
        self.now_s, self.woken = 0.0, threading.Event()
        self.behind = WriteBehind(self.store, self.tables, bound, epoch=1, timeout_s=5, wake=self.woken.set, clock_s=lambda: self.now_s)
        self.engine.behind = self.behind

    def run(self, ids: Ids, kind: str = APPLY, value: float = 1.0, *, keep_rows: bool = False) -> Any:
        return self.engine.run(batch(kind, ids, value), make_version(1, self.engine.k + 1), never, keep_rows=keep_rows)

    def records(self, ids: Ids) -> np.ndarray:
        """What a row is now, wherever it is: from the cache, or storage."""
        state = self.tables.state(ADAM)
        records, found = from_storage(self.store, 5)(state, np.array(ids, np.uint64))
        assert found.all()
        return records

    def k_of(self, ids: Ids) -> list[int]:
        """k of the rows in storage."""
        return [split_version(int(version))[1] for version in read(self.store, ADAM, np.array(ids, np.uint64))[1]]


def batch(kind: str, ids: Ids, value: float = 1.0) -> Batch:
    values = np.full((len(ids), 0 if kind == ERASE else ADAM.dim), value, np.float32)
    hyper = ADAM.optimizer.check_hyper({})
    return Batch(kind, (CheckedRows(ADAM, np.array(ids, np.uint64), values, np.empty(0, np.uint64), hyper),))


def read(store: MemoryStore, table: TableDef, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """found, versions, whole records."""
    size = table.record.size_bytes
    got = store.read([ReadPart(table.keys(ids, pages=False), size, size)], Deadline.after(5))[0].in_key_order()
    return got.found, np.where(got.found, table.record.versions(got.records), np.uint64(0)), got.records


@pytest.fixture
def shard() -> Shard:
    made = Shard()
    made.run([0, 1, 2, 3])
    return made


# --- what is written when ------------------------------------------------------------------------------------------------------


def test_cold_rows_are_written_at_once_and_hot_ones_are_not(shard: Shard) -> None:
    shard.run([2, 3, 4, 5])
    assert shard.k_of([0, 1, 2, 3, 4, 5]) == [1, 1, 1, 1, 2, 2]
    assert (shard.store.n_written, shard.behind.n_rows) == (6, 2)
    shard.engine.write_dirty(never)
    assert shard.k_of([0, 1, 2, 3, 4, 5]) == [1, 1, 2, 2, 2, 2]
    assert (shard.store.n_written, shard.store.n_writes, shard.behind.n_rows) == (8, 3, 0)


def test_rows_that_every_batch_changes_are_written_once_for_all_of_them() -> None:
    shard, plain = Shard(Bound(3, 1e6)), Shard()
    plain.engine.behind = None
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


def test_updated_rows_come_back_whether_they_are_written_or_not(shard: Shard) -> None:
    ids = [0, 2, 3, 7, 8]
    rows = shard.run(ids, keep_rows=True).rows["adam"]
    np.testing.assert_array_equal(rows.view(np.float32), ADAM.record.weights(shard.records(ids)))
    assert shard.behind.n_rows == 3


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
    plain = Shard()
    plain.engine.behind = None
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


def put(store: MemoryStore, row_id: int, version: int) -> None:
    """Write another record of this row, as nobody should."""
    ids = np.array([row_id], np.uint64)
    record = read(store, ADAM, ids)[2].copy()
    ADAM.record.encode(ids, np.array([version], np.uint64), np.zeros((1, 2), np.float32), ADAM.record.slots(record), record)
    address, key = place(store, row_id)
    memory_node(address).put(key, record.tobytes())


def delete(store: MemoryStore, row_id: int) -> None:
    address, key = place(store, row_id)
    del memory_node(address).values[key]


def place(store: MemoryStore, row_id: int) -> tuple[str, bytes]:
    keys = ADAM.keys(np.array([row_id], np.uint64), pages=False)
    address = next(one for one in store.addresses if store.keys_of(one, keys)[0])
    return address, bytes(keys.encode()[0])


# --- those who take storage for the truth --------------------------------------------------------------------------------------


class Unable:
    """Reconstructs nothing."""

    def __call__(self, wanted: Sequence[WantedVersions]) -> list[np.ndarray]:
        raise AssertionError("the cache has these rows")


def repairer(shard: Shard) -> Repairer:
    made = Repairer(shard.store, shard.tables, (0, 1), epoch=1, reconstruct=Unable(), timeout_s=5, metas=lambda: [])
    shard.engine.rescue = made
    return made


def test_a_repair_restores_dirty_rows_of_a_lost_node_and_leaves_none_behind(shard: Shard) -> None:
    shard.run([0, 1, 2])
    expected, rescue = shard.records([0, 1, 2, 3]).tobytes(), repairer(shard)
    for address in shard.store.addresses:
        memory_node(address).flush()
    shard.engine.write_dirty(never)
    assert rescue.figures.nodes == 2
    assert (rescue.figures.rows, shard.behind.n_rows) == (1, 0), "a dirty row is not a lost one"
    assert read(shard.store, ADAM, np.arange(4, dtype=np.uint64))[2].tobytes() == expected


def test_a_node_is_lost_while_a_batch_changes_dirty_rows(shard: Shard) -> None:
    shard.run([0, 1, 2])
    repairer(shard)
    memory_node(shard.store.addresses[0]).flush()
    memory_node(shard.store.addresses[1]).flush()
    shard.run([0, 1, 2, 10, 11])
    plain = Shard()
    plain.engine.behind = None
    for ids in ([0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 10, 11]):
        plain.run(ids)
    shard.engine.write_dirty(never)
    every = np.array([0, 1, 2, 3, 10, 11], np.uint64)
    assert read(shard.store, ADAM, every)[2].tobytes() == plain.records(every.tolist()).tobytes()


def test_dirty_rows_are_not_taken_for_lost_when_a_row_beside_them_is(shard: Shard) -> None:
    shard.run([0, 1, 2])
    rescue = repairer(shard)
    remembered = shard.records([3])
    delete(shard.store, 3)
    shard.tables.state(ADAM).cache.forget(np.array([3], np.uint64))
    rescue._reconstruct = lambda wanted: [remembered]
    shard.run([0, 1, 2, 3])
    assert rescue.figures.rows == 1
    assert shard.behind.n_rows == 3
    shard.engine.write_dirty(never)
    assert shard.k_of([0, 1, 2, 3]) == [3, 3, 3, 3]


def test_asking_for_a_repair_between_batches_finds_dirty_rows_in_order(shard: Shard) -> None:
    shard.run([0, 1, 2])
    expected, rescue = shard.records([0, 1, 2, 3]).tobytes(), repairer(shard)
    rescue.nodes(NO_BATCH, never, suspects=rescue.addresses)
    assert (rescue.figures.rows, shard.behind.n_rows) == (0, 0)
    assert read(shard.store, ADAM, np.arange(4, dtype=np.uint64))[2].tobytes() == expected


def test_a_save_waits_for_rows_that_were_dirty_at_its_cut(shard: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    waiting = threading.Event()
    monkeypatch.setattr(save_job, "_PAUSE_S", 0.01)
    saver = Saver(0, shard.store, shard.tables, shard.engine, definitions=lambda: [ADAM], folder=tmp_path, timeout_s=5)
    shard.run([0, 1, 2])
    at_cut = shard.records([0, 1, 2, 3])
    saver.begin(SaveOrder("1" * 32, str(tmp_path / "saved"), 0, False), Deadline.after(5))
    assert shard.woken.is_set(), "the dirty rows were asked for"
    shard.run([0])  # writes: they were asked for
    shard.run([0, 1])
    while saver.progress("1" * 32)[0] == "running":
        waiting.wait(0.005)
    assert saver.progress("1" * 32)[:4] == ("done", "", 4, 4)
    fragment_rows = saved_records(tmp_path / "saved")
    np.testing.assert_array_equal(fragment_rows, at_cut)


def saved_records(folder: Path) -> np.ndarray:
    """The records in a checkpoint of one shard."""
    storage = CheckpointStorage(str(folder))
    fragment = read_fragment(storage, 0)
    assert fragment is not None
    storage.write(MANIFEST, encode_manifest(assemble(SaveInfo("1" * 32, "demo", "c" * 32, 1, False, None), [fragment])))
    chain = open_chain(str(folder))
    (block,) = chain.rows(chain.newest.tables[0].definition, 0)
    return block.records(ADAM, block.versions)


def test_an_image_of_a_moment_with_dirty_rows_is_a_bug(shard: Shard) -> None:
    shard.run([0])
    intake = Ingest(Sessions(True), None)
    parts = ShardParts(None, 0, b"c" * 16, None, shard.tables, shard.engine, intake, None, None, Timeline(1), None, None)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="an image is of a moment when storage holds what the index says"):
        image(parts, Position(1, 0))


# --- the apply thread ----------------------------------------------------------------------------------------------------------


class Rig(Shard):
    """With its threads, and one trainer."""

    def __init__(self, bound: Bound = FOREVER) -> None:
        super().__init__(bound)
        self.handover, ledger = Handover(), FencedLog(ForgetfulJournal(), lambda: None)  # type: ignore[arg-type]
        self.intake = Ingest(Sessions(True), None)
        self.behind._wake, self.behind._clock_s, self.intake.behind = self.handover.wake, time.monotonic, self.behind
        self.failed = threading.Event()
        self.applier = Applier(self.intake, self.engine, self.tables, self.handover, failed=lambda error: self.failed.set())
        self.committer = Committer(self.intake, self.tables, ledger, self.handover, sync=False, epoch=1, k=0)
        self.incarnation, self.sequence = self.intake.hello("a", 0)
        self.applier.start()
        self.committer.start()

    def push(self, ids: Ids) -> PushReply:
        self.sequence += 1
        over, replies = threading.Event(), []

        def sink(reply: PushReply) -> None:
            replies.append(reply)
            if reply.state != "accepted":
                over.set()

        part = PushPart("a", self.incarnation, self.sequence, self.sequence, False, [], 1)
        self.intake.submit(part, batch(APPLY, ids).tables, sink, lambda: False)
        assert over.wait(30)
        return replies[-1]

    def close(self) -> None:
        self.committer.stop(30)
        assert self.applier.stop(30)


@pytest.fixture
def rig() -> Any:
    made = Rig()
    yield made
    made.close()


def test_a_flush_returns_when_storage_has_everything(rig: Rig) -> None:
    rig.push([0, 1])
    assert rig.push([0, 1]).state == "applied"
    assert rig.k_of([0, 1]) == [1, 1]
    rig.intake.flush(Deadline.after(30))
    assert rig.k_of([0, 1]) == [2, 2]
    rig.intake.flush(Deadline.after(0))


def test_a_drain_ends_when_storage_has_everything(rig: Rig) -> None:
    rig.push([0, 1])
    rig.push([0, 1])
    assert rig.intake.drain(Deadline.after(30))
    assert rig.k_of([0, 1]) == [2, 2]


def test_a_flush_without_storage_says_what_it_waits_for_and_a_drain_gives_up(rig: Rig) -> None:
    rig.push([0])
    rig.push([0])
    node, other = map(memory_node, rig.store.addresses)
    node.down = other.down = True
    with pytest.raises(DeadlineExceededError, match=r"waited 0.3 s for rows of applied pushes to be written to storage"):
        rig.intake.flush(Deadline.after(0.3))
    assert not rig.intake.drain(Deadline.after(0.05))
    assert "1 applied rows are not written to storage" in rig.intake.describe_pending()
    node.down = other.down = False
    assert rig.intake.drain(Deadline.after(30))
    assert rig.intake.trouble == ""


def test_dirty_rows_are_written_when_no_batch_comes() -> None:
    rig = Rig(Bound(100, 1e-3))
    try:
        rig.push([0])
        rig.push([0])
        rig.behind.ask = lambda: None  # type: ignore[method-assign]  # nobody asks: it is their age
        rig.intake.flush(Deadline.after(30))
        assert rig.k_of([0]) == [2]
    finally:
        rig.close()


def test_a_shard_that_another_has_taken_over_stops_when_it_finds_out_by_writing(rig: Rig) -> None:
    rig.push([0])
    rig.push([0])
    put(rig.store, 0, make_version(2, 1))
    with pytest.raises(ShardUnavailableError, match="has lost the shard"):
        rig.intake.flush(Deadline.after(30))
    assert rig.failed.wait(30)
