"""When a local snapshot is due, and that what the journal lets go can still be restored."""

import shutil
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
from kvemb.schema.record import make_version, split_version
from kvemb.schema.table_def import TableDef
from paramserver.apply.background import BackgroundWork
from paramserver.engine.engine import Engine
from paramserver.engine.piece_writer import EnginePorts
from paramserver.engine.storage_pace import NO_BATCH
from paramserver.ingest.sessions import Sessions
from paramserver.ingest.sync_steps import Membership
from paramserver.journal import BatchEntry, Journal, Position, encode_entry
from paramserver.journal.segment import HEADER_SIZE
from paramserver.journal.write_ahead_log import FencedLog
from paramserver.model.batch import APPLY, Batch, CheckedRows
from paramserver.model.tables import Tables
from paramserver.model.transition import Timeline
from paramserver.recovery.replay import Recovery
from paramserver.repair.repairer import Repairer
from paramserver.repair.scrub import Scrub
from paramserver.snapshot import Reconstructor, Runs, Snapshotter
from paramserver.snapshot.snapshot_schedule import LocalSnapshots, reaches_back
from paramserver.snapshot.snapshotter import from_storage
from tests.unit.lonely_engine import NO_OBSERVER

_NUMBERS = count()
ADAM = TableDef("adam", 4, kvemb.optim.adam(lr=0.1), kvemb.init.uniform())
IDS = np.arange(2000, dtype=np.uint64)
MAX_BYTES = 256 << 10


def fail(error: StorageError, pause_s: float) -> None:
    raise error


