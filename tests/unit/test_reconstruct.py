"""Rows reconstructed from row log and journal have, bit for bit, the values that the engine wrote."""

from collections.abc import Callable, Iterator
from dataclasses import replace
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
from kvemb.errors import JournalFullError, LostRowError, StorageError, UnknownTableError
from kvemb.net.deadline import Deadline
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart
from paramserver.engine.engine import Engine
from paramserver.journal import BatchEntry, Journal, Position, encode_entry
from paramserver.model.batch import APPLY, ASSIGN, ERASE, Batch, CheckedRows
from paramserver.model.tables import Tables, TableState
from paramserver.model.transition import Timeline
from paramserver.optim import Optimizer
from paramserver.row_log import Reconstructor, Runs, WantedVersions, log_flush, reconstruct, reconstruct_rounds, sorted_run
from paramserver.row_log.log_flush import LogFlush, from_storage
from paramserver.row_log.reconstruct_rounds import Rounds
from tests.matrix import examples
from tests.unit.lonely_engine import ALONE
from tests.unit.run_states import all_rows, present, saved_in

_NUMBERS = count()
MOMENTUM = TableDef("momentum", 3, kvemb.optim.sgd(0.5, momentum=0.9, nesterov=True), kvemb.init.normal(std=1.0), seed=4)
ADAM = TableDef("adam", 2, kvemb.optim.adam(lr=0.1), kvemb.init.uniform())
HALF = TableDef("half", 4, kvemb.optim.adam(lr=0.01), kvemb.init.normal(std=1.0), dtype="float16", seed=9)
BRAIN = TableDef("brain", 2, kvemb.optim.rowwise_adagrad(), kvemb.init.normal(std=1.0), dtype="bfloat16")
TABLES = {table.name: table for table in (MOMENTUM, ADAM, HALF, BRAIN)}
IDS = [*range(6), 2**63, 2**64 - 1]


def find(name: str, schema: int) -> TableDef:
    if name not in TABLES:
        raise UnknownTableError(name)
    return TABLES[name]


