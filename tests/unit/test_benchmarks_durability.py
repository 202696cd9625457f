"""The arithmetic and the refusals of the benchmarks durability, recovery and checkpoint. No server, no waiting, and no time is asserted."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from memory_store import MemoryStore

import kvemb
from benchmarks import checkpoint, durability, recovery, recovery_steps
from benchmarks.apply_load import Load, Pass, WrongApplyError
from benchmarks.checkpoint import Round
from benchmarks.disk import Moved
from benchmarks.ids import row_ids
from benchmarks.measure import Spread
from benchmarks.recovery_steps import Restored, Target, WrongRestoreError
from kvemb.checkpoint.format.checkpoint_manifest import ROWS, CheckpointManifest, FileEntry
from kvemb.config import StorageConfig
from kvemb.net.deadline import Deadline
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.marked_nodes import LostNode
from kvemb.stores.row_io import ReadPart, WritePart

DEFINITION = TableDef("t", 3, kvemb.optim.adam(lr=0.1), kvemb.init.zeros(), id_dtype="uint64")

_NUMBERS = count()


class Table:
    """A table whose rows are what the test says."""

    dim = 3
    cluster = None
    definition = DEFINITION

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self.pushed: list[int] = []
        self.flushed = 0

    def __len__(self) -> int:
        return self.n_rows

    def push(self, ids: np.ndarray, grads: np.ndarray, timeout_s: float) -> None:
        assert grads.shape == (len(ids), 3)
        self.pushed += ids.tolist()

    def flush(self, timeout_s: float) -> None:
        self.flushed += 1


def load_of(n_rows: int, batch: int = 10) -> Load:
    ids = row_ids(np.arange(n_rows))
    batches = [ids[at : at + batch] for at in range(0, n_rows, batch)]
    return Load(Table(n_rows), batches, np.ones((batch, 3), np.float32))  # type: ignore[arg-type]


def passed(rows_per_s: float, journal_bytes: int = 0) -> Pass:
    return Pass(100, 100 / rows_per_s, 1e-4, 2e-4, 3e-4, n_batches=2, journal_bytes=journal_bytes)


# --- durability -------------------------------------------------------------------------------------------------------------------------


def test_ratios_are_to_the_shard_whose_journal_is_not_synced_within_a_round() -> None:
    passes = {
        "os": [passed(100, 7200), passed(200, 7200), passed(400, 7200)],
        "fsync": [passed(90, 7200), passed(160, 7200), passed(200, 7200)],
    }
    os_, fsync, alone = durability.lines_of(passes, [Moved(2_000_000, 2.0), Moved(6_000_000, 2.0), Moved(2_000_000, 1.0)])
    assert os_.figures["ratio"] == Spread(1, 1, 1)
    assert fsync.figures["ratio"] == Spread(0.8, 0.5, 0.9)
    assert [line.figures.get("target") for line in (os_, fsync, alone)] == ["–", "ratio >= 0.8", None]
    assert (fsync.figures["B/row"], fsync.figures["rows/batch"]) == (72.0, "50")
    assert os_.figures["journal MB/s"].median == pytest.approx(0.0144)  # type: ignore[union-attr]
    assert fsync.figures["PS µs/row"].median == pytest.approx(3.0)  # type: ignore[union-attr]
    assert alone.figures == {"journal MB/s": Spread(2, 1, 3)}


# --- the disk alone ---------------------------------------------------------------------------------------------------------------------


# --- recovery ---------------------------------------------------------------------------------------------------------------------------


def test_recovery_is_compared_with_what_the_shard_applies_and_the_server_sets() -> None:
    ours = {"replay": [Restored(400, 2.0, 3.0), Restored(100, 1.0, 5.0)], "repair": [Restored(100, 4.0, 0.5)] * 2}
    lines = recovery.lines_of(ours, [passed(100), passed(50)], [400.0, 200.0])
    assert [line.name for line in lines] == ["push + flush", "redis-benchmark SET -P 256 -c 4 (C)", "replay", "repair"]
    assert lines[2].figures["/ apply"] == Spread(2, 2, 2)
    assert lines[2].figures["/ SET"] == Spread(0.5, 0.5, 0.5)
    assert lines[2].figures["wait s"] == Spread(4, 3, 5)
    assert lines[3].figures["/ apply"] == Spread(0.375, 0.25, 0.5)
    alone = recovery.lines_of(ours, [passed(100), passed(50)], [])
    assert [line.name for line in alone] == ["push + flush", "replay", "repair"]
    assert "/ SET" not in alone[1].figures


class Nodes:
    """The repair of a store whose nodes change from look to look; every look takes a second of the test's clock."""

    def __init__(self, looks: Sequence[str]) -> None:
        self.looks = list(looks)
        self.now_s = 100.0

    def lost_nodes(self, deadline: Deadline) -> list[LostNode]:
        self.now_s += 1.0
        why = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return [] if why == "whole" else [LostNode("a:1", why)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        (["whole", "empty", "empty", "repairing", "repairing", "whole"], (3.0, 3.0)),  # not answering yet looks like whole
        (["repairing", "whole"], (2.0, 0.0)),
        (["empty", "empty", "whole"], (2.0, 1.0)),  # over between two looks
        (["empty", "repairing", "empty", "repairing", "whole"], (4.0, 1.0)),  # lost again on the way
    ],
)
def test_a_repair_lasts_from_its_marker_to_the_nodes_return(looks: list[str], expected: tuple[float, float]) -> None:
    nodes, pauses = Nodes(looks), list[float]()
    assert recovery_steps.watch_repair(nodes, Deadline.after(60), clock=lambda: nodes.now_s, pause=pauses.append) == expected
    assert len(pauses) == len(looks) - 1