class Shard:
    """Engine, journal, snapshots and repair of one shard, without its threads."""

    def __init__(self, folder: Path) -> None:
        self.store = MemoryStore(StorageConfig("memory", (f"snapshots-{next(_NUMBERS)}:1",)), role="shard:0")
        self.store.provision(b"c" * 16, b"g" * 8, Deadline.after(5))
        self.store.open(Deadline.after(5))
        self.journal = Journal(folder / "journal", "os", segment_bytes=MAX_BYTES // 8)
        self.runs = Runs(folder / "snapshot")
        self.tables = Tables([])
        self.applied = self.journal.end
        self.saved: list[Position] = []
        reconstructor = Reconstructor(self.runs, self.journal, lambda name, schema: ADAM)
        self.repairer = Repairer(
            self.store, self.tables, 0, timeline=Timeline(1), reconstruct=reconstructor.records, timeout_s=5, metas=lambda: []
        )
        self.engine = Engine(self.store, self.tables, Timeline(1), k=0, timeout_s=5, ports=EnginePorts(self.repairer, NO_OBSERVER))
        self.snapshots = LocalSnapshots(
            FencedLog(self.journal, lambda: None),
            Snapshotter(self.runs, from_storage(self.store, 5), lambda: make_version(1, self.engine.k)),
            self.tables.all,
            save=lambda position, pause: self.saved.append(position),
            max_bytes=MAX_BYTES,
        )
        self.background = BackgroundWork(
            self.repairer, self.snapshots, Scrub(self.repairer, self.tables, 1, timeout_s=5, clock=lambda: 0.0), lambda: None
        )

    def push(self, ids: np.ndarray = IDS) -> bool:
        """Journal and apply one batch, then the background work once; return whether there is more to do."""
        values = np.ones((len(ids), ADAM.dim), np.float32)
        batch = Batch(APPLY, (CheckedRows(ADAM, ids, values, np.empty(0, np.uint64), ADAM.optimizer.check_hyper({})),))
        version = make_version(1, self.engine.k + 1)
        end = self.journal.append(encode_entry(BatchEntry(version, batch, (self.engine.k,), ())))
        self.journal.commit()
        self.engine.run(batch, version, fail)
        self.applied = end
        return self.step()

    def step(self) -> bool:
        """Do the background work once; return whether there is more to do."""
        return self.background.step(self.applied, fail)

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
    assert shard.snapshots.taken >= 2
    assert largest < 3 * MAX_BYTES
    assert shard.journal.start.segment > 1
    before = shard.records()
    memory_node(shard.store.nodes.addresses[0]).flush()
    assert shard.repairer.nodes(NO_BATCH, fail) == 1
    assert shard.records() == before


def test_an_image_is_saved_before_the_snapshot_counts(shard: Shard) -> None:
    cuts: list[int] = []
    shard.snapshots._save = lambda position, pause: cuts.append(shard.runs.cut)
    while not shard.snapshots.taken:
        shard.push()
    assert cuts == [0]
    assert shard.runs.cut > 0


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


def test_rows_that_no_journal_has_are_due_at_once(shard: Shard) -> None:
    assert reaches_back(shard.journal, 0, 0, lambda name, schema: ADAM)
    assert not reaches_back(shard.journal, 0, 5, lambda name, schema: ADAM)
    shard.push()
    assert reaches_back(shard.journal, 0, 1, lambda name, schema: ADAM)
    assert shard.snapshots.taken == 0
    shard.snapshots.due_bytes = -1
    while shard.step():
        pass
    assert shard.snapshots.taken == 1


@pytest.mark.parametrize("value", [b"", b"of another program", bytes(ADAM.record.size_bytes)])
def test_a_value_of_another_program_is_written_over_and_the_snapshot_is_taken(shard: Shard, value: bytes) -> None:
    shard.snapshots.due_bytes = 1 << 40
    for _ in range(2):
        shard.push()
    before, node = shard.records(), memory_node(shard.store.nodes.addresses[0])
    for key in ADAM.keys(IDS[::500], pages=False).encode():
        node.put(bytes(key), value)
    shard.snapshots.due_bytes = -1
    for _ in range(99):
        shard.step()
        if shard.snapshots.taken:
            break
    assert shard.records() == before
    assert (shard.snapshots.taken, shard.repairer.figures.rows) == (1, len(IDS[::500]))


def test_a_node_lost_before_a_replay_is_in_use_again_only_with_the_rows_of_the_journals_end(shard: Shard) -> None:
    shard.snapshots.due_bytes = 1 << 40
    shard.push(IDS[:1000])
    for _ in range(5):
        shard.push()
    expected = shard.records()
    memory_node(shard.store.nodes.addresses[0]).flush()
    tables = Tables([])
    repairer = Repairer(
        shard.store,
        tables,
        0,
        timeline=Timeline(2),
        reconstruct=Reconstructor(shard.runs, shard.journal, lambda name, schema: ADAM).records,
        timeout_s=5,
        metas=lambda: [],
    )
    engine = Engine(shard.store, tables, Timeline(2), k=0, timeout_s=5, ports=EnginePorts(repairer, NO_OBSERVER))
    seen: list[bytes] = []
    recovery = Recovery(shard.journal, Position(1, HEADER_SIZE), 0, lambda name, schema: ADAM).scan()
    run = engine.run
    engine.run = lambda *args, **options: (run(*args, **options), seen.append(shard.records()))[0]  # type: ignore[method-assign,func-returns-value]
    recovery.run(engine, tables, Sessions(True), Membership(0), fail)
    assert len(seen) == 6
    assert set(seen) == {expected}
    assert tables.state(ADAM).n_rows == len(IDS)


def test_a_snapshot_from_before_a_time_without_a_journal_does_not_reach_back(shard: Shard) -> None:
    def find(name: str, schema: int) -> TableDef:
        return ADAM

    while not shard.snapshots.taken:
        shard.push()
    cut, k = shard.runs.cut, shard.engine.k
    assert reaches_back(shard.journal, cut, k, find)
    empty = Journal(shard.journal._folder.parent / "empty", "os")
    held = split_version(cut)[1]
    assert reaches_back(empty, cut, held, find)
    assert not reaches_back(empty, cut, held + 1, find)
    assert reaches_back(empty, make_version(2, 0), k, find)  # a load's
    empty.close()
    shard.journal.close()
    shutil.rmtree(shard.journal._folder)
    shard.journal = Journal(shard.journal._folder, "os")
    shard.engine.k += 3
    shard.push()
    assert not reaches_back(shard.journal, cut, shard.engine.k, find)


def test_a_process_that_was_shut_out_discards_no_journal(shard: Shard) -> None:
    def not_ours() -> None:
        raise FencedError("not ours")

    shard.snapshots.due_bytes = 1 << 40
    for _ in range(9):
        shard.push()
    start = shard.journal.start
    fenced_log = FencedLog(shard.journal, not_ours)
    with pytest.raises(FencedError):
        fenced_log.discard_before(shard.applied)
    assert shard.journal.start == start
    FencedLog(shard.journal, lambda: None).discard_before(shard.applied)
    assert shard.journal.start > start
