"""A load ends with the checkpoint's rows and no others, or with the rows that were there, with a crash at any step."""

import importlib
import threading
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvemb import optim
from kvemb.checkpoint.checkpoint_messages import LoadRequest
from kvemb.checkpoint.format.checkpoint_manifest import part_path
from kvemb.checkpoint.load import META_NAME, Decision, newest_report, report_name
from kvemb.config import Config, parse
from kvemb.errors import CheckpointError, FencedError, KvembError, TableMismatchError
from kvemb.init import uniform
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart
from kvemb.stores.storage_kinds import open_store
from kvemb.stores.store import Store
from paramserver.checkpoint import unconditional_writer
from paramserver.checkpoint.checkpoint_handlers import CheckpointHandlers, LoadPorts
from paramserver.lifecycle.shard import Shard
from paramserver.lifecycle.start import start
from paramserver.model.batch import CheckedRows, RowsWork
from paramserver.row_log.run_merge import merged
from paramserver.row_log.sorted_run import Part
from tests.unit.checkpoint_files import USER, block_of, ids_of, save

pytestmark = pytest.mark.usefixtures("memory_kind")
_NUMBERS = count()
OTHER = TableDef("other", 2, optim.sgd(), uniform())


class CrashError(BaseException):
    """The process is gone."""


class Cluster:
    """A cluster of one shard in this process; its storage outlives it."""

    def __init__(self, folder: Path) -> None:
        self.config: Config = parse(
            {
                "cluster": "demo",
                "storage": {"kind": "memory", "nodes": [f"load-{next(_NUMBERS)}:1"]},
                "parameter_servers": {"shards": ["127.0.0.1:1"], "data_dir": str(folder / "data")},
                "tables": {
                    table.name: {
                        key: value for key, value in table.to_dict().items() if key not in ("name", "tag_attempt", "init_algorithm")
                    }
                    for table in (USER, OTHER)
                },
            },
            {},
        )
        self.shard: Shard | None = None

    def start(self) -> Shard:
        """Start the shard."""

        def wait(pause_s: float) -> None:
            raise AssertionError("nothing here is worth waiting for")

        self.shard = start(self.config, 0, listen="127.0.0.1:0", start_timeout_s=5, wait=wait)
        return self.shard

    def stop(self) -> None:
        """Stop the shard cleanly, if it runs."""
        if self.shard is not None:
            assert self.shard.stop(10) == ""
        self.shard = None

    def store(self) -> Store:
        """Open the storage as a trainer does."""
        store = open_store(self.config.storage, role="trainer")
        store.open(Deadline.after(60))
        return store

    def assign(self, definition: TableDef, ids: range, value: float) -> None:
        """Set rows."""
        assert self.shard is not None
        parts = self.shard._parts
        definition = parts.registry.find(definition.name)
        values = np.full((len(ids), definition.dim), value, np.float32)
        rows = CheckedRows(definition, ids_of(ids), values, np.empty(0, np.uint64), {})
        parts.ingest.submit_rows(RowsWork("assign", rows), Deadline.after(10), 1)

    def rows(self, definition: TableDef, ids: range = range(200)) -> dict[int, bytes]:
        """Weights and state of the rows that storage has."""
        with self.store() as store:
            size, keys = definition.record.size_bytes, RowKeys(definition.tag, ids_of(ids))
            got = store.rows.read([ReadPart(keys, size, size)], Deadline.after(60))[0].in_key_order()
        return {int(i): bytes(record[12:]) for i, record, there in zip(keys.ids, got.records, got.found, strict=True) if there}

    def decide(self, url: str, save_id: str, serial: int = 1, tables: tuple[str, ...] = ()) -> None:
        """Put a decision on the nodes."""
        with self.store() as store:
            store.values.put(META_NAME, Decision(serial, f"{serial:032x}", url, save_id, tables).encode(), Deadline.after(60))

    def counts(self) -> dict[str, int]:
        """Rows by table, as the index has them."""
        assert self.shard is not None
        return {state.definition.name: state.n_rows for state in self.shard._parts.tables.all() if state.n_rows}

    def report(self) -> tuple[str, str]:
        """The shard's state and error as an observer of a load sees them."""
        with self.store() as store:
            report = newest_report(store.values.get(report_name(0), Deadline.after(60)))
        assert report is not None
        return report.state, report.error


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    made.start()
    made.assign(USER, range(50, 150), 9.0)
    made.assign(OTHER, range(10), 9.0)
    made.stop()
    yield made
    made.stop()