def test_a_node_that_nobody_misses_and_one_that_is_not_repaired_are_errors() -> None:
    for look in ("whole", "repairing"):
        nodes = Nodes([look])
        ended = SimpleNamespace(expired=False, timeout_s=1.0)
        with pytest.raises(WrongRestoreError, match="within 1 s"):
            recovery_steps.watch_repair(
                nodes,
                ended,  # type: ignore[arg-type]
                clock=lambda nodes=nodes: nodes.now_s,  # type: ignore[misc]
                pause=lambda _, nodes=nodes, ended=ended: setattr(ended, "expired", nodes.now_s > 105),  # type: ignore[misc]
            )


def test_one_bit_or_one_version_that_differs_is_found() -> None:
    rows, versions = np.zeros((4, 2), np.float32), np.arange(1, 5, dtype=np.uint64)
    recovery_steps.require_same((rows.copy(), versions.copy()), (rows, versions))
    negative = rows.copy()
    negative[2, 1] = -0.0  # equal as a number
    with pytest.raises(WrongRestoreError, match="1 of 4 rows"):
        recovery_steps.require_same((negative, versions), (rows, versions))
    with pytest.raises(WrongRestoreError, match="4 of 4 rows"):
        recovery_steps.require_same((rows, versions + np.uint64(1)), (rows, versions))


@pytest.fixture
def target() -> Iterator[Target]:
    """Three blocks of rows on a store with compare-and-swap, in the order of the load."""
    store = MemoryStore(StorageConfig("memory", (f"benchmarks-{next(_NUMBERS)}:1",)), role="shard:0")
    store.provision(b"c" * 16, b"g" * 8, Deadline.after(60))
    store.open(Deadline.after(60))
    load = load_of(25)
    yield Target(None, load, store)  # type: ignore[arg-type]
    store.close()


def write(target: Target, k: int) -> np.ndarray:
    """Write every row of the load with numbers of its own, as batch k; return the records."""
    ids = np.concatenate(target.load.batches)
    rows = np.arange(len(ids) * 3, dtype=np.float32).reshape(-1, 3) + 1000 * k
    encoded = DEFINITION.record.encode(ids, make_version(1, k), rows, np.zeros((len(ids), 6), np.float32))
    keys = DEFINITION.keys(ids, pages=False)
    held = target.store.rows.read([ReadPart(keys, encoded.shape[1], 12, tokens=True)], Deadline.after(60))[0].in_key_order()
    assert held.tokens is not None
    (result,) = target.store.rows.write([WritePart(keys, encoded, np.where(held.found, held.tokens, np.uint64(0)))], Deadline.after(60))
    assert result.stored.all()
    return encoded


def test_a_row_that_is_not_there_is_found_when_records_are_read(target: Target) -> None:
    write(target, 1)
    lost = DEFINITION.keys(target.load.batches[1][3:4], pages=False)
    target.store.rows.erase([WritePart(lost, np.empty((0, 0), np.uint8))], Deadline.after(60))
    with pytest.raises(WrongApplyError, match="1 of 25 rows"):
        recovery_steps.records(target)


