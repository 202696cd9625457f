"""Runs of rows: each is read back whole or refused, the newest state of an id wins, and merging changes nothing that can be seen."""

import errno
import os
import struct
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import kvemb.init
import kvemb.optim
from kvemb.arrays.id_filter import filter_of
from kvemb.errors import JournalDamagedError, JournalFullError, ParameterServerError, RecordError
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from paramserver.row_log.run_merge import merge_from, merged
from paramserver.row_log.run_writer import RunWriter
from paramserver.row_log.sorted_run import ERASED, ROWS, SortedRun
from paramserver.row_log.state_file import STATE
from tests.unit.run_states import (
    FEW_STATES,
    RECORD,
    STATES,
    TABLE,
    State,
    check,
    count,
    encoded,
    in_order,
    log_in,
    opened,
    publish,
    records,
    small_blocks,
    state_of,
    u64,
)

__all__ = ["small_blocks"]  # the fixture


@given(STATES)
def test_a_run_is_read_back(state: State) -> None:
    if state:
        assert state_of(opened(encoded(state))) == state


@given(STATES, st.lists(st.integers(0, 2**64 - 1), max_size=10), st.sampled_from(["filters asked", "filters left out"]))
def test_rows_are_found(state: State, others: list[int], by: str) -> None:
    if not state:
        return
    run, ids = opened(encoded(state)), in_order({*others, *list(state)[::2]})
    run._absent = [float(by != "filters left out")] * 2
    for kind in (ROWS, ERASED):
        at, rows, versions = run.find(kind, TABLE.order.keys(u64(ids)))
        wanted = [i for i in ids if i in state and state[i][1] is (kind == ROWS)]
        assert [ids[place] for place in at] == wanted
        assert versions.tolist() == [state[i][0] for i in wanted]
        if kind == ROWS:
            assert run.records(rows).tobytes() == records(wanted, versions.tolist()).tobytes()


def test_a_filter_that_was_torn_is_noticed_before_it_is_believed(tmp_path: Path) -> None:
    runs, ids = log_in(tmp_path), in_order(range(8))
    publish(runs, {i: (5, True) for i in ids}, 9)
    runs.close()
    path, words = next(tmp_path.glob("*.run")), filter_of(TABLE.order.keys(u64(ids[4:])), 2).tobytes()
    path.write_bytes(path.read_bytes().replace(words, bytes(len(words))))
    runs = log_in(tmp_path)
    for _ in range(2):
        with pytest.raises(JournalDamagedError, match=r"\.run: offset \d+: the checksum of the block's filters does not match"):
            runs.versions(TABLE, u64(ids[5:6]))
    assert runs.versions(TABLE, u64(ids[:4]))[1].all()
    runs.close()


def test_filters_are_asked_while_many_ids_are_new() -> None:
    """Where nearly all are here, asking costs more than it spares."""
    ids = u64(range(0, 2000, 2))
    run = opened(encoded({i: (5, True) for i in ids.tolist()}))
    asked: list[int] = []
    ask = run._may_have
    run._may_have = lambda kind, keys, rows: asked.append(len(keys)) or ask(kind, keys, rows)  # type: ignore[func-returns-value, method-assign]
    for draw in (ids, ids + np.uint64(1), ids):
        keys = np.sort(TABLE.order.keys(draw))
        for _ in range(20):
            asked.clear()
            assert len(run.find(ROWS, keys)[0]) == (len(ids) if draw is ids else 0)
        assert bool(asked) is (draw is not ids)


DATA = encoded({i * 3: (i + 1, i % 4 > 0) for i in range(20)})


def read_all(run: SortedRun) -> None:
    parts = list(merged([run], forget_up_to=0))
    for kind in (ROWS, ERASED):  # filters, too
        run.find(kind, np.concatenate([keys for one, keys, _, _ in parts if one == kind]))