def expected(n: int = 100, value: float = 2.0) -> dict[int, bytes]:
    block = block_of(USER, ids_of(range(n)), 1, value)
    return {int(i): bytes(row[12:]) for i, row in zip(block.ids, block.records(USER, 1), strict=True)}


@pytest.mark.parametrize("n_shards", [1, 3])
def test_a_load_ends_with_the_rows_of_the_checkpoint_and_no_others(cluster: Cluster, tmp_path: Path, n_shards: int) -> None:
    manifest = save(str(tmp_path / "a"), range(100), k=2, n_shards=n_shards)
    cluster.decide(str(tmp_path / "a"), manifest.save_id)
    shard = cluster.start()
    assert cluster.rows(USER) == expected()
    assert cluster.rows(OTHER) == {}
    assert cluster.counts() == {"user": 100}
    assert cluster.report() == ("done", "")
    state = shard._parts.tables.state(USER)
    assert state.step == 20 + n_shards - 1  # of the same shard, or the largest
    cluster.assign(USER, range(5), 1.0)
    cluster.stop()
    cluster.start()  # a decision is carried out once
    assert len({row for i, row in cluster.rows(USER).items() if i < 5}) == 1
    assert cluster.counts() == {"user": 100}


STEPS = [
    "paramserver.row_log.run_set.Runs.begin",
    "paramserver.row_log.run_set.Runs.publish",
    "paramserver.checkpoint.loader.Loader._read",
    "paramserver.checkpoint.loader.Loader._gone",
    "paramserver.row_log.state_file.SavedState.replace",
    "paramserver.checkpoint.loader.Loader._write",
    "paramserver.engine.row_access.RowAccess.write_over",
    "paramserver.engine.row_access.RowAccess.erase",
]


# Right after a step is right before the next one: a death there is another only behind the last, and behind what renames or deletes.
AFTER = [step for step in STEPS if step.endswith((".publish", ".replace", ".erase"))]


