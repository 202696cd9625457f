"""A save is an exact cut: rows may change while they are streamed, the checkpoint holds them as they were."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matrix import one_of
from memory_store import MemoryStore
from numpy.typing import NDArray

from kvemb import optim
from kvemb.arrays.record_cache import CacheBudget
from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import MANIFEST, BaseCheckpoint, CheckpointManifest
from kvemb.checkpoint.format.manifest_json import encode_manifest
from kvemb.checkpoint.verify import verify
from kvemb.checkpoint.writer import SaveInfo, assemble, read_fragment
from kvemb.config import StorageConfig
from kvemb.errors import BaseOutdatedError, CheckpointError, DeadlineExceededError
from kvemb.init import uniform
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart
from paramserver.checkpoint.save_job import SaveFigures, SaveJob, SaveOrder
from paramserver.checkpoint.saver import Saver
from paramserver.engine.engine import Engine
from paramserver.journal import BatchEntry, Journal, encode_entry
from paramserver.journal.write_ahead_log import FencedLog
from paramserver.model.batch import APPLY, ASSIGN, ERASE, Batch, CheckedRows
from paramserver.model.tables import Tables
from paramserver.model.transition import Timeline
from paramserver.recovery.known_rows import known_tables
from paramserver.row_log import Runs, sorted_run
from paramserver.row_log.log_flush import LogFlush, from_storage
from paramserver.row_log.state_file import ShardState
from tests.unit.lonely_engine import ALONE
from tests.unit.run_states import all_rows, present, saved_in

USER = TableDef("user", 3, optim.adam(lr=0.1), uniform())
ITEM = TableDef("item", 2, optim.sgd(lr=1.0), uniform(), dtype="bfloat16")
Contents = dict[str, dict[int, bytes]]


class Shard:
    """Engine and saver of the one shard of a cluster, without processes."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.store = MemoryStore(StorageConfig("memory", (f"{name}-a:1", f"{name}-b:1")), role="shard:0")
        self.store.provision(b"c" * 16, b"g" * 8, Deadline.after(60))
        self.store.open(Deadline.after(60))
        self.n_ahead = 0  # batches that are acknowledged and not applied
        self.flushes = True  # whether the shard flushes before a save
        self.saved = saved_in(folder)
        self.begin_epoch(3, 0)

    def begin_epoch(self, epoch: int, k: int) -> None:
        """Be a new process."""
        if k:
            self.runs.publish([], self.present())
            self.journal.close()
            self.runs.close()
        self.journal = Journal(self.folder / "journal", "os")
        self.runs = Runs(self.folder / "snapshot", self.saved, limit=2, epoch=epoch)
        budget = CacheBudget(0)
        known = known_tables(self.saved.now, self.runs, self.journal, self.find, budget=budget, index_bytes=0)
        self.tables = Tables(known, log=self.runs, index_bytes=0)
        timeline = Timeline(epoch, k)
        self.engine = Engine(self.store, self.tables, timeline, k=k, timeout_s=5, repair=ALONE)
        parts = SimpleNamespace(
            shard=0,
            tables=self.tables,
            engine=self.engine,
            runs=self.runs,
            saved=self.saved,
            fenced_log=FencedLog(self.journal, lambda: None),
            registry=SimpleNamespace(reloaded=lambda: [ITEM, USER], find_key=self.find),
            timeline=timeline,
        )
        self.saver = Saver(parts, self.store.nodes, lambda: self.engine.k + self.n_ahead, self.flush, self.folder)  # type: ignore[arg-type]

    def find(self, name: str, schema: int = 0) -> TableDef:
        return {"user": USER, "item": ITEM}[name]

    def present(self) -> ShardState:
        return present(self.saved, self.tables, make_version(self.engine.epoch, self.engine.k), self.journal.end)

    def flush(self) -> threading.Event:
        """Flush to the row log, unless that is to be left to the journal."""
        applied = make_version(self.engine.epoch, self.engine.k)
        flush = LogFlush(self.runs, self.tables, from_storage(self.store, 5), lambda: applied)
        for _ in chain(flush.steps(self.present), flush.merges()) if self.flushes else ():
            pass
        (done := threading.Event()).set()
        return done

    def run(self, kind: str, definition: TableDef, ids: NDArray[np.int64], value: float = 1.0) -> None:
        """Apply a batch."""

        def never(error: Exception, pause_s: float) -> None:
            raise error

        some = np.unique(ids).astype(np.uint64)
        values = np.full((len(some), 0 if kind == ERASE else definition.dim), value, np.float32)
        rows = CheckedRows(definition, some, values, np.empty(0, np.uint64), definition.optimizer.check_hyper({}))
        batch, version = Batch(kind, (rows,)), make_version(self.engine.epoch, self.engine.k + 1)
        self.journal.append(encode_entry(BatchEntry(version, batch, (self.tables.state(definition).step,), ())))
        self.journal.commit()
        self.engine.run(batch, version, never)

    def contents(self) -> Contents:
        """Weights and state of every row by table and id, as storage has them."""
        found: Contents = {}
        for definition in (ITEM, USER):
            ids = np.sort(all_rows(self.tables.state(definition))[0])
            size = definition.record.size_bytes
            got = self.store.rows.read([ReadPart(RowKeys(definition.tag, ids), size, size)], Deadline.after(60))[0].in_key_order()
            assert got.found.all()
            found[definition.name] = {int(i): bytes(record[4:]) for i, record in zip(ids, got.records, strict=True)}
        return found

    def begin(self, url: str, *, save_id: str = "1" * 32, base: CheckpointManifest | None = None, weights_only: bool = False) -> None:
        """Begin a save."""
        order = SaveOrder(save_id, url, 0 if base is None else base.cuts[0].version, weights_only)
        self.saver.begin(order, Deadline.after(60))

    def finish(
        self, url: str, *, save_id: str = "1" * 32, base: tuple[str, CheckpointManifest] | None = None, weights_only: bool = False
    ) -> CheckpointManifest:
        """Wait for the end of a save and write its manifest."""
        done = threading.Event()
        while self.saver.progress(save_id)[0] == "running":
            done.wait(0.005)
        assert self.saver.progress(save_id)[:2] == ("done", ""), self.saver.progress(save_id)
        storage = CheckpointStorage(url)
        fragment = read_fragment(storage, 0)
        assert fragment is not None
        on = None if base is None else BaseCheckpoint(base[0], base[1].save_id)
        manifest = assemble(SaveInfo(save_id, "demo", "c" * 32, 1, weights_only, on), [fragment])
        storage.write(MANIFEST, encode_manifest(manifest))
        return manifest