@given(st.integers(0, 8 * len(DATA) - 1))
def test_a_flipped_bit_is_refused_or_fills_up_a_block(bit: int) -> None:
    data = bytearray(DATA)
    data[bit // 8] ^= 1 << bit % 8
    if DATA[bit // 8] == 0:
        with suppress(JournalDamagedError):
            assert state_of(opened(bytes(data))) == state_of(opened(DATA))
        return
    with pytest.raises(JournalDamagedError, match=r"the/run: offset \d+: "):
        read_all(opened(bytes(data)))


@given(st.integers(0, len(DATA) - 1))
def test_a_truncated_run_is_refused(size: int) -> None:
    with pytest.raises(JournalDamagedError, match="the/run"):
        opened(DATA[:size])


def test_a_page_that_was_torn_is_noticed_by_the_first_look_at_it(tmp_path: Path) -> None:
    """Also where only versions are asked for, which are read from the mapped file."""
    state = {i: (i + 1, True) for i in range(40)}
    runs = log_in(tmp_path)
    publish(runs, state, 9)
    runs.close()
    path = next(tmp_path.glob("*.run"))
    data = bytearray(path.read_bytes())
    torn = data.index(TABLE.order.keys(u64(in_order(state)[20:21])).tobytes())
    data[torn : torn + 16] = bytes(16)
    path.write_bytes(data)
    runs, ids = log_in(tmp_path), in_order(state)
    assert runs.versions(TABLE, u64(ids[:20]))[0].tolist() == [i + 1 for i in ids[:20]]
    for _ in range(2):
        with pytest.raises(JournalDamagedError, match=r"\.run: offset \d+: the checksum of the block's keys does not match"):
            runs.versions(TABLE, u64(ids[20:21]))
    assert runs.versions(TABLE, u64(ids[24:]))[0].tolist() == [i + 1 for i in ids[24:]]
    runs.close()


def test_a_disk_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = log_in(tmp_path)
    publish(runs, {1: (5, True)}, 9)
    runs.view.find(TABLE, u64([]))  # opens the run

    def fail(*_: int) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        with pytest.raises(JournalDamagedError, match=r"\.run: offset 48: Input/output error"):
            runs.versions(TABLE, u64([1]))
    check(runs, {1: (5, True)})
    runs.close()


@given(st.binary(max_size=300))
def test_noise_is_no_run(noise: bytes) -> None:
    for data in (noise, DATA[:32] + noise + DATA[-32:], DATA + noise[:1] + b"x"):
        with pytest.raises(JournalDamagedError, match="the/run"):
            opened(data)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=8, max_size=24))
