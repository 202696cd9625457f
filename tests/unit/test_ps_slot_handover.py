"""Slots handed from one shard to another: the taker knows every row, and can reconstruct it, bit for bit; the giver knows none of them."""

from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore, memory_node

import kvemb.init
import kvemb.optim
from kvemb.arrays.record_cache import CacheBudget
from kvemb.config import StorageConfig
from kvemb.errors import FencedError, JournalFullError, LostRowError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.record import make_version
from kvemb.schema.slots import N_SLOTS
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart
from paramserver.engine.engine import Engine
from paramserver.journal import BatchEntry, Journal, encode_entry
from paramserver.model.batch import APPLY, ASSIGN, ERASE, Batch, CheckedRows
from paramserver.model.row_ages import RowAges
from paramserver.model.tables import Tables
from paramserver.model.transition import Timeline
from paramserver.recovery.known_rows import known_tables
from paramserver.row_log import Reconstructor, Runs, WantedVersions
from paramserver.row_log.log_flush import LogFlush, from_storage
from paramserver.row_log.state_file import ShardState
from paramserver.scaling import slot_taker
from paramserver.scaling.slot_entries import GivenRows
from paramserver.scaling.slot_giver import SlotGiver
from paramserver.scaling.slot_taker import SlotTaker
from tests.matrix import examples
from tests.unit.lonely_engine import ALONE
from tests.unit.run_states import all_rows, present, saved_in

_NUMBERS = count()
ADAM = TableDef("adam", 2, kvemb.optim.adam(lr=0.1), kvemb.init.uniform(), tag_attempt=1)
HALF = TableDef("half", 4, kvemb.optim.sgd(0.5, momentum=0.9), kvemb.init.normal(std=1.0), dtype="float16", seed=9, tag_attempt=2)
TABLES = {table.name: table for table in (ADAM, HALF)}
IDS = np.arange(12, dtype=np.uint64)
EVERY = np.ones(N_SLOTS, bool)


class Shard:
    """One of two shards on the same storage: engine, journal, row log, saved state, without threads."""

    def __init__(self, folder: Path, nodes: tuple[str, ...], number: int, *, on_disk: bool = False) -> None:
        self.folder, self.nodes, self.number, self.on_disk = folder, nodes, number, on_disk
        folder.mkdir(parents=True)
        self.epoch = 0
        self.journal: Journal | None = None
        self.start()

    def start(self, above: int = 0) -> None:
        """A new process: it has saved state, journal and row log. Tests save before, so that nothing is to be replayed."""
        self.close()
        self.epoch = max(self.epoch, above) + 1
        self.store = MemoryStore(StorageConfig("memory", self.nodes), role=f"shard:{self.number}")
        self.store.open(Deadline.after(60))
        budget = CacheBudget(1 << 12)
        self.journal = Journal(self.folder / "journal", "os", segment_bytes=1)
        self.saved = saved_in(self.folder)
        self.runs = Runs(self.folder / "snapshot", self.saved, limit=2, epoch=self.epoch)
        most = 0 if self.on_disk else None
        known = known_tables(self.saved.now, self.runs, self.journal, find_table, budget=budget, index_bytes=most)
        self.tables = Tables(known, budget, log=self.runs, index_bytes=most)
        self.engine = Engine(self.store, self.tables, Timeline(self.epoch), k=self.saved.now.k, timeout_s=5, repair=ALONE)
        self.reconstructor = Reconstructor(lambda: self.runs.view, self.journal, find_table)
        self.read = from_storage(self.store, 5)
        self.given = GivenRows(self.tables, lambda: self.applied)
        self.giver = SlotGiver(self.tables, self.runs, self.given, self.state)
        self.taker = SlotTaker(self.tables, self.runs, self.read, self.state, epoch=lambda: self.epoch, ages=RowAges())

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()
            self.runs.close()
            self.journal = None

    @property
    def applied(self) -> int:
        return make_version(self.epoch, self.engine.k)

    def save(self) -> None:
        self.runs.publish([], self.state())

    def state(self) -> ShardState:
        assert self.journal is not None
        return present(self.saved, self.tables, self.applied, self.journal.end)

    def run(self, kind: str, table: TableDef, ids: list[int], value: float = 1.0) -> None:
        if not ids:
            return
        values = np.full((len(ids), 0 if kind == ERASE else table.dim), value, np.float32)
        rows = CheckedRows(table, np.array(ids, np.uint64), values, np.empty(0, np.uint64), table.optimizer.check_hyper({}))
        batch, version = Batch(kind, (rows,)), make_version(self.epoch, self.engine.k + 1)
        assert self.journal is not None
        self.journal.append(encode_entry(BatchEntry(version, batch, (self.tables.state(table).step,), ())))
        self.journal.commit()
        self.engine.run(batch, version, never)

    def flush(self) -> None:
        flush = LogFlush(self.runs, self.tables, self.read, lambda: self.applied)
        for _ in chain(flush.steps(self.state), flush.merges()):
            pass

    def known(self, table: TableDef) -> set[int]:
        return set(all_rows(self.tables.state(table))[0].tolist())

    def check(self) -> None:
        """Every row that the index knows lies in storage at its version, and comes out of journal and row log as it lies there."""
        for table in TABLES.values():
            state = self.tables.state(table)
            ids, versions = all_rows(state)
            size = table.record.size_bytes
            part = ReadPart(table.keys(ids, pages=False), size, size)
            got = self.store.rows.read([part], Deadline.after(60))[0].in_key_order()
            assert got.found.all()
            assert table.record.versions(got.records).tolist() == versions.tolist()
            assert self.reconstructor.records([WantedVersions(state, ids, versions)])[0].tobytes() == got.records.tobytes()


