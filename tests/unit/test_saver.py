"""A save is an exact cut: rows may change while they are streamed, the checkpoint holds them as they were."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from memory_store import MemoryStore
from numpy.typing import NDArray

from kvemb import optim
from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import MANIFEST, BaseCheckpoint, CheckpointManifest
from kvemb.checkpoint.format.manifest_json import encode_manifest
from kvemb.checkpoint.verify import verify
from kvemb.checkpoint.writer import SaveInfo, assemble, read_fragment
from kvemb.config import StorageConfig
from kvemb.errors import CheckpointError, DeadlineExceededError, LostRowError, NodeUnavailableError
from kvemb.init import uniform
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart
from paramserver.checkpoint import save_job
from paramserver.checkpoint.save_job import CopyOnWriteRecords, SaveFigures, SaveOrder
from paramserver.checkpoint.saver import ErasedLog, SaveObserver, Saver
from paramserver.engine.engine import Engine
from paramserver.engine.piece_writer import EnginePorts
from paramserver.model.batch import APPLY, ASSIGN, ERASE, Batch, CheckedRows
from paramserver.model.tables import Tables
from paramserver.model.transition import Timeline
from tests.unit.lonely_engine import NO_REPAIR

USER = TableDef("user", 3, optim.adam(lr=0.1), uniform())
ITEM = TableDef("item", 2, optim.sgd(lr=1.0), uniform(), dtype="bfloat16")
Contents = dict[str, dict[int, bytes]]


class Watched(MemoryStore):
    """Storage in memory that calls back before every read of a save, for one of its threads at a time: batches have one writer."""

    before: Callable[[], None] | None = None
    inside = threading.local()
    one_writer = threading.Lock()

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        inside = getattr(self.inside, "now", False)  # the callback's batches read, too
        if self.before is not None and not inside and threading.current_thread().name.startswith("kvemb-save"):
            with self.one_writer:
                self.inside.now = True
                try:
                    self.before()
                finally:
                    self.inside.now = False
        return super().read(parts, deadline)


class Shard:
    """Engine and saver of the one shard of a cluster, without processes."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.store = Watched(StorageConfig("memory", (f"{name}-a:1", f"{name}-b:1")), role="shard:0")
        self.store.provision(b"c" * 16, b"g" * 8, Deadline.after(5))
        self.store.open(Deadline.after(5))
        self.tables = Tables([])
        self.n_ahead = 0  # batches that are acknowledged and not applied
        self.begin_epoch(3, 0)

    def begin_epoch(self, epoch: int, k: int) -> None:
        """Be a new process, with the tables as they are."""
        self.observer = SaveObserver(make_version(epoch, k))
        self.engine = Engine(self.store, self.tables, Timeline(epoch), k=k, timeout_s=5, ports=EnginePorts(NO_REPAIR, self.observer))
        self.saver = Saver(
            0,
            self.store,
            self.tables,
            self.engine,
            observer=self.observer,
            committed_k=lambda: self.engine.k + self.n_ahead,
            restore=lambda definition, ids: None,
            definitions=lambda: [ITEM, USER],
            folder=self.folder,
            timeout_s=5.0,
        )

    def run(self, kind: str, definition: TableDef, ids: NDArray[np.int64], value: float = 1.0) -> None:
        """Apply a batch."""

        def never(error: Exception, pause_s: float) -> None:
            raise error

        some = np.unique(ids).astype(np.uint64)
        values = np.full((len(some), 0 if kind == ERASE else definition.dim), value, np.float32)
        rows = CheckedRows(definition, some, values, np.empty(0, np.uint64), definition.optimizer.check_hyper({}))
        self.engine.run(Batch(kind, (rows,)), make_version(self.engine.epoch, self.engine.k + 1), never)

    def contents(self) -> Contents:
        """Weights and state of every row by table and id, as storage has them."""
        found: Contents = {}
        for definition in (ITEM, USER):
            ids = np.sort(self.tables.state(definition).arrays()[0])
            size = definition.record.size_bytes
            got = self.store.rows.read([ReadPart(RowKeys(definition.tag, ids), size, size)], Deadline.after(5))[0].in_key_order()
            assert got.found.all()
            found[definition.name] = {int(i): bytes(record[4:]) for i, record in zip(ids, got.records, strict=True)}
        return found

    def begin(self, url: str, *, save_id: str = "1" * 32, base: CheckpointManifest | None = None, weights_only: bool = False) -> None:
        """Begin a save."""
        order = SaveOrder(save_id, url, 0 if base is None else base.cuts[0].version, weights_only)
        self.saver.begin(order, Deadline.after(5))

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
    monkeypatch.setattr(save_job, "group_rows", lambda definition, weights_only: 30)
    monkeypatch.setattr(save_job, "_PAUSE_S", 0.01)
    folder = tmp_path / "data"
    folder.mkdir()
    made = Shard(folder, request.node.name)
    for definition in (USER, ITEM):
        made.run(APPLY, definition, np.arange(300))
        made.run(APPLY, definition, np.arange(100))
    return made