class Shard:
    """Engine, storage in memory, journal and row log, without threads."""

    def __init__(self, folder: Path, cache_bytes: int = 0) -> None:
        number = next(_NUMBERS)
        self.store = MemoryStore(StorageConfig("memory", (f"snap-{number}-a:1", f"snap-{number}-b:1")), role="shard:0")
        self.store.provision(b"c" * 16, b"g" * 8, Deadline.after(60))
        self.store.open(Deadline.after(60))
        self.folder, self.epoch = folder, 1
        self.tables = Tables([], CacheBudget(cache_bytes), log=self)
        self.engine = Engine(self.store, self.tables, Timeline(1), k=0, timeout_s=5, repair=ALONE)
        self.position = Position(0, 0)
        self.open()

    def open(self) -> None:
        self.journal = Journal(self.folder / "journal", "os", segment_bytes=1)  # one entry each: nothing is kept that may be discarded
        self.saved, self.merging = saved_in(self.folder), iter(())
        self.runs = Runs(self.folder / "snapshot", self.saved, limit=2)
        self.reconstructor = Reconstructor(lambda: self.runs.view, self.journal, find)

    def versions(self, definition: TableDef, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As the row log of the process of now."""
        return self.runs.versions(definition, ids)

    def between(self, definition: TableDef, low: int, high: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """As the row log of the process of now."""
        return self.runs.between(definition, low, high)

    def reopen(self) -> None:
        self.journal.close()
        self.runs.close()
        self.epoch += 1
        self.open()

    def run(self, kind: str, *rows: CheckedRows) -> None:
        batch = Batch(kind, rows)
        version = make_version(self.epoch, self.engine.k + 1)
        steps = tuple(self.tables.state(one.definition).step for one in rows)
        self.position = self.journal.append(encode_entry(BatchEntry(version, batch, steps, ())))
        self.journal.commit()
        self.engine.run(batch, version, never)

    @property
    def applied(self) -> int:
        return make_version(self.epoch, self.engine.k)

    def flushing(self) -> Iterator[None]:
        flush = LogFlush(self.runs, self.tables, from_storage(self.store, 5), lambda: self.applied)
        yield from flush.steps(lambda: present(self.saved, self.tables, self.applied, self.position))
        self.flushed = flush.n_rows, flush.size_bytes
        self.merging = chain(self.merging, flush.merges())

    def flush(self, between: Callable[[], None] = lambda: None) -> None:
        position = self.position
        for _ in self.flushing():
            between()
            next(self.merging, None)  # of the flush before: it goes on while this one is taken
        self.journal.discard_before(Position(position.segment + 1, 0))  # the position's own segment stays otherwise

    def read(self, table: TableDef, ids: np.ndarray) -> np.ndarray:
        size = table.record.size_bytes
        got = self.store.rows.read([ReadPart(table.keys(ids, pages=False), size, size)], Deadline.after(60))[0].in_key_order()
        assert got.found.all()
        return got.records

    def existing(self, table: TableDef) -> tuple[np.ndarray, np.ndarray]:
        return all_rows(self.tables.state(table))

    def made(self, state: TableState, ids: np.ndarray, versions: np.ndarray) -> np.ndarray:
        return self.reconstructor.records([WantedVersions(state, ids, versions)])[0]

    def check(self) -> None:
        """Every row of every table comes out as it lies in storage."""
        for table in TABLES.values():
            ids, versions = self.existing(table)
            made = self.made(self.tables.state(table), ids, versions)
            assert made.tobytes() == self.read(table, ids).tobytes()


def never(error: StorageError, pause_s: float) -> None:
    raise error


def rows(table: TableDef, ids: list[int], value: float = 1.0, dim: int | None = None, **hyper: float) -> CheckedRows:
    values = np.full((len(ids), table.dim if dim is None else dim), value, np.float32)
    return CheckedRows(table, np.array(ids, np.uint64), values, np.empty(0, np.uint64), table.optimizer.check_hyper(hyper))


def gone(table: TableDef, ids: list[int]) -> CheckedRows:
    return rows(table, ids, dim=0)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    made = Shard(tmp_path)
    yield made
    made.journal.close()
    made.runs.close()


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_rows_are_made_from_the_journal_alone(shard: Shard, table: TableDef) -> None:
    for step in range(5):
        shard.run(APPLY, rows(table, [1, 2, 7], 0.1 * (step + 1), lr=0.05 * (step + 1)))
    shard.run(APPLY, rows(table, [2], -0.3))
    shard.check()


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_assign_erase_and_creation_anew_are_replayed(shard: Shard, table: TableDef) -> None:
    shard.run(APPLY, rows(table, [1, 2, 3]))
    shard.run(ASSIGN, rows(table, [3, 2, 9], 1 / 3))
    shard.run(APPLY, rows(table, [2, 9], 0.7))
    shard.run(ERASE, gone(table, [9, 1, 77]))
    shard.check()
    shard.run(APPLY, rows(table, [1, 2], 0.2))
    shard.check()


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_row_stops_at_the_version_asked_for(shard: Shard, table: TableDef) -> None:
    seen = []
    for step in range(4):
        shard.run(APPLY, rows(table, [1, 5], 0.3 * step))
        ids, versions = shard.existing(table)
        seen.append((ids, versions, shard.read(table, ids).tobytes()))
    shard.run(ERASE, gone(table, [1, 5]))
    for ids, versions, records in seen:
        assert shard.made(shard.tables.state(table), ids, versions).tobytes() == records


def test_a_row_erased_before_a_flush_and_created_again_behind_it_begins_anew(shard: Shard) -> None:
    shard.run(APPLY, rows(ADAM, [1, 2]))
    shard.flush()
    shard.run(ERASE, gone(ADAM, [1]))
    shard.run(APPLY, rows(ADAM, [2, 3], 0.5))
    shard.flush()
    assert len(list(shard.journal.read())) == 1  # the erase is not among them
    shard.run(APPLY, rows(ADAM, [1, 2], 0.5))
    shard.check()


def test_a_row_created_again_while_the_log_is_flushed_begins_anew(shard: Shard) -> None:
    shard.run(APPLY, rows(ADAM, [1, 2]), rows(HALF, [1, 2]))
    shard.flush()
    shard.run(ERASE, gone(ADAM, [1]))
    shard.run(ERASE, gone(HALF, [1]))
    # With the first step the rows of adam in older runs have been looked at, those of half have not.
    again = iter([lambda: shard.run(APPLY, rows(ADAM, [1], 0.5), rows(HALF, [1], 0.5))])
    shard.flush(lambda: next(again, lambda: None)())
    shard.check()
    shard.run(APPLY, rows(ADAM, [1], 0.25), rows(HALF, [1], 0.25))
    shard.check()


def test_after_a_flush_the_journal_is_not_needed(shard: Shard) -> None:
    shard.run(APPLY, rows(ADAM, [1, 2]), rows(HALF, [7]))
    shard.flush()
    shard.journal.read = None  # type: ignore[method-assign]
    shard.check()


def test_only_rows_newer_than_the_last_flush_are_written(shard: Shard) -> None:
    shard.run(APPLY, rows(ADAM, list(range(20))))
    shard.flush()
    n_first, first_bytes = shard.flushed
    shard.run(APPLY, rows(ADAM, [3, 4, 99]))
    shard.flush()
    n_second, second_bytes = shard.flushed
    assert (n_first, n_second) == (20, 3)
    assert 0 < second_bytes < first_bytes
    shard.check()


def test_a_flush_that_is_given_up_leaves_the_log_as_it_was(shard: Shard) -> None:
    shard.run(APPLY, rows(ADAM, [1, 2]))
    shard.flush()
    cut, files = shard.runs.cut, sorted((shard.folder / "snapshot").glob("*.run"))
    shard.run(APPLY, rows(ADAM, [2, 3]))
    steps = shard.flushing()
    next(steps)
    steps.close()
    shard.check()
    shard.reopen()
    assert (shard.runs.cut, sorted((shard.folder / "snapshot").glob("*.run"))) == (cut, files)
    shard.check()


def test_a_row_that_storage_lost_stops_the_flush(shard: Shard) -> None:
    shard.run(APPLY, rows(ADAM, [1, 2]))
    for address in shard.store.nodes.addresses:
        node = memory_node(address)
        for key in [key for key in node.values if key.startswith(ADAM.tag)]:
            del node.values[key]
    with pytest.raises(LostRowError, match=r"'adam', id 1: no row in storage, expected version \(1, 1\)"):
        shard.flush()
    assert shard.runs.cut == 0
    assert list((shard.folder / "snapshot").glob("*.run")) == []


def test_rows_are_taken_from_the_cache(tmp_path: Path) -> None:
    shard = Shard(tmp_path, cache_bytes=1 << 20)
    shard.run(APPLY, rows(ADAM, [1, 2]))
    shard.store.rows.read, read = None, shard.store.rows.read  # type: ignore[method-assign, assignment]
    shard.flush()
    shard.store.rows.read = read  # type: ignore[method-assign]
    shard.check()
    shard.journal.close()
    shard.runs.close()


def test_a_version_that_cannot_be_reached_is_a_lost_row(shard: Shard) -> None:
    shard.run(APPLY, rows(ADAM, [1, 2**64 - 2]))
    state = shard.tables.state(ADAM)
    for row_id, version, got in ((1, 7, r"version \(1, 1\)"), (3, 1, "no row"), (2**64 - 2, 9, r"version \(1, 1\)")):
        shown = row_id if row_id < 100 else -2
        with pytest.raises(LostRowError, match=rf"'adam', id {shown}: {got} by row log and journal, expected version \(1, {version}\)"):
            shard.made(state, np.array([row_id], np.uint64), np.array([make_version(1, version)], np.uint64))


def test_an_older_version_than_the_log_has_is_lost(shard: Shard) -> None:
    shard.run(APPLY, rows(ADAM, [1]))
    ids, old = shard.existing(ADAM)
    shard.run(APPLY, rows(ADAM, [1]))
    shard.flush()
    state = shard.tables.state(ADAM)
    with pytest.raises(LostRowError, match=r"version \(1, 2\) by row log and journal, expected version \(1, 1\)"):
        shard.made(state, ids, old)


def test_a_row_that_is_gone_is_lost(shard: Shard) -> None:
    shard.run(APPLY, rows(ADAM, [1]))
    ids, old = shard.existing(ADAM)
    shard.flush()
    shard.run(ERASE, gone(ADAM, [1]))
    shard.flush()
    with pytest.raises(LostRowError, match="no row by row log"):
        shard.made(shard.tables.state(ADAM), ids, old)


def test_a_row_erased_while_the_log_is_flushed_is_not_made_from_its_first_value(shard: Shard) -> None:
    shard.run(APPLY, rows(ADAM, [1]), rows(HALF, [1]))
    shard.flush()
    shard.run(APPLY, rows(ADAM, [1]))
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def change_and_erase() -> None:
        if not seen:
            shard.run(APPLY, rows(HALF, [1], 0.5))
            seen.append(shard.existing(HALF))
            shard.run(ERASE, gone(HALF, [1]))

    shard.flush(change_and_erase)
    with pytest.raises(LostRowError, match="no row by row log"):  # not: a new row with one apply, which has that version too
        shard.made(shard.tables.state(HALF), *seen[0])
    shard.check()


def test_a_journal_that_does_not_reach_back_to_the_log_is_refused(shard: Shard) -> None:
    shard.engine.k = 5  # five batches that the journal lacks
    shard.run(APPLY, rows(ADAM, [1]))
    ids, versions = shard.existing(ADAM)
    with pytest.raises(LostRowError, match="continues with batch 6, row log and journal reach to batch 0"):
        shard.made(shard.tables.state(ADAM), ids, versions)
    shard.engine.k = 8
    shard.run(APPLY, rows(ADAM, [1]))
    ids, versions = shard.existing(ADAM)
    shard.runs.publish([], replace(shard.saved.now, cut=make_version(1, 6)))
    with pytest.raises(LostRowError, match="continues with batch 9, row log and journal reach to batch 6"):
        shard.made(shard.tables.state(ADAM), ids, versions)


def test_after_a_load_nothing_of_the_journal_before_it_is_replayed(shard: Shard) -> None:
    shard.run(APPLY, rows(ADAM, [1, 2]))
    shard.run(ERASE, gone(ADAM, [1, 2]))  # as a load erases the rows that it does not have: without an entry in the journal
    shard.journal.close()
    (shard.folder / "journal" / "000000000002.journal").unlink()
    shard.open()
    shard.runs.publish([], replace(shard.saved.now, tables=(), cut=make_version(2, 0)))
    shard.epoch = 3
    shard.run(APPLY, rows(ADAM, [1]))
    shard.check()


def test_a_row_erased_before_its_slice_is_not_made_from_what_the_journal_still_has(shard: Shard) -> None:
    shard.run(APPLY, rows(ADAM, [1]), rows(HALF, [1]))
    shard.flush()
    shard.run(APPLY, rows(ADAM, [1]), rows(HALF, [2]))
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def change_and_erase() -> None:
        if not seen:
            shard.run(APPLY, rows(HALF, [2], 0.5))
            ids, versions = shard.existing(HALF)
            seen.append((ids[ids == 2], versions[ids == 2]))
            shard.run(ERASE, gone(HALF, [2]))

    shard.flush(change_and_erase)
    with pytest.raises(LostRowError, match="no row by row log"):
        shard.made(shard.tables.state(HALF), *seen[0])
    shard.check()


def test_rows_are_made_in_passes_of_bounded_memory(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    shard.run(APPLY, rows(ADAM, list(range(50))))
    shard.run(APPLY, rows(ADAM, list(range(0, 50, 3)), 0.5))
    passes = []
    batches = reconstruct.batches_behind
    monkeypatch.setattr(reconstruct, "batches_behind", lambda *args: passes.append(1) or batches(*args))
    monkeypatch.setattr(reconstruct_rounds, "_BLOCK_WEIGHTS", 6)
    shard.reconstructor = Reconstructor(lambda: shard.runs.view, shard.journal, find, pass_bytes=10 * ADAM.record.size_bytes)
    ids, versions = shard.existing(ADAM)
    made = shard.made(shard.tables.state(ADAM), ids, versions)
    assert made.tobytes() == shard.read(ADAM, ids).tobytes()
    assert len(passes) == 5


def test_small_batches_are_applied_in_as_many_calls_as_a_row_has_updates(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for step in range(200):
        ids = [int(i) for i in np.unique(rng.integers(0, 40, 5))]
        shard.run(APPLY, *(rows(table, ids, 0.01 * step, lr=0.05 + 0.001 * step) for table in TABLES.values()))
    passes, calls = [], []
    batches, update = reconstruct.batches_behind, Optimizer.update_in_place
    monkeypatch.setattr(reconstruct, "batches_behind", lambda *args: passes.append(1) or batches(*args))
    monkeypatch.setattr(Optimizer, "update_in_place", lambda *args: calls.append(1) or update(*args))
    wanted = [WantedVersions(shard.tables.state(table), *shard.existing(table)) for table in TABLES.values()]
    for one, records in zip(wanted, shard.reconstructor.records(wanted), strict=True):
        assert records.tobytes() == shard.read(one.table.definition, one.ids).tobytes()
    assert len(passes) == 1, "one for all tables"
    assert len(calls) < 200, "of 800 batches of a table"


def test_updates_that_wait_are_bounded_in_memory(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(30):
        shard.run(APPLY, rows(ADAM, [1, 2, 3], 0.1 * step), rows(HALF, [2, 3, 4], 0.2 * step))
    waiting, run = [], Rounds.run
    monkeypatch.setattr(Rounds, "run", lambda self: waiting.append(self.size_bytes) or run(self))
    monkeypatch.setattr(reconstruct, "_MAX_WAITING_BYTES", 500)
    shard.check()
    assert 300 < max(waiting) < 800


def test_a_full_disk_leaves_the_log_before_it(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    shard.run(APPLY, rows(ADAM, [1, 2]))
    shard.flush()
    shard.run(APPLY, rows(ADAM, [2, 3]))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("journal.segment_files.write_all", "journal.segment_files.sync", "row_log.run_set.sync_folder"):
        with monkeypatch.context() as patch:
            patch.setattr(f"paramserver.{name}", full)
            with pytest.raises(JournalFullError, match="No space left"):
                shard.flush()
        shard.check()
        shard.reopen()
        shard.check()
    shard.flush()
    shard.check()
    assert len(list((shard.folder / "snapshot").glob("*.run"))) <= 3


# --- any order of everything --------------------------------------------------------------------------------------------------------

_TABLE = st.sampled_from(["adam", "half"])
_ID_LIST = st.lists(st.sampled_from(IDS), min_size=1, max_size=4, unique=True)
_CHANGE = st.tuples(st.sampled_from([APPLY] * 5 + [ASSIGN, ERASE, ERASE]), _TABLE, _ID_LIST, st.floats(-2, 2, width=32))
_STEP = st.one_of(_CHANGE, st.sampled_from(["flush"] * 4 + ["reopen", "give up"]))


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_STEP, min_size=5, max_size=40), st.lists(_CHANGE, max_size=20))
def test_whatever_happened_every_row_is_made_anew(tmp_path_factory: pytest.TempPathFactory, steps: list, during: list) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_run, "BLOCK_ROWS", 4)
        patch.setattr(sorted_run, "FENCE_ROWS", 2)
        patch.setattr(log_flush, "_SLICE_BYTES", 150)
        shard, left = Shard(tmp_path_factory.mktemp("shard")), iter(during)

        def change(kind: str, name: str, ids: list[int], value: float) -> None:
            table = TABLES[name]
            shard.run(kind, rows(table, sorted(ids), value, 0 if kind == ERASE else None))

        def maybe_change() -> None:
            one = next(left, None)
            if one is not None:
                change(*one)

        for step in steps:
            if step == "flush":
                shard.flush(maybe_change)
            elif step == "reopen":
                shard.reopen()
            elif step == "give up":
                unfinished = shard.flushing()
                next(unfinished, None)
                maybe_change()
                next(unfinished, None)
                unfinished.close()
            else:
                change(*step)
            shard.check()
        shard.journal.close()
        shard.runs.close()
