"""Comparing a checkpoint with storage, and what commands show on the way."""

import io
from itertools import count

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore

from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.load import Decision, Report, newest_decision, newest_report
from kvemb.checkpoint.verify import Comparison, compare
from kvemb.commands.terminal_output import ProgressMeter
from kvemb.config import StorageConfig
from kvemb.errors import ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.record import make_version
from kvemb.stores.row_io import WritePart
from tests.unit.checkpoint_files import CLUSTER_ID, USER, block_of, ids_of, in_order, save

_NUMBERS = count()


def stored(changes: dict[int, tuple[int, float]], n: int = 10) -> MemoryStore:
    """Storage with rows 0 to n - 1 as a save with k = 1 has them, but for changes: id -> (k, value), k = 0: no row."""
    store = MemoryStore(StorageConfig("memory", (f"compare-{next(_NUMBERS)}:1",)), role="shard:0")
    store.provision(b"c" * 16, b"g" * 8, Deadline.after(60))
    store.open(Deadline.after(60))
    for i in range(n):
        k, value = changes.get(i, (1, 1.0))
        if k:
            ids = ids_of([i])
            records = block_of(USER, ids, make_version(1, k), value).records(USER, make_version(1, k))
            store.rows.write([WritePart(RowKeys(USER.tag, ids), records, np.zeros(1, np.uint64))], Deadline.after(60))
    return store


@pytest.mark.parametrize(
    ("changes", "cluster_id", "weights_only", "expected"),
    [
        ({}, CLUSTER_ID, False, Comparison("user", 10, 10)),
        ({3: (2, 7.0)}, CLUSTER_ID, False, Comparison("user", 10, 9, n_newer=1)),
        ({3: (2, 7.0)}, "d" * 32, False, Comparison("user", 10, 9, n_different=1, first=3)),  # versions of another cluster say nothing
        ({3: (1, 7.0), 8: (1, 2.0)}, CLUSTER_ID, False, Comparison("user", 10, 8, n_different=2, first=3)),
        ({9: (0, 0.0)}, CLUSTER_ID, False, Comparison("user", 10, 9, n_missing=1, first=9)),
        ({3: (9, 1.0)}, CLUSTER_ID, True, Comparison("user", 10, 10)),  # a new version of the same bytes, as after a load
    ],
)
def test_every_row_is_compared(changes: dict[int, tuple[int, float]], cluster_id: str, weights_only: bool, expected: Comparison) -> None:
    fsspec.filesystem("memory").store.clear()
    save("memory://compare/a", range(10), k=1, weights_only=weights_only)
    seen: list[tuple[int, int]] = []
    with stored(changes) as store:
        options = {"cluster_id": cluster_id, "timeout_s": 5.0}
        found = compare(open_chain("memory://compare/a"), store, {"user": USER}, progress=lambda *how: seen.append(how), **options)  # type: ignore[arg-type]
        gone = compare(open_chain("memory://compare/a"), store, {}, progress=lambda *how: None, **options)  # type: ignore[arg-type]
    assert found == [expected]
    assert found[0].good == (expected.first is None)
    assert seen[-1] == (10, 10)
    assert (gone[0].n_missing, gone[0].good) == (10, False)


def test_rows_are_compared_in_the_order_in_which_they_stand_and_the_first_of_them_is_named() -> None:
    assert in_order([2, 8]).tolist() == [8, 2]  # one shard's
    fsspec.filesystem("memory").store.clear()
    save("memory://compare/a", range(10), k=1)
    with stored({2: (1, 7.0), 8: (0, 0.0)}) as store:
        chain = open_chain("memory://compare/a")
        found = compare(chain, store, {"user": USER}, cluster_id=CLUSTER_ID, timeout_s=5.0, progress=lambda *how: None)
    assert found == [Comparison("user", 10, 8, n_different=1, n_missing=1, first=8)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_rate_and_time_left_and_is_clean_afterwards() -> None:
    now, screen = [0.0], Terminal()
    with ProgressMeter(screen, "rows", clock=lambda: now[0]) as meter:
        for second in range(5):
            now[0] = float(second)
            meter("saving", 1000 * second, 10_000)
    lines = screen.getvalue().split("\r")
    assert any(line.startswith("saving 4,000 of 10,000 rows (40 %), 1,000 rows/s, 6 s left") for line in lines)
    assert lines[-2].strip() == ""


def test_a_file_gets_no_progress() -> None:
    out = io.StringIO()
    with ProgressMeter(out, "B") as meter:
        meter("saving", 1, 2)
    assert out.getvalue() == ""


DECISION, REPORT = Decision(7, "a" * 32, "s3://b/c", "b" * 32), Report("a" * 32, "reading", "", 1, 2, 3)


def test_the_newest_copy_counts() -> None:
    assert newest_decision([None]) is None
    assert newest_decision([DECISION.encode(), None, Decision(6, "c", "u", "s").encode()]) == DECISION
    assert newest_report([REPORT.encode(), Report("a", "done", "", 1, 1, 2).encode()]) == REPORT


@given(st.data())
def test_what_is_no_decision_is_refused(data: st.DataObject) -> None:
    raw = bytearray(DECISION.encode())
    raw[data.draw(st.integers(0, 14))] = data.draw(st.integers(0, 255))
    for bad in (bytes(raw), data.draw(st.binary(max_size=30)), REPORT.encode()):
        try:
            found = newest_decision([bad])
        except ProtocolError:
            continue
        assert found is not None
        assert (found.load_id, found.url) == (DECISION.load_id, DECISION.url)