def loaded(url: str) -> Contents:
    """What the checkpoint holds."""
    verify(url).require_good()
    chain = open_chain(url)
    found: Contents = {}
    for saved in chain.newest.tables:
        rows = found.setdefault(saved.definition.name, {})
        for block in chain.rows(saved.definition, 0):
            records = block.records(saved.definition, block.versions)
            rows |= {int(i): bytes(record[4:]) for i, record in zip(block.ids, records, strict=True)}
    return found


@pytest.fixture
def shard(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shard:
    monkeypatch.setattr(sorted_run, "BLOCK_ROWS", 64)
    folder = tmp_path / "data"
    folder.mkdir()
    made = Shard(folder, request.node.name)
    for definition in (USER, ITEM):
        made.run(APPLY, definition, np.arange(300))
        made.run(APPLY, definition, np.arange(100))
    return made


@contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """Let something happen in the midst of each table of a save."""
    block = SaveJob._block

    def acting(*args: Any) -> Any:
        act()
        return block(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SaveJob, "_block", acting)
        yield


def stir(shard: Shard, seed: int) -> Callable[[], None]:
    """Changes rows of every kind at every call."""
    rng = np.random.default_rng(seed)

    def step() -> None:
        for _ in range(3):
            kind, definition = str(rng.choice([APPLY, APPLY, ASSIGN, ERASE])), (USER, ITEM)[rng.integers(2)]
            shard.run(kind, definition, rng.integers(0, 350, 40), float(rng.normal()))

    return step


@pytest.mark.parametrize("flushes", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_save_holds_the_rows_as_they_were_at_the_cut(shard: Shard, tmp_path: Path, seed: int, flushes: bool) -> None:
    stir(shard, seed + 7)()
    shard.flush()
    shard.flushes = flushes
    stir(shard, seed + 17)()
    expected = shard.contents()
    with meanwhile(lambda: (stir(shard, seed)(), shard.flush())):
        shard.begin(str(tmp_path / "a"))
        shard.finish(str(tmp_path / "a"))
    assert shard.contents() != expected
    assert loaded(str(tmp_path / "a")) == expected


def test_a_save_asks_storage_for_nothing(shard: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = shard.contents()
    shard.flushes = False
    monkeypatch.setattr(shard.store, "read", None)
    shard.begin(str(tmp_path / "a"))
    shard.finish(str(tmp_path / "a"))
    monkeypatch.undo()
    assert loaded(str(tmp_path / "a")) == expected


@pytest.mark.parametrize("seed", [0, *one_of(1, 2, 3, 4)])
def test_incremental_saves_on_top_of_each_other_are_exact_too(shard: Shard, tmp_path: Path, seed: int) -> None:
    url = str(tmp_path / "0")
    shard.begin(url)
    below = shard.finish(url)
    for number in range(1, 5):
        shard.run(APPLY, USER, np.arange(number * 10, number * 10 + 10))
        shard.run(ERASE, USER, np.arange(60 + number, 70))
        if number == 2:  # a restarted shard still knows which rows were erased before
            shard.begin_epoch(shard.engine.epoch + 1, shard.engine.k)
        shard.flushes = number % 2 == 0
        if number == 4:  # notes of erased rows are forgotten when all runs are merged
            for value in range(3):
                shard.run(APPLY, USER, np.arange(300), value)
                shard.run(APPLY, ITEM, np.arange(300), value)
                shard.flush()
        expected, url, save_id = shard.contents(), str(tmp_path / str(number)), f"{number:032x}"
        with meanwhile(stir(shard, seed)):
            shard.begin(url, save_id=save_id, base=below)
            below = shard.finish(url, save_id=save_id, base=(str(number - 1), below))
        roles = {file.role for file in below.files}
        assert ("rows" in roles, "erased" in roles or "ids" in roles) == (True, True)
        assert "ids" not in roles or number >= 4
        assert loaded(url) == expected


def test_an_incremental_save_writes_only_what_changed(shard: Shard, tmp_path: Path) -> None:
    shard.begin(str(tmp_path / "0"))
    first = shard.finish(str(tmp_path / "0"))
    shard.run(APPLY, USER, np.arange(7))
    shard.begin(str(tmp_path / "1"), save_id="2" * 32, base=first)
    second = shard.finish(str(tmp_path / "1"), save_id="2" * 32, base=("0", first))
    assert (first.n_rows, second.n_rows) == (600, 7)
    assert [file.role for file in second.files] == ["rows"]


def test_a_save_of_weights_only_has_no_slots(shard: Shard, tmp_path: Path) -> None:
    expected = {name: {i: row[: 8 + (12 if name == "user" else 4)] for i, row in rows.items()} for name, rows in shard.contents().items()}
    with meanwhile(stir(shard, 1)):
        shard.begin(str(tmp_path / "a"), weights_only=True)
        shard.finish(str(tmp_path / "a"), weights_only=True)
    found = {
        name: {i: row[: 8 + (12 if name == "user" else 4)] for i, row in rows.items()} for name, rows in loaded(str(tmp_path / "a")).items()
    }
    assert found == expected


def test_steps_are_those_of_the_cut(shard: Shard, tmp_path: Path) -> None:
    with meanwhile(lambda: shard.run(APPLY, USER, np.arange(3))):
        shard.begin(str(tmp_path / "a"))
        manifest = shard.finish(str(tmp_path / "a"))
    assert [(table.definition.name, table.steps) for table in manifest.tables] == [("item", (2,)), ("user", (2,))]
    assert (manifest.cuts[0].epoch, manifest.cuts[0].k) == (3, 4)


def test_a_save_waits_for_what_was_acknowledged(shard: Shard, tmp_path: Path) -> None:
    shard.n_ahead = 1
    with pytest.raises(DeadlineExceededError, match="acknowledged, but only batch"):
        shard.saver.begin(SaveOrder("1" * 32, str(tmp_path / "a"), 0, False), Deadline.after(0.01))


def test_a_save_waits_for_the_batch_under_way(shard: Shard, tmp_path: Path) -> None:
    with shard.engine.batch_boundary.batch(), pytest.raises(DeadlineExceededError, match="batch under way"):
        shard.saver.begin(SaveOrder("1" * 32, str(tmp_path / "a"), 0, False), Deadline.after(0.01))
    shard.begin(str(tmp_path / "a"))
    shard.finish(str(tmp_path / "a"))


def failed(shard: Shard, save_id: str = "1" * 32) -> str:
    done = threading.Event()
    while shard.saver.progress(save_id)[0] == "running":
        done.wait(0.005)
    state, error, *_ = shard.saver.progress(save_id)
    assert state == "failed"
    return error


def test_a_run_that_was_damaged_fails_the_save_and_nothing_else(shard: Shard, tmp_path: Path) -> None:
    shard.flush()
    for path in (shard.folder / "snapshot").glob("*.run"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    shard.flushes = False
    shard.begin(str(tmp_path / "a"))
    assert "JournalDamagedError" in failed(shard)
    shard.run(APPLY, USER, np.arange(1000, 1010))


def test_one_save_at_a_time_and_the_same_one_may_be_told_twice(shard: Shard, tmp_path: Path) -> None:
    go = threading.Event()
    with meanwhile(lambda: go.wait(10)):
        shard.begin(str(tmp_path / "a"))
        shard.begin(str(tmp_path / "a"))
        with pytest.raises(CheckpointError, match="under way"):
            shard.begin(str(tmp_path / "b"), save_id="2" * 32)
        go.set()
        shard.finish(str(tmp_path / "a"))
    shard.begin(str(tmp_path / "b"), save_id="2" * 32)
    shard.finish(str(tmp_path / "b"), save_id="2" * 32)


def test_a_shard_that_was_started_anew_keeps_what_it_had_finished(shard: Shard, tmp_path: Path) -> None:
    expected = shard.contents()
    shard.begin(str(tmp_path / "a"))
    shard.finish(str(tmp_path / "a"))
    shard.run(APPLY, USER, np.arange(300))
    shard.begin_epoch(shard.engine.epoch, shard.engine.k)
    assert shard.saver.progress("1" * 32)[0] == "unknown"
    shard.begin(str(tmp_path / "a"))
    shard.finish(str(tmp_path / "a"))
    assert loaded(str(tmp_path / "a")) == expected


def test_a_base_from_the_future_is_refused(shard: Shard, tmp_path: Path) -> None:
    shard.begin(str(tmp_path / "a"))
    manifest = shard.finish(str(tmp_path / "a"))
    later = replace(manifest, cuts=(replace(manifest.cuts[0], k=10**6),))
    with pytest.raises(CheckpointError, match="not of this cluster's past"):
        shard.begin(str(tmp_path / "b"), save_id="2" * 32, base=later)


def test_a_base_that_was_cut_behind_the_place_to_which_a_journal_was_rolled_back_is_refused(shard: Shard, tmp_path: Path) -> None:
    shard.begin(str(tmp_path / "a"))
    manifest = shard.finish(str(tmp_path / "a"))
    lost = replace(manifest, cuts=(replace(manifest.cuts[0], k=manifest.cuts[0].k + 1),))
    shard.begin_epoch(shard.engine.epoch + 1, shard.engine.k)  # the batch behind the cut is in no journal any more
    for _ in range(3):
        shard.run(APPLY, USER, np.arange(10))
    with pytest.raises(BaseOutdatedError, match=f"its epoch began behind batch {manifest.cuts[0].k}; it is not of this cluster's past"):
        shard.begin(str(tmp_path / "b"), save_id="2" * 32, base=lost)
    shard.begin(str(tmp_path / "c"), save_id="3" * 32, base=manifest)
    shard.finish(str(tmp_path / "c"), save_id="3" * 32, base=("a", manifest))
    assert loaded(str(tmp_path / "c")) == shard.contents()


def test_a_stopped_shard_gives_its_save_up(shard: Shard, tmp_path: Path) -> None:
    shard.begin(str(tmp_path / "a"))
    shard.saver.stop(5)
    assert shard.saver.progress("1" * 32)[0] in {"failed", "done"}


def test_a_save_that_is_begun_anew_takes_the_place_of_the_one_under_way(shard: Shard, tmp_path: Path) -> None:
    go, expected = threading.Event(), shard.contents()
    with meanwhile(lambda: go.wait(10)):
        shard.begin(str(tmp_path / "a"))
        threading.Timer(0.2, go.set).start()
        shard.begin(str(tmp_path / "a"), save_id="2" * 32)  # its command was killed
        shard.finish(str(tmp_path / "a"), save_id="2" * 32)
    assert shard.saver.progress("1" * 32)[0] == "unknown"
    assert loaded(str(tmp_path / "a")) == expected
    assert shard.saver.figures.failed == 1


def test_saves_are_counted_over_restarts_and_one_that_was_killed_has_failed(shard: Shard, tmp_path: Path) -> None:
    created_s, go = shard.saver.figures.created_s, threading.Event()
    shard.begin(str(tmp_path / "a"))
    shard.finish(str(tmp_path / "a"))
    assert (shard.saver.figures.done, shard.saver.figures.last_done_s) == (0, 0.0)  # the shard was not told that the manifest is there
    shard.saver.figures.end("1" * 32, done=True)
    last_s = shard.saver.figures.last_done_s
    assert last_s >= created_s
    old, reading = shard.saver, threading.Event()
    with meanwhile(lambda: (reading.set(), go.wait(30))):
        shard.begin(str(tmp_path / "b"), save_id="2" * 32)
        assert reading.wait(30)
        for _ in range(2):
            figures = SaveFigures(shard.folder)
            assert (figures.done, figures.failed, int(figures.last_done_s)) == (1, 1, int(last_s))
            assert int(figures.created_s) == int(created_s)
        go.set()
        old.stop(30)


def test_an_export_is_counted_and_is_no_backup(tmp_path: Path) -> None:
    figures = SaveFigures(tmp_path)
    figures.begin("1" * 32, resumable=False)
    figures.end("1" * 32, done=True)
    assert (figures.done, figures.last_done_s) == (1, 0.0)


def test_a_save_whose_command_was_killed_before_the_manifest_has_failed_once(tmp_path: Path) -> None:
    figures = SaveFigures(tmp_path)
    for again in (1, 1, 2):  # begun, resumed, given up for another one
        figures.begin(f"{again}" * 32, resumable=True)
    assert (figures.done, figures.failed) == (0, 1)
    figures.end("1" * 32, done=False)  # late words
    figures.end("2" * 32, done=True)
    figures.end("2" * 32, done=True)  # told twice
    assert (figures.done, figures.failed) == (1, 1)
    assert figures.last_done_s > 0


def test_counts_of_saves_that_cannot_be_read_begin_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SaveFigures(tmp_path).begin("1" * 32, resumable=True)
    (tmp_path / "saves.json").write_text("{half")
    assert SaveFigures(tmp_path).failed == 0
    assert "saves.json" in caplog.text
