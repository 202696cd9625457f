"""A table whose rows are mostly on disk behaves as a dict of id to version, whatever is in memory, and whenever the log is written."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvemb import init, optim
from kvemb.arrays.row_index import END
from kvemb.schema.slots import N_SLOTS
from kvemb.schema.table_def import TableDef
from paramserver.model.tables import Tables, TableState
from paramserver.row_log.log_flush import LogFlush
from paramserver.row_log.run_set import Runs
from tests.unit.run_states import present, saved_in

PLAIN = TableDef("t", 2, optim.sgd(), init.zeros())
DENSE = TableDef("t", 2, optim.sgd(), init.zeros(), num_ids=1 << 40)
IDS = st.lists(st.one_of(st.integers(0, 40), st.integers(0, (1 << 40) - 1)), unique=True, max_size=20)
STEP = st.one_of(
    st.tuples(st.sampled_from(["apply", "erase", "look", "took"]), IDS),
    st.tuples(st.just("publish"), st.tuples(st.floats(0, 0.9), st.booleans())),
)


def u64(values: object) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


class MemoryLog:
    """The newest state of each id that was published."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.n_asked = 0

    def versions(self, definition: TableDef, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.n_asked += len(ids)
        versions = u64([self.rows.get(row, 0) for row in ids.tolist()])
        return versions, versions != 0

    def between(self, definition: TableDef, low: int, high: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        ids = u64(list(self.rows))
        keys = definition.order.keys(ids)
        order = np.argsort(keys)
        ids = ids[order][[low <= key < high for key in keys[order].tolist()]]
        for start in range(0, len(ids), 3):
            some = ids[start : start + 3]
            yield some, u64([self.rows[row] for row in some.tolist()])

    def write(self, state: TableState, above: int) -> None:
        for ids, _ in state.gone():
            for row in ids.tolist():
                self.rows.pop(row, None)
        for ids, versions in state.portions(above=above):
            self.rows.update(zip(ids.tolist(), versions.tolist(), strict=True))


def listed(state: TableState, n_rows: int = 10) -> dict[int, int]:
    """Every row, by portions that never go back."""
    found, low = {}, 0
    while low < END:
        ids, versions, next_ = state.portion(low, n_rows=n_rows)
        keys = state.definition.order.keys(ids).tolist()
        assert keys == sorted(set(keys))
        assert all(low <= key < next_ for key in keys)
        found.update(zip(ids.tolist(), versions.tolist(), strict=True))
        low = next_
    return found


@pytest.mark.parametrize("definition", [PLAIN, DENSE], ids=["plain", "dense"])
def test_a_table_mostly_on_disk_is_a_dict(definition: TableDef) -> None:
    @given(st.lists(STEP, max_size=30))
    def check(steps: list[tuple[str, object]]) -> None:
        log, model, last = MemoryLog(), dict[int, int](), 0
        state = TableState(definition, log=log)
        for version, (verb, what) in enumerate(steps, start=1):
            ids = u64(what) if verb != "publish" else u64([])
            if verb == "apply":
                if version % 2:
                    assert state.versions(ids, keep=True).tolist() == [model.get(row, 0) for row in ids.tolist()]
                state.applied(ids, version)
                model.update(dict.fromkeys(ids.tolist(), version))
            elif verb == "erase":
                assert state.erased(ids, version) == sum(model.pop(row, None) is not None for row in ids.tolist())
            elif verb == "took":
                come = u64([row for row in ids.tolist() if row not in model])
                state.took(come, np.full(len(come), version, np.uint64), len(come))
                model.update(dict.fromkeys(come.tolist(), version))
            elif verb == "publish":
                share, late = what  # type: ignore[misc]
                log.write(state, last)
                if late:  # what changes while a log is written has later versions
                    some = u64(list(model)[:3])
                    assert state.erased(some[:1], version) == len(some[:1])
                    state.applied(some[1:], version)
                    model.update(dict.fromkeys(some[1:].tolist(), version))
                    model.pop(int(some[0]), None) if len(some) else None
                last = version - 1
                state.published(last)
                state.let_leave(share)
            else:
                assert state.known(ids).tolist() == [row in model for row in ids.tolist()]
                assert state.versions(ids).tolist() == [model.get(row, 0) for row in ids.tolist()]
            assert state.n_rows == len(model)
        assert listed(state) == model
        slots = np.arange(N_SLOTS) // 2048 % 2 == 0
        found = np.concatenate([u64([]), *(ids for ids, _ in state.portions(slots, 10))])
        assert sorted(found.tolist()) == sorted(row for row in model if slots[definition.placement.slots(u64([row]))[0]])
        middle = len(steps) // 2
        newer = np.concatenate([u64([]), *(ids for ids, _ in state.portions(above=middle))])
        assert sorted(newer.tolist()) == sorted(row for row, version in model.items() if version > middle)
        assert sorted(state.page(0, 1000).tolist()) == sorted(model)

    check()


def test_the_log_is_not_asked_while_memory_has_every_row() -> None:
    log = MemoryLog()
    tables = Tables([], log=log, index_bytes=1 << 20)
    state, ids = tables.state(PLAIN), np.arange(10_000, dtype=np.uint64)
    state.applied(ids, 5)
    log.write(state, 0)
    tables.published(5)
    state.applied(ids[:100], 6)
    assert state.versions(np.arange(9_000, 12_000, dtype=np.uint64)).tolist() == [5] * 1000 + [0] * 2000
    assert len(listed(state, 1000)) == 10_000
    assert log.n_asked == 0


def test_the_rows_written_longest_ago_leave_and_the_memory_is_given_back() -> None:
    log = MemoryLog()
    tables = Tables([], log=log, index_bytes=500_000)
    state, ids = tables.state(PLAIN), np.arange(100_000, dtype=np.uint64)
    for version in range(1, 11):
        state.applied(ids[(version - 1) * 10_000 : version * 10_000], version)
    log.write(state, 0)
    assert state.index_bytes > 2_000_000
    tables.published(10)
    assert state.index_bytes < 500_000
    assert state.n_rows == 100_000
    assert state.versions(ids[95_000:]).tolist() == [10] * 5_000
    assert log.n_asked == 0, "the newest are in memory"
    assert state.versions(ids[:5_000]).tolist() == [1] * 5_000
    assert log.n_asked == 5_000


def test_a_push_asks_the_log_once(tmp_path: Path) -> None:
    log = MemoryLog()
    state, ids = TableState(PLAIN, log=log), np.arange(100, dtype=np.uint64)
    state.applied(ids[:50], 5)
    log.write(state, 0)
    state.published(5)
    state.let_leave(0)
    assert state.versions(ids, keep=True).tolist() == [5] * 50 + [0] * 50
    assert state.versions(ids, keep=True).tolist() == [5] * 50 + [0] * 50
    state.applied(ids, 6)
    assert log.n_asked == 100
    assert (state.n_rows, state.versions(ids).tolist()) == (100, [6] * 100)


def written(state: TableState, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Records as storage would have them."""
    weights = np.zeros((len(ids), 2), np.float32)
    records = state.definition.record.encode(ids, state.versions(ids), weights, np.empty((len(ids), 0), np.float32))
    return records, np.ones(len(ids), bool)


def test_runs_on_disk_are_such_a_log(tmp_path: Path) -> None:
    saved = saved_in(tmp_path)
    runs, rng = Runs(tmp_path / "log", saved), np.random.default_rng(7)
    tables = Tables([], log=runs, index_bytes=0)
    state, model, ids = tables.state(DENSE), dict[int, int](), np.arange(20_000, dtype=np.uint64)
    for version in range(1, 9):
        some = rng.choice(ids, 3000, replace=False)
        if version % 3 == 0:
            assert state.erased(some, version) == sum(model.pop(row, None) is not None for row in some.tolist())
        else:
            state.applied(some, version)
            model.update(dict.fromkeys(some.tolist(), version))
        if version % 2 == 0:
            flush = LogFlush(runs, tables, written, lambda: version)  # noqa: B023
            for _ in chain(flush.steps(lambda: present(saved, tables, version)), flush.merges()):  # noqa: B023
                pass
        assert state.n_rows == len(model)
    assert listed(state, 1000) == model
    runs.close()