def stir(shard: Shard, seed: int) -> Callable[[], None]:
    """Changes rows of every kind at every call."""
    rng = np.random.default_rng(seed)

    def step() -> None:
        for _ in range(3):
            kind, definition = str(rng.choice([APPLY, APPLY, ASSIGN, ERASE])), (USER, ITEM)[rng.integers(2)]
            shard.run(kind, definition, rng.integers(0, 350, 40), float(rng.normal()))

    return step


@pytest.mark.parametrize("seed", range(5))
def test_a_save_holds_the_rows_as_they_were_at_the_cut(shard: Shard, tmp_path: Path, seed: int) -> None:
    expected = shard.contents()
    shard.store.before = stir(shard, seed)
    shard.begin(str(tmp_path / "a"))
    shard.finish(str(tmp_path / "a"))
    assert shard.contents() != expected
    assert loaded(str(tmp_path / "a")) == expected
    assert [path.name for path in shard.folder.iterdir()] == ["saves.json"]  # the records kept meanwhile are gone


@pytest.mark.parametrize("seed", range(5))
def test_incremental_saves_on_top_of_each_other_are_exact_too(shard: Shard, tmp_path: Path, seed: int) -> None:
    url = str(tmp_path / "0")
    shard.store.before = stir(shard, seed)
    shard.begin(url)
    below = shard.finish(url)
    for number in range(1, 4):
        shard.run(APPLY, USER, np.arange(number * 10, number * 10 + 10))
        if number == 2:  # a restarted shard does not know which rows were erased before
            shard.run(ERASE, USER, np.arange(60, 70))
            shard.begin_epoch(shard.engine.epoch + 1, shard.engine.k)
        expected, url, save_id = shard.contents(), str(tmp_path / str(number)), f"{number:032x}"
        shard.begin(url, save_id=save_id, base=below)
        roles = {0: set(), 1: {"rows", "erased"}, 2: {"rows", "ids"}, 3: {"rows", "erased"}}[number]
        below = shard.finish(url, save_id=save_id, base=(str(number - 1), below))
        assert {file.role for file in below.files} == roles
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
    shard.store.before = stir(shard, 1)
    expected = {name: {i: row[: 8 + (12 if name == "user" else 4)] for i, row in rows.items()} for name, rows in shard.contents().items()}
    shard.begin(str(tmp_path / "a"), weights_only=True)
    shard.finish(str(tmp_path / "a"), weights_only=True)
    found = {
        name: {i: row[: 8 + (12 if name == "user" else 4)] for i, row in rows.items()} for name, rows in loaded(str(tmp_path / "a")).items()
    }
    assert found == expected


def test_steps_are_those_of_the_cut(shard: Shard, tmp_path: Path) -> None:
    shard.store.before = lambda: shard.run(APPLY, USER, np.arange(3))
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


def test_a_save_goes_on_when_a_node_is_away_for_a_while(shard: Shard, tmp_path: Path) -> None:
    expected, left = shard.contents(), [3]

    def away() -> None:
        if left[0]:
            left[0] -= 1
            raise NodeUnavailableError("a:1: refused")

    shard.store.before = away
    shard.begin(str(tmp_path / "a"))
    shard.finish(str(tmp_path / "a"))
    assert loaded(str(tmp_path / "a")) == expected