class Process:
    """A shard's process and cluster in one: killed and started without either."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.shards = [self]

    def kill(self) -> None:
        self.done.append("kill")

    def start_shard(self, index: int) -> None:
        self.done.append(f"start {index}")


@pytest.mark.parametrize(("replayed", "wrong"), [(50, False), (49, True), (75, True)])
def test_a_replay_that_is_not_of_all_that_was_pushed_is_refused(replayed: int, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    load, process = load_of(25), Process()
    rows = np.zeros((25, 3), np.float32), np.ones(25, np.uint64)
    monkeypatch.setattr(recovery_steps, "rows_of", lambda _: rows)
    monkeypatch.setattr(recovery_steps, "shard_status", lambda _: SimpleNamespace(recovered_rows=replayed, recovery_s=0.5))
    monkeypatch.setattr(recovery_steps, "put_back", lambda _, old: process.done.append("put back"))
    target = Target(process, load, None)  # type: ignore[arg-type]
    with pytest.raises(WrongRestoreError, match=f"50 rows .* replayed {replayed}") if wrong else nullcontext():
        got = recovery_steps.kill_and_replay(target, n_passes=2, lost=np.zeros((25, 1), np.uint8))
        assert (got.n_rows, got.rows_per_s) == (50, 100.0)
    assert process.done == ["kill", "put back", "start 0"]


# --- checkpoint -------------------------------------------------------------------------------------------------------------------------


def round_of(written_s: Sequence[float], copy_s: float = 1.0) -> Round:
    shares = (0.0, 0.1, 1.0)
    changed = {share: Moved(int(share * 1e7), 3.0) for share in shares}
    save, load, copy = (Moved(10_000_000, seconds) for seconds in (2.0, 5.0, copy_s))
    return Round(save, load, copy, changed, dict(zip(shares, written_s, strict=True)))


def test_saves_are_compared_with_the_raw_copy_and_incremental_ones_with_everything() -> None:
    rounds = [round_of((0.0, 0.5, 2.0)), round_of((0.0, 0.5, 4.0), copy_s=0.5)]
    save, load, copy, nothing, tenth, everything = checkpoint.lines_of(rounds, 100_000)
    assert save.figures["MB/s"] == Spread(5, 5, 5)
    assert save.figures["/ raw"] == Spread(0.375, 0.25, 0.5)
    assert load.figures["k rows/s"] == Spread(20, 20, 20)
    assert copy.figures["MB/s"] == Spread(15, 10, 20)
    assert tenth.name == "incremental save, 10 % changed"
    assert (tenth.figures["MB"], tenth.figures["target"]) == (1.0, "share 0.1 ± 0.1")
    assert tenth.figures["share"] == Spread(0.1875, 0.125, 0.25)
    assert (nothing.figures["share"], everything.figures["share"]) == (Spread(0, 0, 0), Spread(1, 1, 1))
    assert [line.figures["target"] for line in (nothing, everything)] == ["–", "–"]


def test_a_checkpoint_with_other_rows_than_those_that_had_changed_is_refused() -> None:
    files = tuple(FileEntry("t", 0, part, ROWS, 10, 1, "") for part in range(3))
    manifest = CheckpointManifest("0", "c", "0", 0, False, (), (), files, None, {})
    checkpoint.require_saved(manifest, 30)
    with pytest.raises(WrongApplyError, match="29 rows had changed; the checkpoint holds 30"):
        checkpoint.require_saved(manifest, 29)


def test_loaded_rows_with_another_bit_and_tables_with_another_row_are_refused() -> None:
    saved = np.zeros((5, 8), np.uint8)
    checkpoint.require_loaded(saved.copy(), saved)
    wrong = saved.copy()
    wrong[3, 7] = 1
    with pytest.raises(WrongApplyError, match="1 of 5 rows"):
        checkpoint.require_loaded(wrong, saved)
    load = load_of(25)
    checkpoint.require_no_other(load)
    load.table.n_rows = 26  # type: ignore[attr-defined]
    with pytest.raises(WrongApplyError, match=r"25 rows .* knows 26"):
        checkpoint.require_no_other(load)


# --- all three --------------------------------------------------------------------------------------------------------------------------
