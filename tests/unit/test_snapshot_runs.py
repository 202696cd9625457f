"""Runs of rows: each is read back whole or refused, the newest state of an id wins, and merging changes nothing that can be seen."""

import os
import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import kvemb.init
import kvemb.optim
from kvemb.errors import JournalDamagedError, RecordError
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from paramserver.snapshot import Runs
from paramserver.snapshot.run_merge import merge_from, merged
from paramserver.snapshot.sorted_run import ERASED, ROWS, SortedRunEncoder
from tests.unit.snapshot_states import (
    FEW_STATES,
    RECORD,
    STATES,
    TABLE,
    State,
    check,
    encoded,
    erased,
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
    run = opened(encoded(state))
    assert state_of(run) == state
    assert sum(len(ids) for kind in (ROWS, ERASED) for ids in run.ids(kind)) == len(state)
    assert [i for ids in run.ids(ROWS) for i in ids.tolist()] == sorted(i for i in state if state[i][1])


@given(STATES, st.lists(st.integers(0, 2**64 - 1), max_size=10))
def test_rows_are_found(state: State, others: list[int]) -> None:
    run, ids = opened(encoded(state)), u64(sorted({*others, *list(state)[::2]}))
    for kind in (ROWS, ERASED):
        found = {int(ids[at]): rest.tobytes() for ats, rests in run.find(kind, ids) for at, rest in zip(ats, rests, strict=True)}
        wanted = sorted(i for i in set(ids.tolist()) & set(state) if state[i][1] is (kind == ROWS))
        rest = (records if kind == ROWS else lambda ids, versions: erased(versions))(wanted, [state[i][0] for i in wanted])
        assert found == {i: one.tobytes() for i, one in zip(wanted, rest, strict=True)}


DATA = encoded({i * 3: (i + 1, i % 4 > 0) for i in range(20)})


@given(st.integers(0, 8 * len(DATA) - 1))
def test_a_flipped_bit_is_refused(bit: int) -> None:
    data = bytearray(DATA)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(JournalDamagedError, match=r"the/run: offset \d+: "):
        state_of(opened(bytes(data)))


@given(st.integers(0, len(DATA) - 1))
def test_a_truncated_run_is_refused(size: int) -> None:
    with pytest.raises(JournalDamagedError, match="the/run"):
        opened(DATA[:size])


@given(st.binary(max_size=300))
def test_noise_is_no_run(noise: bytes) -> None:
    for data in (noise, DATA[:16] + noise + DATA[-32:], DATA + noise[:1] + b"x"):
        with pytest.raises(JournalDamagedError, match="the/run"):
            opened(data)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=7, max_size=21))