def test_a_footer_whose_checksum_is_right_may_still_be_wrong(numbers: list[int]) -> None:
    """A program that can write the file can write checksums; allocated memory stays bounded by the file's size."""
    footer = u64(numbers[: len(numbers) // 8 * 8]).tobytes()
    place = struct.pack("<QQ", 32, len(footer) // 64)
    data = DATA[:32] + footer + place
    data += struct.pack("<Q8s", xxhash.xxh3_64_intdigest(data), b"runkvemb")
    with pytest.raises(JournalDamagedError, match="the/run"):
        opened(data)


def histories(states: list[dict[int, bool]]) -> list[State]:
    return [{i: (10 * n + 5, exists) for i, exists in state.items()} for n, state in enumerate(states)]


def newest(states: list[State]) -> State:
    return {i: one for state in states for i, one in state.items()}


@given(st.lists(FEW_STATES, min_size=1, max_size=5), st.booleans())
def test_merging_keeps_the_newest_state_of_each_id(states: list[dict[int, bool]], keep_erased: bool) -> None:
    forget = 0 if keep_erased else 10 * len(states)
    history = histories(states)
    runs = [opened(encoded(state)) for state in history if state]
    parts = list(merged(runs, forget_up_to=forget))
    ids = [TABLE.order.ids(keys).tolist() for _, keys, _, _ in parts]
    result = {i: (v, part[0] == ROWS) for some, part in zip(ids, parts, strict=True) for i, v in zip(some, part[2].tolist(), strict=True)}
    assert result == {i: one for i, one in newest(history).items() if one[1] or keep_erased}
    for some, (kind, _, versions, rows) in zip(ids, parts, strict=True):
        assert kind == ERASED or rows.tobytes() == records(some, versions.tolist()).tobytes()
    for wanted in (ROWS, ERASED):
        listed = [i for some, part in zip(ids, parts, strict=True) for i in some if part[0] == wanted]
        assert listed == in_order(listed)


@given(st.lists(st.integers(1, 1000), max_size=12), st.integers(1, 6))
def test_merging_leaves_few_runs(sizes: list[int], limit: int) -> None:
    first = merge_from(sizes, limit)
    assert (first is None) == (len(sizes) <= limit)
    if first is not None:
        assert first + 1 <= limit
        assert first < len(sizes) - 1


@given(st.lists(FEW_STATES, max_size=9), st.integers(1, 4))
def test_a_folder_shows_the_newest_state_before_and_after_merging(
    tmp_path_factory: pytest.TempPathFactory, states: list[dict[int, bool]], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    runs, history = log_in(folder, limit=limit), histories(states)
    for n, state in enumerate(history):
        publish(runs, state, n + 1)
        check(runs, newest(history[: n + 1]))
        for _ in runs.merge(TABLE):
            check(runs, newest(history[: n + 1]))
        check(runs, newest(history[: n + 1]))
        assert len(list(folder.glob("*.run"))) <= limit
        if n % 3 == 1:
            runs.close()
            runs = log_in(folder, limit=limit)
            assert runs.cut == n + 1
    check(runs, newest(history))
    runs.close()


def test_a_row_and_its_erase_in_one_run_are_told_apart_by_their_versions(tmp_path: Path) -> None:
    runs = log_in(tmp_path)
    writer = runs.begin(TABLE)
    both = in_order([1, 2])
    writer.add_rows(u64(both), records(both, [{1: 10, 2: 30}[i] for i in both]))
    writer.add_erased(u64(both), u64([20, 20]))
    count(runs, [writer], 5)
    base = runs.view.find(TABLE, u64([1, 2]))
    assert (base.exists.tolist(), base.versions.tolist()) == ([False, True], [20, 30])
    runs.close()


def test_erased_rows_stay_erased_when_only_the_newest_runs_are_merged(tmp_path: Path) -> None:
    runs = log_in(tmp_path, limit=2)
    publish(runs, {i: (5, True) for i in range(100)}, 9)
    publish(runs, {3: (15, False), 200: (15, True)}, 19)
    publish(runs, {4: (25, False), 3: (26, True)}, 29)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.run"))
    list(runs.merge(TABLE))
    merged = [path.stat().st_size for path in tmp_path.glob("*.run")]
    assert (len(merged), sum(merged) < size) == (2, True)
    check(runs, {**{i: (5, True) for i in range(100)}, 3: (26, True), 4: (25, False), 200: (15, True)})
    runs.close()


def test_erased_rows_are_known_since_the_newest_note_that_a_merge_forgot(tmp_path: Path) -> None:
    runs = log_in(tmp_path, limit=1)
    publish(runs, {1: (5, True), 2: (5, True)}, 9)
    publish(runs, {3: (15, True)}, 19)
    list(runs.merge(TABLE))
    assert runs._saved.now.of(TABLE).erased_since == 0  # nothing was erased
    publish(runs, {1: (25, False), 2: (21, False)}, 29)
    publish(runs, {2: (35, True)}, 39)
    list(runs.merge(TABLE))
    assert runs._saved.now.of(TABLE).erased_since == 25
    check(runs, {2: (35, True), 3: (15, True)})
    runs.close()


def test_a_row_that_came_back_from_another_shard_outlives_the_note_that_it_was_gone(tmp_path: Path) -> None:
    runs = log_in(tmp_path, limit=2)
    publish(runs, {1: (5, True), 2: (5, True)}, 9)
    publish(runs, {1: (50, False)}, 50)  # its slot was handed over
    publish(runs, {1: (7, True)}, 50)  # and handed back, as another shard had written it meanwhile
    check(runs, {1: (7, True), 2: (5, True)})
    list(runs.merge(TABLE))
    assert len(list(tmp_path.glob("*.run"))) == 1
    check(runs, {1: (7, True), 2: (5, True)})
    runs.close()


def test_what_a_crash_left_over_is_deleted_and_a_writer_at_work_is_not(tmp_path: Path) -> None:
    runs = log_in(tmp_path)
    publish(runs, {1: (5, True)}, 9)
    (tmp_path / "000000000077.run").write_bytes(b"half")
    (tmp_path / "state.tmp").write_bytes(b"half")
    at_work = runs.begin(TABLE)
    at_work.add_rows(u64([3]), records([3], [6]))
    publish(runs, {2: (7, True)}, 10)
    count(runs, [at_work], 11)
    check(runs, {1: (5, True), 2: (7, True), 3: (6, True)})
    assert len(list(tmp_path.glob("*.run"))) == 3
    runs.close()
    (tmp_path / "000000000078.run").write_bytes(b"half")
    again = log_in(tmp_path)
    assert len(list(tmp_path.glob("*.run"))) == 3
    assert not list(tmp_path.glob("*.tmp"))
    check(again, {1: (5, True), 2: (7, True), 3: (6, True)})
    again.close()


def test_a_state_that_may_not_be_durable_keeps_both_logs_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = log_in(tmp_path, limit=1)
    publish(runs, {1: (5, True)}, 9)
    publish(runs, {1: (7, True)}, 10)

    def fail(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    old = (tmp_path / STATE).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("tests.unit.run_states.sync_folder", fail)
        with pytest.raises(Exception, match="Input/output error"):
            list(runs.merge(TABLE))
    check(runs, {1: (7, True)})
    runs.close()
    for data in ((tmp_path / STATE).read_bytes(), old):
        (tmp_path / "copy").mkdir()
        for path in tmp_path.glob("*.run"):
            os.link(path, tmp_path / "copy" / path.name)
        (tmp_path / "copy" / STATE).write_bytes(data)
        again = log_in(tmp_path / "copy")
        check(again, {1: (7, True)})
        again.close()
        for path in (tmp_path / "copy").iterdir():
            path.unlink()
        (tmp_path / "copy").rmdir()


def test_rows_of_tables_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    runs = log_in(tmp_path)
    publish(runs, {1: (5, True)}, 9)
    runs.publish([], replace(runs._saved.now, tables=(), cut=make_version(2, 0)))
    check(runs, {})
    assert (runs.cut, list(tmp_path.glob("*.run"))) == (make_version(2, 0), [])
    runs.close()


def test_a_missing_run_is_refused(tmp_path: Path) -> None:
    runs = log_in(tmp_path)
    publish(runs, {1: (5, True)}, 9)
    runs.close()
    next(tmp_path.glob("*.run")).unlink()
    with pytest.raises(JournalDamagedError, match=r"\.run: .*missing"):
        log_in(tmp_path)


def test_another_run_under_the_name_is_refused(tmp_path: Path) -> None:
    runs = log_in(tmp_path)
    publish(runs, {1: (5, True)}, 9)
    runs.close()
    next(tmp_path.glob("*.run")).write_bytes(encoded({1: (5, True), 2: (5, True)}))
    with pytest.raises(JournalDamagedError, match="another run"):
        log_in(tmp_path)


def test_records_of_other_ids_are_refused(tmp_path: Path) -> None:
    runs = log_in(tmp_path)
    writer = runs.begin(TABLE)
    writer.add_rows(u64(in_order([1, 2])), records([{1: 1, 2: 3}[i] for i in in_order([1, 2])], [5, 5]))
    count(runs, [writer], 5)
    with pytest.raises(RecordError, match="id 2"):
        runs.view.find(TABLE, u64([1, 2]))
    runs.close()


def test_a_table_of_another_definition_is_refused(tmp_path: Path) -> None:
    runs = log_in(tmp_path)
    publish(runs, {1: (5, True)}, 9)
    other = TableDef("t", 3, kvemb.optim.sgd(0.5), kvemb.init.zeros())
    with pytest.raises(ParameterServerError, match="another cluster's"):
        list(runs.merge(other))
    runs.close()


def test_a_part_of_the_rows_is_listed(tmp_path: Path) -> None:
    runs, ids = log_in(tmp_path), in_order(range(30))
    publish(runs, {i: (5, True) for i in range(30)}, 9)
    publish(runs, {i: (15, False) for i in ids[::3]}, 19)
    keys = TABLE.order.keys(u64(ids)).tolist()
    for first, end in ((0, 30), (7, 19), (12, 12), (29, 30)):
        high = keys[end] if end < 30 else 1 << 64
        listed = [i for some, _ in runs.between(TABLE, keys[first], high) for i in some.tolist()]
        assert listed == [i for at, i in enumerate(ids) if first <= at < end and at % 3]
    runs.close()


def test_many_rows_are_found_by_fences_and_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # blocks of their own size
    random, runs = np.random.default_rng(0), log_in(tmp_path)
    keys = np.unique(random.integers(0, 2**64, 50_000, np.uint64))
    writer = runs.begin(TABLE)
    for start in range(0, len(keys), 7000):
        some, versions = keys[start : start + 7000], np.arange(start + 1, start + 1 + len(keys[start : start + 7000]), dtype=np.uint64)
        writer.add(ROWS, some, versions, np.zeros((len(some), RECORD.size_bytes), np.uint8))
    count(runs, [writer], 1)
    at = random.permutation(len(keys))[:20_000]
    others = np.setdiff1d(np.concatenate([keys[:5000] + np.uint64(1), np.array([0, 2**64 - 1], np.uint64)]), keys)
    versions, exists = runs.versions(TABLE, TABLE.order.ids(np.concatenate([keys[at], others])))
    assert exists.tolist() == [True] * len(at) + [False] * len(others)
    assert versions.tolist() == [*(at + 1).tolist(), *[0] * len(others)]
    runs.close()


def test_a_disk_that_fails_while_more_is_written_fails_the_run(tmp_path: Path) -> None:
    def later(sync: Callable[[int], None], descriptor: int) -> "Future[None]":
        future: Future[None] = Future()
        future.set_exception(OSError(errno.EIO, "it is broken"))
        return future

    definition = TableDef("t", 64, kvemb.optim.adam(), kvemb.init.zeros())
    writer = RunWriter(tmp_path / "1.run", 1, definition, later)
    keys = np.arange(30_000, dtype=np.uint64)

    def write() -> None:
        for some in np.split(keys, 6):
            writer.add(ROWS, some, some + np.uint64(1), np.zeros((len(some), definition.record.size_bytes), np.uint8))

    with pytest.raises(JournalFullError, match="it is broken"):
        write()
    writer.drop()
    assert not list(tmp_path.iterdir())
