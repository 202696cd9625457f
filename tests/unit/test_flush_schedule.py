"""When a flush to the row log is due, and that what the journal lets go can still be restored."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from memory_store import MemoryStore, memory_node

import kvemb.init
import kvemb.optim
from kvemb.config import StorageConfig
from kvemb.errors import FencedError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from paramserver.apply.background import BackgroundWork
from paramserver.engine.engine import Engine
from paramserver.engine.storage_pace import NO_BATCH
from paramserver.ingest.sessions import Sessions
from paramserver.ingest.sync_steps import Membership
from paramserver.journal import BatchEntry, Journal, Position, encode_entry
from paramserver.journal.segment import HEADER_SIZE
from paramserver.journal.write_ahead_log import AppliedMark, FencedLog
from paramserver.model import tables
from paramserver.model.batch import APPLY, Batch, CheckedRows
from paramserver.model.tables import Tables
from paramserver.model.transition import Timeline
from paramserver.recovery.replay import Recovery
from paramserver.repair.repairer import Repairer
from paramserver.row_log import Reconstructor, Runs, log_flush
from paramserver.row_log.log_flush import FlushSchedule, LogFlush, from_storage
from tests.unit.run_states import present, saved_in

_NUMBERS = count()
ADAM = TableDef("adam", 4, kvemb.optim.adam(lr=0.1), kvemb.init.uniform())
IDS = np.arange(2000, dtype=np.uint64)
MAX_BYTES = 256 << 10


def fail(error: StorageError, pause_s: float) -> None:
    raise error


class Shard:
    """Engine, journal, row log and repair of one shard, without its threads."""

    def __init__(self, folder: Path, index_bytes: int | None = None) -> None:
        self.store = MemoryStore(StorageConfig("memory", (f"flushes-{next(_NUMBERS)}:1",)), role="shard:0")
        self.store.provision(b"c" * 16, b"g" * 8, Deadline.after(60))
        self.store.open(Deadline.after(60))
        self.journal = Journal(folder / "journal", "os", segment_bytes=MAX_BYTES // 8)
        folder.mkdir(exist_ok=True)
        self.saved = saved_in(folder)
        self.runs = Runs(folder / "snapshot", self.saved)
        self.tables = Tables([], log=self.runs, index_bytes=index_bytes)
        self.mark = AppliedMark(0, self.journal.end)
        reconstructor = Reconstructor(lambda: self.runs.view, self.journal, lambda name, schema: ADAM)
        self.repairer = Repairer(
            self.store, self.tables, 0, timeline=Timeline(1), reconstruct=reconstructor.records, timeout_s=5, metas=lambda: []
        )
        self.engine = Engine(self.store, self.tables, Timeline(1), k=0, timeout_s=5, repair=self.repairer)
        applied = lambda: make_version(1, self.engine.k)  # noqa: E731
        self.n_flushes = 0
        self.flushes = FlushSchedule(
            FencedLog(self.journal, lambda: None),
            LogFlush(self.runs, self.tables, from_storage(self.store, 5), applied),
            self.tables,
            self.mark,
            repair=self.repairer,
            state=lambda position: present(self.saved, self.tables, applied(), position),
            max_bytes=MAX_BYTES,
            held=lambda: self.held,
            wake=lambda: None,
        )
        self.held = False
        self.background = BackgroundWork([self.flushes])

    def push(self, ids: np.ndarray = IDS) -> bool:
        """Journal and apply one batch, then the background work once; return whether there is more to do."""
        values = np.ones((len(ids), ADAM.dim), np.float32)
        batch = Batch(APPLY, (CheckedRows(ADAM, ids, values, np.empty(0, np.uint64), ADAM.optimizer.check_hyper({})),))
        version = make_version(1, self.engine.k + 1)
        end = self.journal.append(encode_entry(BatchEntry(version, batch, (self.engine.k,), ())))
        self.journal.commit()
        self.engine.run(batch, version, fail)
        self.mark.reach(self.engine.k, end)
        return self.step()

    def step(self) -> bool:
        """Do the background work once; return whether there is more to do."""
        before = self.runs.cut
        more = self.background.step(fail)
        self.n_flushes += self.runs.cut != before
        return more

    def records(self) -> bytes:
        return b"".join(value for key, (value, _) in sorted(memory_node(self.store.nodes.addresses[0]).values.items()) if len(key) == 14)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    made = Shard(tmp_path)
    yield made
    made.runs.close()
    made.journal.close()


def test_the_journal_stays_bounded_and_every_row_can_still_be_restored(shard: Shard) -> None:
    largest = 0
    for number in range(60):
        shard.push(IDS[number % 7 :: 3])
        largest = max(largest, shard.journal.size_bytes)
    assert shard.n_flushes >= 2
    assert largest < 3 * MAX_BYTES
    assert shard.journal.start.segment > 1
    before = shard.records()
    memory_node(shard.store.nodes.addresses[0]).flush()
    assert shard.repairer.nodes(NO_BATCH, fail) == 1
    assert shard.records() == before


def test_the_journal_stays_bounded_where_batches_are_larger_than_a_slice_of_the_flush(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramserver.row_log.log_flush._SLICE_BYTES", 200 * ADAM.record.size_bytes)
    largest = 0
    for number in range(80):
        shard.push(IDS + np.uint64(number * len(IDS)))  # ten slices
        largest = max(largest, shard.journal.size_bytes)
    assert largest < 7 * MAX_BYTES


def test_a_batch_on_a_lost_node_is_completed_after_its_repair(shard: Shard) -> None:
    for _ in range(3):
        shard.push()
    expected = Shard(shard.runs._folder.parent / "other")
    for _ in range(4):
        expected.push()
    memory_node(shard.store.nodes.addresses[0]).flush()
    shard.push()
    assert shard.records() == expected.records()
    assert shard.repairer.figures.rows == len(IDS)
    expected.runs.close()
    expected.journal.close()


def test_a_flush_that_is_asked_for_is_answered_when_it_counts(shard: Shard) -> None:
    shard.push()
    done = shard.flushes.flush_behind()
    assert done.is_set(), "the journal brings that forward in no time"
    done = shard.flushes.ask()
    shard.flushes.give_up()
    while shard.step():
        assert not done.is_set() or shard.n_flushes
    assert (done.is_set(), shard.n_flushes) == (True, 1)
    assert (shard.runs.cut, shard.flushes.behind_bytes) == (make_version(1, 1), 0)


def test_a_journal_that_is_read_is_cut_later(shard: Shard) -> None:
    shard.held = True
    while not shard.n_flushes:
        shard.push()
    assert shard.journal.start.segment == 1
    shard.held = False
    while shard.n_flushes == 1:
        shard.push()
    assert shard.journal.start.segment > 1


def test_an_index_that_is_too_large_is_flushed_before_the_journal_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_UNPUBLISHED_BYTES", 0)
    monkeypatch.setattr(log_flush, "_LOOK_BYTES", 0)
    shard = Shard(tmp_path / "bounded", index_bytes=0)
    shard.flushes._limit_bytes = 1 << 40
    for number in range(4):
        shard.push(IDS[number::5])
        while shard.step():
            pass
    before = shard.records()
    assert shard.n_flushes == 4
    assert (shard.tables.state(ADAM).n_rows, len(shard.tables.state(ADAM)._index)) == (
        len(np.concatenate([IDS[n::5] for n in range(4)])),
        0,
    )
    memory_node(shard.store.nodes.addresses[0]).flush()
    assert shard.repairer.nodes(NO_BATCH, fail) == 1
    assert shard.records() == before
    shard.runs.close()
    shard.journal.close()


@pytest.mark.parametrize("value", [b"", b"of another program", bytes(ADAM.record.size_bytes)])
def test_a_value_of_another_program_is_written_over_and_the_log_is_flushed(shard: Shard, value: bytes) -> None:
    shard.flushes._limit_bytes = 1 << 40
    for _ in range(2):
        shard.push()
    before, node = shard.records(), memory_node(shard.store.nodes.addresses[0])
    for key in ADAM.keys(IDS[::500], pages=False).encode():
        node.put(bytes(key), value)
    shard.flushes.ask()
    for _ in range(99):
        shard.step()
        if shard.n_flushes:
            break
    assert shard.records() == before
    assert (shard.n_flushes, shard.repairer.figures.rows) == (1, len(IDS[::500]))


def test_a_node_lost_before_a_replay_is_in_use_again_only_with_the_rows_of_the_journals_end(shard: Shard) -> None:
    shard.flushes._limit_bytes = 1 << 40
    shard.push(IDS[:1000])
    for _ in range(5):
        shard.push()
    expected = shard.records()
    memory_node(shard.store.nodes.addresses[0]).flush()
    replayed = Tables([])
    repairer = Repairer(
        shard.store,
        replayed,
        0,
        timeline=Timeline(2),
        reconstruct=Reconstructor(lambda: shard.runs.view, shard.journal, lambda name, schema: ADAM).records,
        timeout_s=5,
        metas=lambda: [],
    )
    engine = Engine(shard.store, replayed, Timeline(2), k=0, timeout_s=5, repair=repairer)
    seen: list[bytes] = []
    recovery = Recovery(shard.journal, Position(1, HEADER_SIZE), 0, lambda name, schema: ADAM).scan()
    run = engine.run
    engine.run = lambda *args, **options: (run(*args, **options), seen.append(shard.records()))[0]  # type: ignore[method-assign,func-returns-value]
    recovery.run(engine, replayed, Sessions(True), Membership(0), fail)
    assert len(seen) == 6
    assert set(seen) == {expected}
    assert replayed.state(ADAM).n_rows == len(IDS)


def test_a_process_that_was_shut_out_discards_no_journal(shard: Shard) -> None:
    def not_ours() -> None:
        raise FencedError("not ours")

    shard.flushes._limit_bytes = 1 << 40
    for _ in range(9):
        shard.push()
    start = shard.journal.start
    fenced_log = FencedLog(shard.journal, not_ours)
    with pytest.raises(FencedError):
        fenced_log.discard_before(shard.mark.now[1])
    assert shard.journal.start == start
    FencedLog(shard.journal, lambda: None).discard_before(shard.mark.now[1])
    assert shard.journal.start > start
