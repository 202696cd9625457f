"""The arithmetic and the refusals of the benchmarks durability, recovery and checkpoint. No server, no waiting, and no time is asserted."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from memory_store import MemoryStore

import kvemb
from benchmarks import checkpoint, disk, durability, recovery, recovery_steps
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
from kvemb.stores.row_io import ReadPart, WritePart
from kvemb.stores.store_repair import LostNode

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


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that made something durable."""
    calls: list[str] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(f"os.{name}", lambda _, name=name: calls.append(name))
    return calls


def test_every_piece_is_made_durable_by_itself_and_the_file_is_gone(tmp_path: Path, synced: list[str]) -> None:
    moved = disk.append_durably(tmp_path / "raw", 1000, 3)
    assert (moved.n_bytes, synced) == (1002, ["fdatasync"] * 3)
    assert list(tmp_path.iterdir()) == []


def test_a_raw_copy_has_every_byte_of_every_file_and_is_durable(tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_CHUNK_BYTES", 7)
    source, files = tmp_path / "from", {"a": b"x" * 20, "b/c": b"y" * 7, "b/empty": b""}
    for name, data in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    moved = disk.copy_raw(source, tmp_path / "to")
    assert {name: (tmp_path / "to" / name).read_bytes() for name in files} == files
    assert (moved.n_bytes, disk.folder_bytes(source), synced) == (27, 27, ["fsync"] * 3)
    assert Moved(3_000_000, 2.0).mb_per_s == 1.5


def test_the_file_system_is_the_innermost_and_the_last_mounted_there() -> None:
    mounts = ["/dev/a / ext4 rw 0 0", "x /tmp tmpfs rw 0 0", "x /tmp/b xfs rw 0 0", "y /tmp/b btrfs rw 0 0"]
    kinds = [disk.file_system(Path(path), mounts) for path in ("/kvemb-no", "/tmp/kvemb-no", "/tmp/b/kvemb-no", "/tmp/bc")]
    assert kinds == ["ext4", "tmpfs", "btrfs", "tmpfs"]
    assert disk.file_system(Path("/")) != "unknown"


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
    store.provision(b"c" * 16, b"g" * 8, Deadline.after(5))
    store.open(Deadline.after(5))
    load = load_of(25)
    yield Target(None, load, store)  # type: ignore[arg-type]
    store.close()


def write(target: Target, k: int) -> np.ndarray:
    """Write every row of the load with numbers of its own, as batch k; return the records."""
    ids = np.concatenate(target.load.batches)
    rows = np.arange(len(ids) * 3, dtype=np.float32).reshape(-1, 3) + 1000 * k
    encoded = DEFINITION.record.encode(ids, make_version(1, k), rows, np.zeros((len(ids), 6), np.float32))
    keys = DEFINITION.keys(ids, pages=False)
    held = target.store.rows.read([ReadPart(keys, encoded.shape[1], 12, tokens=True)], Deadline.after(5))[0].in_key_order()
    assert held.tokens is not None
    (result,) = target.store.rows.write([WritePart(keys, encoded, np.where(held.found, held.tokens, np.uint64(0)))], Deadline.after(5))
    assert result.stored.all()
    return encoded


def test_records_that_were_put_back_are_those_of_before(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_steps, "_BLOCK_ROWS", 10)
    first = write(target, 1)
    before = recovery_steps.records(target)
    assert np.array_equal(before, first)
    second = write(target, 2)
    assert np.array_equal(recovery_steps.records(target), second)
    recovery_steps.put_back(target, before)
    assert np.array_equal(recovery_steps.records(target), first)


def test_a_row_that_is_not_there_is_found_when_records_are_read(target: Target) -> None:
    write(target, 1)
    lost = DEFINITION.keys(target.load.batches[1][3:4], pages=False)
    target.store.rows.erase([WritePart(lost, np.empty((0, 0), np.uint8))], Deadline.after(5))
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


def test_data_is_written_when_the_last_of_its_files_has_got_its_name(tmp_path: Path) -> None:
    assert checkpoint.written_s(tmp_path, 0.0) == 0.0
    (tmp_path / "manifest.json").write_bytes(b"{}")
    assert checkpoint.written_s(tmp_path, 0.0) == 0.0
    (tmp_path / "t").mkdir()
    for name in ("a", "b"):
        (tmp_path / "t" / "new").write_bytes(b"data")
        (tmp_path / "t" / "new").rename(tmp_path / "t" / f"{name}.parquet")
    last_s = max((tmp_path / "t" / f"{name}.parquet").stat().st_ctime for name in ("a", "b"))
    assert checkpoint.written_s(tmp_path, last_s - 7.0) == 7.0
    assert checkpoint.written_s(tmp_path, last_s + 1.0) == 0.0


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


@pytest.mark.parametrize("n_rows", [0, 1, 10, 17, 25])
def test_the_first_rows_are_pushed_once_more_and_no_others(n_rows: int) -> None:
    load = load_of(25)
    checkpoint.push_first(load, n_rows)
    table = load.table
    assert table.pushed == np.concatenate(load.batches)[:n_rows].tolist()  # type: ignore[attr-defined]
    assert table.flushed == 1  # type: ignore[attr-defined]


# --- all three --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [durability, recovery, checkpoint])
def test_defaults_are_taken_and_nonsense_is_refused(module: SimpleNamespace) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    assert parser.parse_args([]).rows > 0
    with pytest.raises(argparse.ArgumentError, match="--rows"):
        parser.parse_args(["--rows", "0"])


def test_a_snapshot_is_due_in_the_second_pass_of_the_shard_without_a_cache() -> None:
    parser = argparse.ArgumentParser()
    recovery.add_arguments(parser)
    options = parser.parse_args([])
    pass_bytes = options.rows * (8 + 4 * options.dim)
    assert pass_bytes < recovery._journal_mb(options) << 20 < 2 * pass_bytes
