"""Large batches are applied in pieces: stored pieces are not tried again, and one that is too slow is tried as smaller ones."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from kvemb.config import StorageConfig
from kvemb.errors import DeadlineExceededError, NodeLostError, NodeUnavailableError, RecordError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult
from paramserver.checkpoint.unconditional_writer import UnconditionalWriter
from paramserver.engine import storage_pace
from paramserver.engine.batch_records import PreparedRows
from paramserver.engine.engine import Engine
from paramserver.engine.storage_pace import LEAST_BYTES, AheadOfIndex, Pace, Pause, cut, size_bytes
from paramserver.model.batch import APPLY, ASSIGN, ERASE, Batch
from paramserver.model.tables import Tables
from paramserver.model.transition import Replay, Timeline
from paramserver.row_log.sorted_run import ERASED, ROWS
from tests.unit.engine_storage import ADAM, SGD, Storage, make_store, never, read, rows
from tests.unit.lonely_engine import ALONE, NoRepair
from tests.unit.memory_nodes import unused_nodes

IDS = list(range(0, 3000, 3))


class SlowStorage(Storage):
    """Storage that answers for at most so many rows before the deadline; later writes land and are not answered."""

    most_rows = 1 << 60
    n_rows_written = 0

    def read(self, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        self._in_time(sum(len(part.keys) for part in parts))
        return super().read(parts, deadline)

    def write(self, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        n_rows = sum(len(part.keys) for part in parts)
        self.n_rows_written += n_rows
        if n_rows > self.most_rows:  # the first ones arrive
            some = [WritePart(one.keys[:7], one.records[:7], None if one.tokens is None else one.tokens[:7]) for one in parts]
            super().write(some, deadline)
        self._in_time(n_rows)
        return super().write(parts, deadline)

    def erase(self, parts: Sequence[WritePart], deadline: Deadline) -> list[np.ndarray]:
        self._in_time(sum(len(part.keys) for part in parts))
        return super().erase(parts, deadline)

    def _in_time(self, n_rows: int) -> None:
        if n_rows > self.most_rows:
            raise DeadlineExceededError(f"{n_rows} rows do not fit into the deadline")


def nothing_exists(definition: TableDef, ids: np.ndarray) -> np.ndarray:
    return np.zeros(len(ids), bool)


def slow_store() -> SlowStorage:
    store = SlowStorage(StorageConfig("memory", unused_nodes()), role="shard:0")
    store.provision(b"c" * 16, b"g" * 8, Deadline.after(60))
    store.open(Deadline.after(60))
    return store


def patient(error: StorageError, pause_s: float) -> None:
    """Try again."""


def versions_of(store: Storage, ids: list[int], table: object = ADAM) -> list[int]:
    return sorted({int(version) for version in read(store, table, ids)[1]})  # type: ignore[arg-type]


def test_a_batch_too_large_for_the_deadline_is_applied_in_smaller_pieces() -> None:
    store, other = slow_store(), make_store()
    engine, whole = (Engine(one, Tables([]), Timeline(1), k=0, timeout_s=5, repair=ALONE) for one in (store, other))
    for k in (1, 2):
        for one in (engine, whole):
            one.run(Batch(APPLY, (rows(ADAM, IDS, 0.5 * k),)), make_version(1, k), patient)
        store.most_rows = 40
    store.most_rows = 1 << 60
    assert [a.tolist() for a in read(store, ADAM, IDS)] == [a.tolist() for a in read(other, ADAM, IDS)]
    assert engine._tables.state(ADAM).step == 2  # once for a batch, however many pieces it has


@pytest.mark.parametrize("kind", [ASSIGN, ERASE])
def test_so_are_large_assigns_and_erases(kind: str) -> None:
    store = slow_store()
    engine = Engine(store, Tables([]), Timeline(1), k=0, timeout_s=5, repair=ALONE)
    engine.run(Batch(APPLY, (rows(ADAM, IDS[::2]),)), make_version(1, 1), never)
    store.most_rows = 100
    applied = engine.run(Batch(kind, (rows(ADAM, IDS, 2.0, 0 if kind == ERASE else None),)), make_version(1, 2), patient)
    store.most_rows = 1 << 60
    assert applied.n_existed == len(IDS) // 2
    assert int(read(store, ADAM, IDS)[0].sum()) == (len(IDS) if kind == ASSIGN else 0)
    assert engine._tables.state(ADAM).n_rows == (len(IDS) if kind == ASSIGN else 0)


def test_what_is_stored_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_pace, "MOST_BYTES", 100 * storage_pace.row_bytes(rows(ADAM, [1])))
    store = slow_store()
    engine = Engine(store, Tables([]), Timeline(1), k=0, timeout_s=5, repair=ALONE)
    failures = []

    def spoil(parts: Sequence[WritePart]) -> list[WriteResult]:
        failures.append(len(parts[0].keys))
        raise NodeUnavailableError("node x: connection reset")

    def pause(error: StorageError, pause_s: float) -> None:
        if len(failures) < 3:
            store.spoil = spoil

    half = rows(ADAM, IDS)
    engine.run(Batch(APPLY, (half.take(slice(0, 500)),)), make_version(1, 1), never)
    store.n_rows_written, store.spoil = 0, spoil
    engine.run(Batch(APPLY, (half,)), make_version(1, 2), pause)
    assert failures == [100, 100, 100]
    assert store.n_rows_written == len(IDS) + sum(failures)
    assert versions_of(store, IDS) == [make_version(1, 2)]


def test_a_node_that_loses_rows_of_a_piece_that_was_stored_gets_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_pace, "MOST_BYTES", 100 * storage_pace.row_bytes(rows(ADAM, [1])))
    store, tables = make_store(), Tables([])
    asked: list[int] = []

    class Repair(NoRepair):
        def nodes(self, ahead: AheadOfIndex, pause: Pause, *, suspects: Iterable[str] = ()) -> int:
            asked.append(int((tables.state(ADAM).versions(np.array(IDS, np.uint64)) == make_version(1, 1)).sum()))
            return 1

        def rows(self, batch: Batch, ahead: AheadOfIndex) -> int:
            raise AssertionError

    engine = Engine(store, tables, Timeline(1), k=0, timeout_s=5, repair=Repair())

    def lose(parts: Sequence[WritePart]) -> list[WriteResult]:
        raise NodeLostError("node x: was flushed")

    def first(parts: Sequence[WritePart]) -> None:
        store.spoil = second

    def second(parts: Sequence[WritePart]) -> None:
        store.spoil = lose

    store.spoil = first
    engine.run(Batch(APPLY, (rows(ADAM, IDS),)), make_version(1, 1), never)
    assert asked == [200]  # the index knew the rows of the pieces that were stored: a repair brings back these versions


def test_only_a_batch_of_one_piece_is_told_before_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Sequence[PreparedRows]] = []
    store = make_store()
    monkeypatch.setattr(storage_pace, "MOST_BYTES", 500 * storage_pace.row_bytes(rows(ADAM, [1])))
    engine = Engine(store, Tables([]), Timeline(1), k=0, timeout_s=5, repair=ALONE)
    small = engine.run(Batch(APPLY, (rows(ADAM, IDS[:500]),)), make_version(1, 1), never, computed=told.append)
    assert (len(told), len(small.written)) == (1, 1)
    large = engine.run(Batch(APPLY, (rows(ADAM, IDS),)), make_version(1, 2), never, computed=told.append)
    assert (len(told), len(large.written)) == (1, 0)


def test_pieces_are_cut_between_rows_and_across_tables() -> None:
    tables = [rows(SGD, []), rows(SGD, [1, 2, 3]), rows(ADAM, [4, 5])]
    first, rest = cut(tables, 4 * storage_pace.row_bytes(tables[0]))
    assert [one.ids.tolist() for one in first] == [[], [1, 2, 3], [4]]
    assert [one.ids.tolist() for one in rest] == [[5]]
    assert cut(tables, size_bytes(tables)) == (tables, [])
    assert cut(tables, size_bytes(tables))[0][1] is tables[1]
    first, rest = cut(tables, 0)
    assert [one.ids.tolist() for one in first] == [[], [1]]
    assert [one.ids.tolist() for one in rest] == [[2, 3], [4, 5]]


class Clock:
    """Time that passes when it is told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_pace_falls_after_a_missed_deadline_and_rises_while_there_is_time() -> None:
    clock = Clock()
    pace = Pace(4.0, clock)

    def exchange(n_bytes: int, took_s: float) -> int:
        try:
            with pace.exchange(n_bytes):
                clock.now_s += took_s
                if took_s > 4:
                    raise DeadlineExceededError("late")
        except DeadlineExceededError:
            pass
        return pace.n_bytes

    most = storage_pace.MOST_BYTES
    assert exchange(most, 4.1) == most // 4
    assert exchange(most // 4, 2.0) == most // 4  # twice as much might be too slow
    assert exchange(100, 0.1) == most // 4  # says nothing of large ones
    assert exchange(most // 4, 0.9) == most // 2
    assert exchange(most // 2, 0.9) == most
    assert exchange(most, 0.9) == most
    assert exchange(100_000, 5.0) == 25_000
    assert exchange(100, 5.0) == LEAST_BYTES


def test_a_batch_can_be_given_up_between_two_pieces_and_taken_up_by_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_pace, "MOST_BYTES", 400 * storage_pace.row_bytes(rows(ADAM, [1])))
    store, batch, seen = slow_store(), Batch(APPLY, (rows(ADAM, IDS),)), []
    engine = Engine(store, Tables([]), Timeline(1), k=0, timeout_s=5, repair=ALONE)

    def stop() -> None:
        seen.append((engine.k, engine.rows_applied, store.n_rows_written))
        if len(seen) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        engine.run(batch, make_version(1, 1), never, between=stop)
    assert seen == [(0, 400, 400), (0, 800, 800)]
    assert engine._tables.state(ADAM).step == 0
    again = Engine(store, Tables([]), Timeline(2), k=0, timeout_s=5, repair=ALONE)
    again.run(batch, make_version(1, 1), never, Replay(make_version(1, 1)))
    assert store.n_rows_written == len(IDS)
    assert (again.k, again._tables.state(ADAM).step, versions_of(store, IDS)) == (1, 1, [make_version(1, 1)])


def test_rows_of_a_load_are_written_and_erased_in_smaller_pieces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_pace, "_FASTER", 1)
    store, waited = slow_store(), []
    Engine(store, Tables([]), Timeline(1), k=0, timeout_s=5, repair=ALONE).run(Batch(APPLY, (rows(ADAM, IDS),)), make_version(1, 1), never)
    ids, size = np.array(IDS, np.uint64), ADAM.record.size_bytes
    records = ADAM.record.encode(ids, make_version(2, 0), np.ones((len(ids), 2), np.float32), np.zeros((len(ids), 4), np.float32))
    store.most_rows = storage_pace.LEAST_BYTES // size
    rows_out = UnconditionalWriter(store, 5.0, lambda error, pause_s: waited.append(pause_s), ALONE, nothing_exists)
    rows_out.store(ADAM, (ROWS, ADAM.order.keys(ids), records))
    assert waited
    rows_out.store(ADAM, (ERASED, ADAM.order.keys(ids[:900]), records[:0]))
    store.most_rows = 1 << 60
    found, versions, _ = read(store, ADAM, IDS)
    assert found.tolist() == [False] * 900 + [True] * 100
    assert set(versions[900:].tolist()) == {make_version(2, 0)}


def test_a_load_waits_for_a_node_that_goes_away_while_another_programs_value_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    store, waited = make_store(), []
    ids = np.array(IDS, np.uint64)
    records = ADAM.record.encode(ids, make_version(2, 0), np.ones((len(ids), 2), np.float32), np.zeros((len(ids), 4), np.float32))
    answers = [NodeUnavailableError("node x: connection reset"), 1]

    def spoil(parts: Sequence[WritePart]) -> None:
        raise RecordError("node x: a list lies under a page's key")

    def make_way(keys: RowKeys, deadline: Deadline) -> int:
        answer = answers.pop(0)
        if isinstance(answer, NodeUnavailableError):
            raise answer
        return answer

    store.spoil = spoil
    monkeypatch.setattr(store.repair, "make_way", make_way)
    rows_out = UnconditionalWriter(store, 5.0, lambda error, pause_s: waited.append(error), ALONE, nothing_exists)
    rows_out.store(ADAM, (ROWS, ADAM.order.keys(ids), records))
    assert (len(waited), answers) == (1, [])
    assert versions_of(store, IDS) == [make_version(2, 0)]