def find_table(name: str, schema: int) -> TableDef:
    return TABLES[name]


def never(error: StorageError, pause_s: float) -> None:
    raise error


def some_slots(which: int) -> np.ndarray:
    """About half of the slots of either table's rows."""
    return np.arange(N_SLOTS) // 64 % 2 == which


def within(table: TableDef, slots: np.ndarray, ids: list[int]) -> list[int]:
    array = np.array(ids, np.uint64)
    return array[slots[table.placement.slots(array)]].tolist() if ids else []


def hand_over(giver: Shard, taker: Shard, slots: np.ndarray, meanwhile: Callable[[], None] = lambda: None) -> None:
    if taker.epoch <= giver.epoch:
        taker.save()
        taker.start(above=giver.epoch)
    for _ in range(2):
        for _ in taker.taker.read_ahead(taker.taker.behind(giver.given.entries(slots))):
            pass
        meanwhile()
    taker.taker.take(giver.given.entries(slots), giver.epoch)
    giver.giver.drop(slots)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Shard, Shard]]:
    shards = new_pair(tmp_path)
    yield shards
    for shard in shards:
        shard.close()


def new_pair(folder: Path, *, on_disk: bool = False) -> tuple[Shard, Shard]:
    number = next(_NUMBERS)
    nodes = (f"handover-{number}-a:1", f"handover-{number}-b:1")
    MemoryStore(StorageConfig("memory", nodes), role="shard:0").provision(b"c" * 16, b"g" * 8, Deadline.after(60), 2)
    return Shard(folder / "0", nodes, 0, on_disk=on_disk), Shard(folder / "1", nodes, 1, on_disk=on_disk)


def test_the_taker_knows_rows_and_steps_and_goes_on_from_them(pair: tuple[Shard, Shard]) -> None:
    giver, taker = pair
    for value in (1.0, 0.5, -2.0):
        giver.run(APPLY, ADAM, IDS.tolist(), value)
        giver.run(APPLY, HALF, IDS[:5].tolist(), value)
    hand_over(giver, taker, EVERY, lambda: giver.run(APPLY, ADAM, [1, 2], 3.0))
    assert (giver.known(ADAM), giver.known(HALF)) == (set(), set())
    assert (taker.known(ADAM), taker.known(HALF)) == (set(IDS.tolist()), set(range(5)))
    assert (taker.tables.state(ADAM).step, taker.tables.state(HALF).step) == (5, 3)
    taker.check()
    taker.run(APPLY, ADAM, [0, 1, 11], 0.3)
    taker.run(ERASE, ADAM, [2])
    taker.check()
    taker.save()
    taker.start()
    taker.check()


def test_rows_taken_before_the_first_flush_are_known_after_a_restart_that_leaves_them_on_disk(tmp_path: Path) -> None:
    giver, taker = new_pair(tmp_path, on_disk=True)
    giver.run(APPLY, ADAM, IDS.tolist())
    hand_over(giver, taker, EVERY)
    taker.save()
    taker.start()
    assert taker.known(ADAM) == set(IDS.tolist())
    assert taker.tables.state(ADAM).n_rows == len(IDS)
    taker.check()
    taker.flush()
    taker.check()
    for shard in (giver, taker):
        shard.close()