def lose(shard: Shard) -> None:
    """Let storage lose a row."""
    keys = RowKeys(USER.tag, np.array([290], np.uint64))
    shard.store.rows.erase([WritePart(keys, np.empty((0, 0), np.uint8))], Deadline.after(5))


def failed(shard: Shard, save_id: str = "1" * 32) -> str:
    done = threading.Event()
    while shard.saver.progress(save_id)[0] == "running":
        done.wait(0.005)
    state, error, *_ = shard.saver.progress(save_id)
    assert state == "failed"
    return error


def test_a_row_that_storage_has_lost_fails_the_save_and_nothing_else(shard: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_job, "_RETRY_S", 0.05)
    lose(shard)
    shard.begin(str(tmp_path / "a"))
    assert LostRowError.__name__ in failed(shard)
    assert "290" in failed(shard)
    shard.run(APPLY, USER, np.arange(10))


def test_a_full_disk_fails_the_save_and_training_goes_on(shard: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    shard.store.before = lambda: shard.run(APPLY, USER, np.arange(300))
    shard.begin(str(tmp_path / "a"))
    assert "No space left" in failed(shard)
    shard.run(APPLY, USER, np.arange(300))


def test_one_save_at_a_time_and_the_same_one_may_be_told_twice(shard: Shard, tmp_path: Path) -> None:
    go = threading.Event()
    shard.store.before = lambda: go.wait(10) and None
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


def test_a_stopped_shard_gives_its_save_up(shard: Shard, tmp_path: Path) -> None:
    shard.begin(str(tmp_path / "a"))
    shard.saver.stop(5)
    assert shard.saver.progress("1" * 32)[0] in {"failed", "done"}


def test_saves_are_counted_over_restarts_and_one_that_was_killed_has_failed(shard: Shard, tmp_path: Path) -> None:
    created_s, go = shard.saver.figures.created_s, threading.Event()
    shard.begin(str(tmp_path / "a"))
    shard.finish(str(tmp_path / "a"))
    assert (shard.saver.figures.done, shard.saver.figures.last_done_s) == (0, 0.0)  # the shard was not told that the manifest is there
    shard.saver.figures.end("1" * 32, done=True)
    last_s = shard.saver.figures.last_done_s
    assert last_s >= created_s
    old, reading = shard.saver, threading.Event()
    shard.store.before = lambda: reading.set() or (go.wait(30) and None)  # type: ignore[func-returns-value]
    shard.begin(str(tmp_path / "b"), save_id="2" * 32)
    assert reading.wait(30)
    for _ in range(2):
        shard.begin_epoch(shard.engine.epoch + 1, 0)
        figures = shard.saver.figures
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


# --- the pieces -------------------------------------------------------------------------------------------------------------------


def test_the_first_record_kept_of_a_row_stays(tmp_path: Path) -> None:
    kept = CopyOnWriteRecords(tmp_path, 4)
    ids = np.array([5, 1, 9], np.uint64)
    kept.put(ids, np.arange(12, dtype=np.uint8).reshape(3, 4))
    kept.put(np.array([9, 2], np.uint64), np.full((2, 4), 77, np.uint8))
    found, records = kept.find(np.array([1, 2, 3, 9], np.uint64))
    assert found.tolist() == [True, True, False, True]
    assert records.tolist() == [[4, 5, 6, 7], [77] * 4, [8, 9, 10, 11]]
    assert len(kept) == 4
    kept.close()


def test_the_log_of_erased_ids_knows_how_far_back_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.checkpoint.saver._MAX_IDS", 5)
    log = ErasedLog(10)
    log.add(11, "user", np.array([3, 1], np.uint64))
    log.add(12, "item", np.array([9], np.uint64))
    log.add(13, "user", np.array([1], np.uint64))

    def after(version: int) -> list[int] | None:
        ids = log.after(version, "user")
        return None if ids is None else ids.tolist()

    assert [after(9), after(10), after(11), after(13)] == [None, [1, 3], [1], []]
    log.add(14, "user", np.arange(3, dtype=np.uint64))
    assert [after(10), after(11)] == [None, [0, 1, 2]]
    log.forget(20)  # slots came back
    assert [after(14), after(20)] == [None, []]
