"""States of a table as a snapshot run holds them."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import strategies as st

import kvemb.init
import kvemb.optim
from kvemb.schema.table_def import TableDef
from paramserver.snapshot import Runs, sorted_run
from paramserver.snapshot.sorted_run import ERASED, ROWS, SortedRun, SortedRunEncoder

TABLE = TableDef("t", 2, kvemb.optim.sgd(0.5), kvemb.init.zeros())
RECORD = TABLE.record


def u64(values: object) -> np.ndarray:
    return np.array(list(values), np.uint64)  # type: ignore[call-overload]


def records(ids: list[int], versions: list[int]) -> np.ndarray:
    weights = np.array([[i % 97, v] for i, v in zip(ids, versions, strict=True)], np.float32).reshape(len(ids), 2)
    return RECORD.encode(u64(ids), u64(versions), weights, np.empty((len(ids), 0), np.float32))


def erased(versions: list[int]) -> np.ndarray:
    return u64(versions).view(np.uint8).reshape(len(versions), 8)


State = dict[int, tuple[int, bool]]
"""id -> (version, whether it exists)."""


def encoded(state: State) -> bytes:
    encoder = SortedRunEncoder(RECORD.size_bytes)
    pieces: list[bytes | memoryview] = [encoder.header()]
    live, gone = (sorted(i for i in state if state[i][1] is exists) for exists in (True, False))
    pieces += encoder.add(ERASED, u64(gone), erased([state[i][0] for i in gone]))
    for part in (live[:3], live[3:]):
        pieces += encoder.add(ROWS, u64(part), records(part, [state[i][0] for i in part]))
    pieces.append(encoder.footer())
    data = b"".join(pieces)
    assert len(data) == encoder.size_bytes
    return data


def state_of(run: SortedRun) -> State:
    rows = [(i, v, True) for ids, rest in run.blocks(ROWS) for i, v in zip(ids.tolist(), RECORD.versions(rest).tolist(), strict=True)]
    gone = [(i, v, False) for ids, rest in run.blocks(ERASED) for i, v in zip(ids.tolist(), rest.view("<u8")[:, 0].tolist(), strict=True)]
    return {i: (v, exists) for i, v, exists in rows + gone}


STATES = st.dictionaries(st.integers(0, 2**64 - 1), st.tuples(st.integers(1, 2**50), st.booleans()), max_size=30)
FEW_STATES = st.dictionaries(st.integers(0, 12), st.booleans(), max_size=8)


def publish(runs: Runs, state: State, cut: int) -> None:
    writer = runs.begin(TABLE)
    live, gone = (sorted(i for i in state if state[i][1] is exists) for exists in (True, False))
    writer.add(ROWS, u64(live), records(live, [state[i][0] for i in live]))
    writer.add(ERASED, u64(gone), erased([state[i][0] for i in gone]))
    runs.publish([writer], cut)


def check(runs: Runs, wanted: State) -> None:
    ids = list(range(15))
    base = runs.find(TABLE, u64(ids))
    assert base.exists.tolist() == [wanted.get(i, (0, False))[1] for i in ids]
    live = [i for i in ids if base.exists[i]]
    assert base.versions[live].tolist() == [wanted[i][0] for i in live]
    assert base.records[live].tobytes() == records(live, [wanted[i][0] for i in live]).tobytes()


def reading(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, size: data[offset : offset + size]


def opened(data: bytes) -> SortedRun:
    return SortedRun(reading(data), len(data), "the/run")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_run, "BLOCK_BYTES", 100)