def test_a_footer_whose_checksum_is_right_may_still_be_wrong(numbers: list[int]) -> None:
    """A program that can write the file can write checksums; allocated memory stays bounded by the file's size."""
    footer = u64(numbers[: len(numbers) // 7 * 7]).tobytes()
    place = struct.pack("<QQ", 16, len(footer) // 56)
    data = DATA[:16] + footer + place
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
    encoder, pieces = SortedRunEncoder(RECORD.size_bytes), []
    for part in merged([opened(encoded(state)) for state in history], RECORD.versions, forget_up_to=forget):
        pieces += [bytes(piece) for piece in encoder.add(*part)]
    result = state_of(opened(b"".join([encoder.header(), *pieces, encoder.footer()])))
    assert result == {i: one for i, one in newest(history).items() if one[1] or keep_erased}


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
    runs, history = Runs(folder, limit=limit), histories(states)
    for n, state in enumerate(history):
        publish(runs, state, n + 1)
        check(runs, newest(history[: n + 1]))
        for _ in runs.merge(TABLE):
            check(runs, newest(history[: n + 1]))
        check(runs, newest(history[: n + 1]))
        assert len(list(folder.glob("*.run"))) <= limit
        if n % 3 == 1:
            runs.close()
            runs = Runs(folder, limit=limit)
            assert runs.cut == n + 1
    check(runs, newest(history))
    runs.close()


def test_a_row_and_its_erase_in_one_run_are_told_apart_by_their_versions(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    writer = runs.begin(TABLE)
    writer.add(ROWS, u64([1, 2]), records([1, 2], [10, 30]))
    writer.add(ERASED, u64([1, 2]), erased([20, 20]))
    runs.publish([writer], 5)
    base = runs.find(TABLE, u64([1, 2]))
    assert (base.exists.tolist(), base.versions.tolist()) == ([False, True], [20, 30])
    runs.close()


def test_erased_rows_stay_erased_when_only_the_newest_runs_are_merged(tmp_path: Path) -> None:
    runs = Runs(tmp_path, limit=2)
    publish(runs, {i: (5, True) for i in range(100)}, 9)
    publish(runs, {3: (15, False), 200: (15, True)}, 19)
    publish(runs, {4: (25, False), 3: (26, True)}, 29)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.run"))
    list(runs.merge(TABLE))
    merged = [path.stat().st_size for path in tmp_path.glob("*.run")]
    assert (len(merged), sum(merged) < size) == (2, True)
    check(runs, {**{i: (5, True) for i in range(100)}, 3: (26, True), 4: (25, False)})
    runs.close()


def test_a_row_that_came_back_from_another_shard_outlives_the_note_that_it_was_gone(tmp_path: Path) -> None:
    runs = Runs(tmp_path, limit=2)
    publish(runs, {1: (5, True), 2: (5, True)}, 9)
    publish(runs, {1: (50, False)}, 50)  # its slot was handed over
    publish(runs, {1: (7, True)}, 50)  # and handed back, as another shard had written it meanwhile
    check(runs, {1: (7, True), 2: (5, True)})
    list(runs.merge(TABLE))
    assert len(list(tmp_path.glob("*.run"))) == 1
    check(runs, {1: (7, True), 2: (5, True)})
    runs.close()


def test_what_a_crash_left_over_is_deleted_and_a_writer_at_work_is_not(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    publish(runs, {1: (5, True)}, 9)
    (tmp_path / "000000000077.run").write_bytes(b"half")
    (tmp_path / "manifest.tmp").write_bytes(b"half")
    at_work = runs.begin(TABLE)
    at_work.add(ROWS, u64([3]), records([3], [6]))
    publish(runs, {2: (7, True)}, 10)
    runs.publish([at_work], 11)
    check(runs, {1: (5, True), 2: (7, True), 3: (6, True)})
    assert len(list(tmp_path.glob("*.run"))) == 3
    runs.close()
    (tmp_path / "000000000078.run").write_bytes(b"half")
    again = Runs(tmp_path)
    assert len(list(tmp_path.glob("*.run"))) == 3
    assert not list(tmp_path.glob("*.tmp"))
    check(again, {1: (5, True), 2: (7, True), 3: (6, True)})
    again.close()


def test_a_manifest_that_may_not_be_durable_keeps_both_snapshots_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(tmp_path, limit=1)
    publish(runs, {1: (5, True)}, 9)
    publish(runs, {1: (7, True)}, 10)

    def fail(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    old = (tmp_path / "manifest").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("paramserver.snapshot.run_set.sync_folder", fail)
        with pytest.raises(Exception, match="Input/output error"):
            list(runs.merge(TABLE))
    check(runs, {1: (7, True)})
    runs.close()
    for data in ((tmp_path / "manifest").read_bytes(), old):
        (tmp_path / "copy").mkdir()
        for path in tmp_path.glob("*.run"):
            os.link(path, tmp_path / "copy" / path.name)
        (tmp_path / "copy" / "manifest").write_bytes(data)
        again = Runs(tmp_path / "copy")
        check(again, {1: (7, True)})
        again.close()
        for path in (tmp_path / "copy").iterdir():
            path.unlink()
        (tmp_path / "copy").rmdir()


def test_rows_of_tables_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    publish(runs, {1: (5, True)}, 9)
    runs.publish([], make_version(2, 0), only=True)
    check(runs, {})
    assert (runs.cut, list(tmp_path.glob("*.run"))) == (make_version(2, 0), [])
    runs.close()


def test_a_missing_run_is_refused(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    publish(runs, {1: (5, True)}, 9)
    runs.close()
    next(tmp_path.glob("*.run")).unlink()
    with pytest.raises(JournalDamagedError, match=r"\.run: .*missing"):
        Runs(tmp_path)


def test_another_run_under_the_name_is_refused(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    publish(runs, {1: (5, True)}, 9)
    runs.close()
    next(tmp_path.glob("*.run")).write_bytes(encoded({1: (5, True), 2: (5, True)}))
    again = Runs(tmp_path)
    with pytest.raises(JournalDamagedError, match="another run"):
        again.find(TABLE, u64([1]))
    again.close()


def test_records_of_other_ids_are_refused(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    writer = runs.begin(TABLE)
    writer.add(ROWS, u64([1, 2]), records([1, 3], [5, 5]))
    runs.publish([writer], 5)
    with pytest.raises(RecordError, match="id 2"):
        runs.find(TABLE, u64([1, 2]))
    runs.close()


def test_a_table_of_another_definition_is_refused(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    publish(runs, {1: (5, True)}, 9)
    other = TableDef("t", 3, kvemb.optim.sgd(0.5), kvemb.init.zeros())
    with pytest.raises(JournalDamagedError, match="another definition"):
        runs.find(other, u64([1]))
    runs.close()
