"""States of a table as a run holds them, and a row log in a folder of its own."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import strategies as st

import kvemb.init
import kvemb.optim
from kvemb.process import sync_folder
from kvemb.schema.record import split_version
from kvemb.schema.table_def import TableDef
from paramserver.journal import START, Position
from paramserver.model.tables import Tables, TableState
from paramserver.row_log import Runs, sorted_run
from paramserver.row_log.run_writer import RunWriter
from paramserver.row_log.sorted_run import ERASED, ROWS, SortedRun
from paramserver.row_log.state_file import STATE, LoggedTable, SavedState, ShardState, decode_state
from paramserver.shard_process.data_dir import replace_privately, sweep

TABLE = TableDef("t", 2, kvemb.optim.sgd(0.5), kvemb.init.zeros())
RECORD = TABLE.record


def u64(values: object) -> np.ndarray:
    return np.array(list(values), np.uint64)  # type: ignore[call-overload]


def records(ids: list[int], versions: list[int]) -> np.ndarray:
    weights = np.array([[i % 97, v] for i, v in zip(ids, versions, strict=True)], np.float32).reshape(len(ids), 2)
    return RECORD.encode(u64(ids), u64(versions), weights, np.empty((len(ids), 0), np.float32))


State = dict[int, tuple[int, bool]]
"""id -> (version, whether it exists)."""


def in_order(ids: Iterable[int]) -> list[int]:
    """Ids in the order in which runs have them."""
    return TABLE.order.ids(np.sort(TABLE.order.keys(u64(ids)))).tolist()


def add(writer: RunWriter, state: State) -> None:
    """Write a state, its rows in two parts."""
    live, gone = (in_order(i for i in state if state[i][1] is exists) for exists in (True, False))
    writer.add_erased(u64(gone), u64(state[i][0] for i in gone))
    for part in (live[:3], live[3:]):
        writer.add_rows(u64(part), records(part, [state[i][0] for i in part]))


def encoded(state: State) -> bytes:
    with TemporaryDirectory() as folder:
        writer = RunWriter(path := Path(folder) / "run", 1, TABLE)
        add(writer, state)
        if writer.finish() is None:
            writer.drop()
            return b""
        assert path.stat().st_size == writer.size_bytes
        return path.read_bytes()


def state_of(run: SortedRun) -> State:
    parts = [part for kind in (ROWS, ERASED) for part in run.blocks(kind)]
    for kind, keys, versions, rows in parts:
        assert kind == ERASED or rows.tobytes() == records(TABLE.order.ids(keys).tolist(), versions.tolist()).tobytes()
    return {
        i: (v, kind == ROWS)
        for kind, keys, versions, _ in parts
        for i, v in zip(TABLE.order.ids(keys).tolist(), versions.tolist(), strict=True)
    }


STATES = st.dictionaries(st.integers(0, 2**64 - 1), st.tuples(st.integers(1, 2**50), st.booleans()), max_size=30)
FEW_STATES = st.dictionaries(st.integers(0, 12), st.booleans(), max_size=8)


class PlainFolder:
    """A shard's folder that several processes may have open."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, chunks: Iterable[bytes], check: Callable[[], None]) -> None:
        """See `DataDir.write`."""
        replace_privately(self.path / name, chunks, check)
        sync_folder(self.path)


def saved_in(folder: Path, still_ours: Callable[[], None] = lambda: None, tables: tuple[LoggedTable, ...] = ()) -> SavedState:
    """Return the saved state in a folder, as a process that has claimed it; or a new one with these tables."""
    sweep(folder)
    path = folder / STATE
    new = ShardState(b"c" * 16, 0, 1, tables=tables)
    state = decode_state(path.read_bytes(), str(path)) if path.exists() else new
    return SavedState(PlainFolder(folder), state, still_ours)  # type: ignore[arg-type]


def log_in(folder: Path, *, limit: int = 6, epoch: int = 0, still_ours: Callable[[], None] = lambda: None) -> Runs:
    """Open the row log in a folder, the runs beside the saved state."""
    return Runs(folder, saved_in(folder, still_ours, (LoggedTable(TABLE),)), limit=limit, epoch=epoch)


def present(saved: SavedState, tables: Tables, version: int, journal: Position = START) -> ShardState:
    """Return the state of a shard that has applied its batches up to a version."""
    epoch, k = split_version(version)
    logged = tuple(replace(saved.now.of(one.definition), step=one.step, n_rows=one.n_rows) for one in tables.all())
    return replace(saved.now, epoch=epoch, k=k, tables=logged, journal=journal)


def all_rows(state: TableState) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and versions of all rows of a table."""
    ids, versions = zip(*state.portions(), strict=True)
    return np.concatenate(ids), np.concatenate(versions)


def count(runs: Runs, writers: Sequence[RunWriter], cut: int) -> None:
    """Make new runs count."""
    runs.publish(writers, replace(runs._saved.now, cut=cut))


def publish(runs: Runs, state: State, cut: int) -> None:
    add(writer := runs.begin(TABLE), state)
    count(runs, [writer], cut)


def check(runs: Runs, wanted: State) -> None:
    ids = list(range(15))
    base = runs.view.find(TABLE, u64(ids))
    assert base.exists.tolist() == [wanted.get(i, (0, False))[1] for i in ids]
    live = [i for i in ids if base.exists[i]]
    assert base.versions[live].tolist() == [wanted[i][0] for i in live]
    assert base.records[live].tobytes() == records(live, [wanted[i][0] for i in live]).tobytes()
    versions, exists = runs.versions(TABLE, u64(ids))
    assert (exists.tolist(), versions.tolist()) == (base.exists.tolist(), base.versions.tolist())
    listed = [(i, v) for some, versions in runs.between(TABLE) for i, v in zip(some.tolist(), versions.tolist(), strict=True)]
    assert listed == [(i, wanted[i][0]) for i in in_order(wanted) if wanted[i][1]]


def reading(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, size: data[offset : offset + size]


def opened(data: bytes) -> SortedRun:
    return SortedRun(reading(data), np.frombuffer(data, "<u8", len(data) // 8), len(data), "the/run")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 rows, fences 2 rows apart."""
    for name, value in (("BLOCK_ROWS", 4), ("FENCE_ROWS", 2)):
        monkeypatch.setattr(sorted_run, name, value)