def test_only_rows_that_changed_are_read_again(pair: tuple[Shard, Shard], monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker = pair
    giver.run(APPLY, ADAM, IDS.tolist())
    taker.start(above=giver.epoch)
    ahead = giver.given.entries(EVERY)
    assert sum(taker.taker.read_ahead(ahead)) == len(IDS)
    giver.run(APPLY, ADAM, [3, 4])
    giver.run(ERASE, ADAM, [5])
    giver.run(APPLY, ADAM, [100])
    read: list[int] = []
    monkeypatch.setattr(taker.taker, "_read", lambda state, ids: read.extend(ids.tolist()) or taker.read(state, ids))
    taker.taker.take(giver.given.entries(EVERY), giver.epoch)
    assert sorted(read) == [3, 4, 100]
    assert taker.known(ADAM) == {*IDS.tolist(), 100} - {5}
    taker.check()


def test_rows_that_changed_while_they_were_read_ahead_are_read_ahead_again(
    pair: tuple[Shard, Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    giver, taker = pair
    giver.run(APPLY, ADAM, IDS.tolist())
    taker.start(above=giver.epoch)
    assert sum(taker.taker.read_ahead(giver.given.entries(EVERY))) == len(IDS)
    giver.run(APPLY, ADAM, [3, 4])
    giver.run(ERASE, ADAM, [5])
    giver.run(APPLY, ADAM, [100])
    (behind,) = taker.taker.behind(giver.given.entries(EVERY))
    assert behind.ids.tolist() == [3, 4, 100]
    assert sum(taker.taker.read_ahead([behind])) == 3
    assert taker.taker.behind(giver.given.entries(EVERY)) == []
    monkeypatch.setattr(taker.taker, "_read", None)  # nothing is left to be read while trainers wait
    taker.taker.take(giver.given.entries(EVERY), giver.epoch)
    taker.check()
    taker.save()
    taker.start()
    taker.check()


def test_a_taker_whose_epoch_is_not_above_the_givers_takes_nothing(pair: tuple[Shard, Shard]) -> None:
    giver, taker = pair
    giver.run(APPLY, ADAM, [1])
    with pytest.raises(FencedError, match="in epoch 1 cannot be taken by one in epoch 1"):
        taker.taker.take(giver.given.entries(EVERY), giver.epoch)
    assert taker.known(ADAM) == set()


def test_a_row_that_storage_lost_is_not_taken(pair: tuple[Shard, Shard]) -> None:
    giver, taker = pair
    giver.run(APPLY, ADAM, IDS.tolist())
    taker.start(above=giver.epoch)
    memory_node(giver.nodes[0]).flush()
    memory_node(giver.nodes[1]).flush()
    with pytest.raises(StorageError):
        taker.taker.take(giver.given.entries(EVERY), giver.epoch)
    assert taker.known(ADAM) == set()
    assert giver.known(ADAM) == set(IDS.tolist())


def test_a_row_that_is_older_in_storage_is_named(pair: tuple[Shard, Shard]) -> None:
    giver, taker = pair
    giver.run(APPLY, ADAM, [1, 2])
    taker.start(above=giver.epoch)
    giver.tables.state(ADAM).applied(np.array([2], np.uint64), make_version(1, 9))
    with pytest.raises(LostRowError, match=r"'adam', id 2: version \(1, 1\) in storage, expected version \(1, 9\) by the shard that hands"):
        taker.taker.take(giver.given.entries(EVERY), giver.epoch)
    assert taker.known(ADAM) == set()


def test_a_full_disk_while_rows_are_taken_leaves_the_taker_as_it_was(pair: tuple[Shard, Shard], monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker = pair
    giver.run(APPLY, ADAM, IDS.tolist())
    taker.start(above=giver.epoch)

    def full(*args: object, **kwargs: object) -> None:
        raise JournalFullError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(taker.runs, "publish", full)
        with pytest.raises(JournalFullError):
            taker.taker.take(giver.given.entries(EVERY), giver.epoch)
        assert taker.known(ADAM) == set()
    taker.taker.take(giver.given.entries(EVERY), giver.epoch)
    taker.check()


def test_a_disk_that_was_full_when_the_runs_were_to_count_can_be_tried_again(
    pair: tuple[Shard, Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    giver, taker = pair
    giver.run(APPLY, ADAM, IDS.tolist())
    taker.start(above=giver.epoch)
    assert sum(taker.taker.read_ahead(giver.given.entries(EVERY))) == len(IDS)

    def full(*args: object) -> None:
        raise JournalFullError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(taker.runs, "_replace", full)
        with pytest.raises(JournalFullError):
            taker.taker.take(giver.given.entries(EVERY), giver.epoch)
    taker.taker.take(giver.given.entries(EVERY), giver.epoch)
    taker.check()


def test_an_abort_leaves_no_trace_at_the_taker(pair: tuple[Shard, Shard]) -> None:
    giver, taker = pair
    giver.run(APPLY, ADAM, IDS.tolist())
    taker.run(APPLY, HALF, [1])
    taker.save()
    taker.start(above=giver.epoch)
    moving = EVERY.copy()
    moving[HALF.placement.slots(np.array([1], np.uint64))] = False
    taker.taker.take(giver.given.entries(moving), giver.epoch)
    assert taker.giver.drop(moving) > 0
    assert taker.giver.drop(moving) == 0
    taker.start()
    assert (taker.known(ADAM), taker.known(HALF)) == (set(), {1})
    giver.run(APPLY, ADAM, IDS.tolist(), 2.0)
    giver.check()
    hand_over(giver, taker, moving)
    taker.check()


def test_a_row_that_was_erased_elsewhere_and_created_here_anew_is_not_made_from_what_it_once_was(pair: tuple[Shard, Shard]) -> None:
    first, second = pair
    first.run(APPLY, ADAM, [1, 2], 5.0)
    hand_over(first, second, EVERY)
    second.run(ERASE, ADAM, [1])
    hand_over(second, first, EVERY)
    first.run(APPLY, ADAM, [1, 2], 0.25)
    first.check()
    first.flush()
    first.check()


def test_a_giver_whose_disk_is_full_when_it_drops_rows_still_knows_all(pair: tuple[Shard, Shard], monkeypatch: pytest.MonkeyPatch) -> None:
    giver, _ = pair
    giver.run(APPLY, ADAM, IDS.tolist())
    giver.run(ERASE, ADAM, [3])
    giver.flush()
    giver.run(APPLY, ADAM, [3, 4])
    giver.save()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(giver.saved, "replace", full)
        with pytest.raises(JournalFullError, match="No space left"):
            giver.giver.drop(EVERY)
    giver.check()
    giver.start()
    assert giver.known(ADAM) == set(IDS.tolist())
    assert giver.giver.drop(EVERY) == len(IDS)
    giver.start()
    assert (giver.known(ADAM), giver.tables.state(ADAM).n_rows) == (set(), 0)


def size_of_runs(shard: Shard) -> int:
    return sum(path.stat().st_size for path in (shard.folder / "snapshot").glob("*.run"))


def test_what_a_hand_over_writes_is_of_the_rows_that_move_whatever_the_number_of_those_that_stay(pair: tuple[Shard, Shard]) -> None:
    giver, taker = pair
    for shard in pair:
        for start in range(0, 40_000, 10_000):
            mine = np.arange(start, start + 10_000) + 100_000 * shard.number
            shard.run(APPLY, ADAM, mine.tolist())
        shard.flush()
        shard.save()
    moving = np.zeros(N_SLOTS, bool)
    moving[:100] = True
    n_rows = len(giver.given.entries(moving)[0].ids)
    assert 0 < n_rows < 2_000
    taker.start(above=giver.epoch)
    before = [size_of_runs(shard) for shard in pair]
    hand_over(giver, taker, moving)
    for shard, size_bytes in zip(pair, before, strict=True):
        assert 0 < size_of_runs(shard) - size_bytes < (ADAM.record.size_bytes + 16) * n_rows + 16_000
        known = shard.known(ADAM)
        shard.start()
        assert shard.known(ADAM) == known
        shard.check()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([APPLY, APPLY, ASSIGN, ERASE]), st.sampled_from(sorted(TABLES)), st.sets(st.sampled_from(IDS.tolist()))),
        st.tuples(st.just("hand over"), st.sampled_from([0, 1]), st.sampled_from([0, 1])),
        st.tuples(st.sampled_from(["flush", "start", "save"]), st.sampled_from([0, 1]), st.none()),
    ),
    min_size=4,
    max_size=25,
)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(STEPS, st.booleans())
def test_slots_that_go_back_and_forth_lose_and_mistake_no_row(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple], on_disk: bool
) -> None:
    slot_taker_slice = slot_taker._SLICE_BYTES
    slot_taker._SLICE_BYTES = 100
    shards = new_pair(tmp_path_factory.mktemp("pair"), on_disk=on_disk)
    owner = np.zeros(N_SLOTS, int)  # shard 0 has all
    exist: dict[str, set[int]] = {name: set() for name in TABLES}
    try:
        for number, (what, one, other) in enumerate(drawn):
            if what == "hand over":
                slots = some_slots(one) & (owner == other)
                hand_over(shards[other], shards[1 - other], slots)
                owner[slots] = 1 - other
            elif what == "flush":
                shards[one].flush()
            elif what == "start":
                shards[one].save()
                shards[one].start()
            elif what == "save":
                shards[one].save()
            else:
                for at, shard in enumerate(shards):
                    shard.run(what, TABLES[one], within(TABLES[one], owner == at, sorted(other)), 1.0 + number / 8)
                exist[one] = exist[one] - other if what == ERASE else exist[one] | other
            for shard in shards:
                shard.check()
        for name, table in TABLES.items():
            known = [shard.known(table) for shard in shards]
            assert [shard.tables.state(table).n_rows for shard in shards] == [len(ids) for ids in known]
            assert not known[0] & known[1]
            assert known[0] | known[1] == exist[name]
    finally:
        slot_taker._SLICE_BYTES = slot_taker_slice
        for shard in shards:
            shard.close()