@pytest.mark.parametrize(("step", "after"), [*((step, False) for step in STEPS), *((step, True) for step in AFTER)])
def test_a_crash_at_any_step_is_made_good_by_the_next_start(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    manifest = save(str(tmp_path / "a"), range(100), k=2)
    cluster.decide(str(tmp_path / "a"), manifest.save_id)
    monkeypatch.setattr(unconditional_writer, "BLOCK_BYTES", 7 * USER.record.size_bytes)
    with monkeypatch.context() as patch:
        crash(patch, step, after)
        with pytest.raises(CrashError):
            cluster.start()
    cluster.start()
    assert cluster.rows(USER) == expected()
    assert cluster.rows(OTHER) == {}
    assert cluster.counts() == {"user": 100}


FLUSH = "paramserver.checkpoint.loader.Loader._flush"
TABLE_STEPS = [*STEPS, FLUSH, "paramserver.row_log.log_flush.LogFlush.steps"]


@pytest.mark.parametrize(
    ("step", "after"),
    [
        ("", False),
        *((step, False) for step in TABLE_STEPS),
        *((step, True) for step in AFTER),
        (FLUSH, True),
    ],
)
def test_a_load_of_one_table_leaves_the_others_as_they_are_with_a_crash_at_any_step(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    manifest = save(str(tmp_path / "a"), range(100), k=2)
    others = cluster.rows(OTHER)
    cluster.decide(str(tmp_path / "a"), manifest.save_id, tables=("user",))
    monkeypatch.setattr(unconditional_writer, "BLOCK_BYTES", 7 * USER.record.size_bytes)
    with monkeypatch.context() as patch:
        if step:
            crash(patch, step, after)
            with pytest.raises(CrashError):
                cluster.start()
    shard = cluster.shard or cluster.start()
    assert cluster.rows(USER) == expected()
    assert cluster.rows(OTHER) == others != {}
    assert cluster.counts() == {"user": 100, "other": 10}
    assert shard._parts.tables.state(OTHER).step == 0
    cluster.assign(OTHER, range(5), 1.0)
    cluster.assign(USER, range(5), 1.0)
    later = cluster.rows(USER), cluster.rows(OTHER)
    cluster.stop()
    cluster.start()
    assert (cluster.rows(USER), cluster.rows(OTHER)) == later
    assert cluster.counts() == {"user": 100, "other": 10}


def test_a_load_of_one_table_takes_up_what_a_load_of_another_has_begun_to_write(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = save(str(tmp_path / "a"), range(100), k=2), save(str(tmp_path / "b"), range(8), k=3, definition=OTHER)
    cluster.decide(str(tmp_path / "a"), first.save_id, serial=1, tables=("user",))
    with monkeypatch.context() as patch:
        crash(patch, "paramserver.engine.row_access.RowAccess.write_over", after=False)
        with pytest.raises(CrashError):
            cluster.start()
    cluster.decide(str(tmp_path / "b"), second.save_id, serial=2, tables=("other",))
    cluster.start()
    assert cluster.rows(USER) == expected()
    assert cluster.counts() == {"user": 100, "other": 8}
    assert len(cluster.rows(OTHER)) == 8


def test_a_load_of_a_table_is_refused_while_one_of_another_is_not_carried_out(cluster: Cluster, tmp_path: Path) -> None:
    manifest = save(str(tmp_path / "a"), range(100), k=2)
    shard = cluster.start()
    flushed = threading.Event()
    flushed.set()
    with cluster.store() as store:

        def ask(*tables: str, decided: tuple[str, ...] | None) -> None:
            undone = None if decided is None else Decision(1, "1", "u", "s", decided)
            loads = LoadPorts(lambda: undone, lambda: flushed, lambda: None, 0)
            handlers = CheckpointHandlers(SimpleNamespace(), shard._parts.registry, store.nodes, loads)
            handlers.load(LoadRequest("2", str(tmp_path / "a"), manifest.save_id, False, list(tables)), Deadline.after(60))

        for tables, decided in ((["user"], None), (["user"], ("user",)), ([], ("other",)), ([], ())):
            ask(*tables, decided=decided)
        for decided, what in (("other",), "of table other"), ((), "of all tables"), (("other", "user"), "of table other, user"):
            with pytest.raises(CheckpointError, match=f"a load {what} from u is decided and not carried out here"):
                ask("user", decided=decided)


def test_a_second_load_is_refused_between_the_first_ones_check_and_its_decision(cluster: Cluster, tmp_path: Path) -> None:
    manifest = save(str(tmp_path / "a"), range(100), k=2)
    shard = cluster.start()
    (flushed := threading.Event()).set()
    with cluster.store() as store:
        loads = LoadPorts(lambda: None, lambda: flushed, lambda: None, 0)
        handlers = CheckpointHandlers(SimpleNamespace(), shard._parts.registry, store.nodes, loads)

        def ask(load_id: str, url: str) -> None:
            handlers.load(LoadRequest(load_id, url, manifest.save_id, False, ["user"]), Deadline.after(60))

        for again in ("1", "1"):
            ask(again, str(tmp_path / "a"))
        with pytest.raises(CheckpointError, match="another load is about to be decided; nothing was changed"):
            ask("2", str(tmp_path / "a"))
        ask("2", "")  # gives up, which the first load does not mind
        with pytest.raises(CheckpointError, match="another load"):
            ask("2", str(tmp_path / "a"))
        ask("1", "")
        ask("2", str(tmp_path / "a"))


class Listed:
    """Parts that are read as a run."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts

    def blocks(self, kind: int, low: int = 0, *, records: bool = True, above: int = 0) -> Iterator[Part]:
        yield from (part for part in self.parts if part[0] == kind)


def test_what_is_written_at_once_is_of_all_stretches_and_all_of_it_is_written() -> None:
    keys = np.arange(0, 1000, 3, dtype=np.uint64)
    stretches = [keys[at : at + 40] for at in range(0, 320, 40)]
    parts = [(kind, some[kind::2], some[kind::2], np.zeros((20, 8), np.uint8)) for some in stretches for kind in (0, 1)]
    edges = [0, 250, 251, 700, 1 << 64]
    streams = [merged([Listed(parts)], forget_up_to=0, low=low, high=high) for low, high in pairwise(edges)]
    written = list(unconditional_writer.portions(streams))
    assert [kind for kind, _, _ in written] == [0, 1]
    for kind, got, records in written:
        expected = np.concatenate([part[1] for part in parts if part[0] == kind])
        assert sorted(got.tolist()) == expected.tolist()
        assert (got[:60] > 700).any()
        assert len(records) == len(got)


def before(patch: pytest.MonkeyPatch, step: str, act: Callable[..., None]) -> None:
    """Do something before this function does its work."""
    owner, name = named(step)
    real: Callable[..., Any] = getattr(owner, name)

    def acting(*args: Any, **options: Any) -> Any:
        act()
        return real(*args, **options)

    patch.setattr(owner, name, acting)


def named(step: str) -> tuple[Any, str]:
    """The module or class of a function, and its name there."""
    path, _, name = step.rpartition(".")
    owner: Any = None
    for cut in range(path.count(".") + 1, 0, -1):
        module = ".".join(path.split(".")[:cut])
        try:
            owner = importlib.import_module(module)
        except ImportError:
            continue
        for part in path.split(".")[cut:]:
            owner = getattr(owner, part)
        break
    return owner, name


def crash(patch: pytest.MonkeyPatch, step: str, after: bool) -> None:
    """Let the process die right before or right after this function does its work."""
    owner, name = named(step)
    real: Callable[..., Any] = getattr(owner, name)

    def dying(*args: Any, **options: Any) -> Any:
        if after:
            real(*args, **options)
        raise CrashError

    patch.setattr(owner, name, dying)


def test_a_checkpoint_that_turns_out_damaged_leaves_the_shard_as_it_was(cluster: Cluster, tmp_path: Path) -> None:
    before = cluster.rows(USER), cluster.rows(OTHER)
    manifest = save(str(tmp_path / "a"), range(100), k=2)
    victim = tmp_path / "a" / part_path("user", 1, 0)
    data = bytearray(victim.read_bytes())
    data[99] ^= 1
    victim.write_bytes(data)
    cluster.decide(str(tmp_path / "a"), manifest.save_id)
    with pytest.raises(CheckpointError, match=r"shard-1-part-0\.parquet: damaged"):
        cluster.start()
    assert (cluster.rows(USER), cluster.rows(OTHER)) == before
    state, error = cluster.report()
    assert state == "failed"
    assert "checksum" in error
    data[99] ^= 1
    victim.write_bytes(data)  # mended
    cluster.start()
    assert cluster.rows(USER) == expected()


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its path, but for runs that the second process of the shard writes: their names are of its epoch."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.suffix != ".run" or int(path.stem) >> 32 != 2}


@pytest.mark.parametrize(
    "step",
    [
        "paramserver.checkpoint.loader.Loader._gone",
        "paramserver.row_log.run_set.Runs.publish",
        "paramserver.engine.row_access.RowAccess.erase",
    ],
)
def test_a_load_that_was_shut_out_while_it_was_at_work_touches_no_file_of_its_successor(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    manifest = save(str(tmp_path / "a"), range(100), k=2)
    cluster.decide(str(tmp_path / "a"), manifest.save_id)
    folder, left = tmp_path / "data" / "shard-0", dict[str, bytes]()

    def take_over(*_: Any) -> None:
        (folder / "lock").unlink()
        (folder / "lock").write_bytes(b"process 77 on successor\n")
        (folder / "epoch").write_bytes(b"77\n")
        left.update(files_of(folder))

    with monkeypatch.context() as patch:
        before(patch, step, take_over)
        with pytest.raises(FencedError):
            cluster.start()
    assert files_of(folder) == left


def test_another_load_may_take_the_place_of_one_that_cannot_be_carried_out(cluster: Cluster, tmp_path: Path) -> None:
    cluster.decide(str(tmp_path / "gone"), "1" * 32, serial=1)
    with pytest.raises(CheckpointError, match="not there"):
        cluster.start()
    manifest = save(str(tmp_path / "b"), range(30), k=3)
    cluster.decide(str(tmp_path / "b"), manifest.save_id, serial=2)
    cluster.start()
    assert cluster.rows(USER) == expected(30, 3.0)


@pytest.mark.parametrize(
    "step",
    [
        "paramserver.row_log.state_file.SavedState.replace",
        "paramserver.engine.row_access.RowAccess.write_over",
        "paramserver.engine.row_access.RowAccess.erase",
    ],
)
def test_a_load_that_was_broken_off_is_superseded_without_a_trace(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    manifest = save(str(tmp_path / "a"), range(100), k=2)
    cluster.decide(str(tmp_path / "a"), manifest.save_id, serial=1)
    with monkeypatch.context() as patch:
        crash(patch, step, after=False)
        with pytest.raises(CrashError):
            cluster.start()
    manifest = save(str(tmp_path / "b"), range(30), k=3)
    cluster.decide(str(tmp_path / "b"), manifest.save_id, serial=2)
    cluster.start()
    assert cluster.rows(USER) == expected(30, 3.0)
    assert cluster.rows(OTHER) == {}
    assert cluster.counts() == {"user": 30}
    named = {run.number for table in cluster.shard._parts.saved.now.tables for run in table.runs}  # type: ignore[union-attr]
    assert {int(path.stem) for path in (tmp_path / "data" / "shard-0" / "snapshot").glob("*.run")} == named


def test_another_checkpoint_under_the_same_url_is_not_loaded(cluster: Cluster, tmp_path: Path) -> None:
    save(str(tmp_path / "a"), range(100), k=2)
    cluster.decide(str(tmp_path / "a"), "f" * 32)
    with pytest.raises(CheckpointError, match="the load is of ffff"):
        cluster.start()


def test_a_table_of_another_identity_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    before = cluster.rows(USER)
    manifest = save(str(tmp_path / "a"), range(100), k=2, definition=TableDef("user", 4, optim.sgd(), uniform()))
    cluster.decide(str(tmp_path / "a"), manifest.save_id)
    with pytest.raises(TableMismatchError, match="optimizer"):
        cluster.start()
    assert cluster.rows(USER) == before


def test_trainers_go_on_after_a_load_with_the_sequences_they_had(cluster: Cluster, tmp_path: Path) -> None:
    shard = cluster.start()
    shard._parts.ingest.sessions.restore("trainer-0", 4, 17)
    cluster.stop()
    manifest = save(str(tmp_path / "a"), range(100), k=2)
    cluster.decide(str(tmp_path / "a"), manifest.save_id)
    assert ("trainer-0", 4, 17) in cluster.start()._parts.ingest.sessions.to_save()


def test_a_value_that_is_no_decision_is_refused(cluster: Cluster) -> None:
    with cluster.store() as store:
        store.values.put(META_NAME, b"\x93\x01\x02\x03", Deadline.after(60))
    with pytest.raises(KvembError, match="kvemb:load"):
        cluster.start()
