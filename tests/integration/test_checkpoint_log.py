"""A log of checkpoints on real servers: each of its moments comes back row for row, whatever is killed while it is written."""

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import one_of
from shard_moves import ShardMoves

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.checkpoint_log import CheckpointLog
from kvemb.checkpoint.format.checkpoint_manifest import MANIFEST, CheckpointManifest
from kvemb.checkpoint.listing import list_checkpoints
from kvemb.checkpoint.verify import verify
from kvemb.errors import CheckpointError
from kvemb.local_cluster import LocalCluster
from kvemb.schema.cluster_map import equal_runs
from kvemb.schema.slots import N_SLOTS
from tests.integration.counting_trainers import wait_for
from tests.warm_clusters import warm

WAIT_S, N_IDS, DIM = 90.0, 6000, 128
KINDS = {"valkey": 1, "memcached": 2, "redis-cluster": 3}
Row = tuple[int, np.float32, np.float32]
"""Version, weight, and the optimizer's state: all columns are equal."""


@pytest.fixture(params=one_of("valkey", "memcached", "redis-cluster"))
def local(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with warm(request.param, KINDS[request.param], shards=2, journal_max_mb=1) as running:
        yield running


@pytest.fixture
def small() -> Iterator[LocalCluster]:
    with warm("valkey", shards=2) as running:
        yield running


def new_table(cluster: kvemb.Cluster, name: str = "user") -> kvemb.Table:
    return cluster.create_table(name, dim=DIM, optimizer=kvemb.optim.sgd(lr=1.0, momentum=0.5), initializer=kvemb.init.zeros())


def push(table: kvemb.Table, ids: np.ndarray) -> None:
    table.push(ids, np.ones((len(ids), DIM), np.float32), timeout_s=WAIT_S).wait_applied(WAIT_S)


class Ledger(threading.Thread):
    """Pushes 1 to some rows, one push at a time, erases some now and then, and notes which batch of each shard that was.

    Attributes:
        entries: (whether it was an erase, ids, the k of its batch by shard, the versions that the rows got).
        erasing: held meanwhile: of an erase that a shard's end breaks off nobody knows whether it was done.
    """

    def __init__(self, url: str) -> None:
        super().__init__(name="ledger", daemon=True)
        self._url, self.stop_it, self.error = url, threading.Event(), None
        self.erasing = threading.Lock()
        self.entries: list[tuple[bool, np.ndarray, np.ndarray, np.ndarray]] = []
        self.start()

    def run(self) -> None:
        try:
            draw = np.random.default_rng(3)
            with kvemb.connect(self._url, timeout_s=WAIT_S) as cluster:
                table = cluster.table("user")
                while not self.stop_it.is_set():
                    ids = draw.choice(N_IDS, 600, replace=False)
                    push(table, ids)
                    _, versions = table.pull(ids.astype(np.uint64), return_versions=True)
                    self.entries.append((False, ids, batches(cluster), versions))
                    if len(self.entries) % 7 == 6:
                        with self.erasing:
                            table.erase(ids[:100])
                            self.entries.append((True, ids[:100], batches(cluster), versions[:100]))
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self.stop_it.set()
        self.join(WAIT_S)
        assert self.error is None, self.error

    def until(self, manifest: CheckpointManifest) -> dict[int, Row]:
        """The rows that the entries up to the cuts of a checkpoint give."""
        placement = next(table.definition for table in manifest.tables).placement
        shards = manifest.slot_shards[placement.slots(np.arange(N_IDS, dtype=np.uint64))]
        cuts = np.array([cut.k for cut in manifest.cuts])[shards]  # [N_IDS]
        versions, rows = np.zeros(N_IDS, np.uint64), np.zeros((N_IDS, 2), np.float32)
        for erased, ids, ks, seen in self.entries:
            inside = ks[shards[ids]] <= cuts[ids]
            some = ids[inside]
            versions[some] = 0 if erased else seen[inside]
            rows[some] = 0 if erased else np.stack(pushed(0, *rows[some].T)[1:], axis=1)
        return {row: (int(versions[row]), *rows[row]) for row in np.flatnonzero(versions).tolist()}


def batches(cluster: kvemb.Cluster) -> np.ndarray:
    return np.array([k for _, k in cluster.progress(WAIT_S)])


def pushed(version: int, weight: Any, momentum: Any) -> tuple[int, Any, Any]:
    """A row after one more push of 1."""
    momentum = np.float32(0.5) * momentum + np.float32(1)
    return version, weight - momentum, momentum


def saved_rows(url: str) -> dict[int, Row]:
    chain = open_chain(url)
    (saved,) = [table for table in chain.newest.tables if table.definition.name == "user"]
    rows: dict[int, Row] = {}
    for shard in range(chain.newest.n_shards):
        for block in chain.rows(saved.definition, shard):
            assert (block.weights == block.weights[:, :1]).all()
            columns = block.ids.tolist(), block.versions.tolist(), block.weights[:, 0], block.state[:, 0]
            rows |= {row: values for row, *values in zip(*columns, strict=True)}
    return {row: tuple(values) for row, values in rows.items()}


def weights(rows: dict[int, Row]) -> dict[int, float]:
    return {row: float(weight) for row, (_, weight, _) in rows.items()}


def in_cluster(table: kvemb.Table) -> dict[int, float]:
    ids, rows = table.export()
    return dict(zip(ids.tolist(), rows[:, 0].tolist(), strict=True))


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "kvemb.cli", *words]


def run(*words: str, code: int = 0) -> str:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=200, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def moments(folder: Path) -> list[str]:
    """The URLs of the whole checkpoints, oldest first."""
    return [str(path.parent) for path in sorted(folder.glob(f"*/{MANIFEST}"))]


@pytest.mark.timeout(300)
def test_every_moment_is_the_entries_until_its_cuts_though_writer_and_shards_are_killed(local: LocalCluster, tmp_path: Path) -> None:
    folder, draw = tmp_path / "log", random.Random(7)
    words = command("save", str(folder), "--every", "0.3", "--config", str(local.config_path))
    with kvemb.connect(local.url, timeout_s=WAIT_S) as cluster:
        table = new_table(cluster)
        ledger = Ledger(local.url)
        for round_ in range(6):
            with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as writer:
                n_before = len(moments(folder))
                wait_for(lambda n=n_before, round_=round_: len(moments(folder)) > n + round_ % 3)  # type: ignore[misc]
                threading.Event().wait(draw.uniform(0, 0.4))
                if round_ % 2:
                    with ledger.erasing:
                        local.shards[round_ // 2 % 2].kill()
                        threading.Event().wait(draw.uniform(0, 0.3))
                        local.start_shard(round_ // 2 % 2)
                    threading.Event().wait(draw.uniform(0, 0.6))
                writer.send_signal(signal.SIGKILL)
        ledger.end()
        cluster.flush(WAIT_S)
        log = CheckpointLog(cluster.save, str(folder))
        wait_for(lambda: saves(log))
        urls = moments(folder)
        assert any(open_chain(url).newest.base is not None for url in urls)
        assert [int(url.rpartition("/")[2]) for url in urls] == list(range(1, len(urls) + 1))
        expected = {url: ledger.until(open_chain(url).newest) for url in urls}
        for url in urls:
            verify(url).require_good()
            assert saved_rows(url) == expected[url]
        assert weights(expected[urls[-1]]) == in_cluster(table)
        assert len(ledger.entries) > 20
        # Back to a moment, on from there, and back to one before it.
        by_cut = {open_chain(url).newest.cut_s: url for url in urls}  # of several in one second, the last one
        for cut_s in (sorted(by_cut)[len(by_cut) // 2], min(by_cut)):
            until = datetime.fromtimestamp(cut_s, UTC).isoformat()
            assert by_cut[cut_s] in run("load", str(folder), "--until", until, "--yes", "--config", str(local.config_path))
            rows = expected[by_cut[cut_s]]
            assert in_cluster(table) == weights(rows)
            push(table, np.arange(0, N_IDS, 2))  # with the optimizer's state as of the moment
            table.erase(np.arange(100))
            now = rows | {row: pushed(*rows.get(row, (0, np.float32(0), np.float32(0)))) for row in range(0, N_IDS, 2)}
            assert in_cluster(table) == weights({row: values for row, values in now.items() if row >= 100})
            log.save()
            assert weights(saved_rows(moments(folder)[-1])) == in_cluster(table)


def saves(log: CheckpointLog) -> bool:
    """Whether a save comes to its end: not while that of the killed writer is under way."""
    try:
        log.save()
    except CheckpointError:
        return False
    return True


def test_few_levels_are_read_and_those_in_between_go_without_a_change_of_what_remains(small: LocalCluster, tmp_path: Path) -> None:
    with kvemb.connect(small.url) as cluster:
        table, log = new_table(cluster), CheckpointLog(cluster.save, str(tmp_path))
        push(table, np.arange(6000))
        kept: dict[str, dict[int, Row]] = {}
        for number in range(1, 18):
            done = log.save(extra={"number": number})
            kept[done.url.removeprefix("file://")] = saved_rows(done.url)
            push(table, np.arange(number * 20, number * 20 + 100))
            table.erase(np.arange(number))
        depths = [len(open_chain(url).levels) for url in kept]
        assert depths == [1 + (number - 1).bit_count() for number in range(1, 18)]
        CheckpointLog(cluster.save, str(tmp_path), keep=4).save()
        remaining = moments(tmp_path)
        assert len(remaining) < 9
        assert {int(url[-9:]) for url in remaining} >= {1, 15, 16, 17, 18}
        for url in remaining[:-1]:
            verify(url).require_good()
            assert saved_rows(url) == kept[url]
        assert weights(saved_rows(remaining[-1])) == in_cluster(table)


def test_the_next_one_is_full_once_increments_have_its_size(small: LocalCluster, tmp_path: Path) -> None:
    with kvemb.connect(small.url) as cluster:
        table, log = new_table(cluster), CheckpointLog(cluster.save, str(tmp_path))
        push(table, np.arange(3000))
        bases = []
        for _ in range(6):
            bases.append(log.save().manifest.base)
            push(table, np.arange(1000))
    assert [base is None for base in bases] == [True, False, False, False, False, False]  # 1000 of 3000 rows at most
    with kvemb.connect(small.url) as cluster:
        for start in (0, 1000, 2000):
            push(cluster.table("user"), np.arange(start, start + 1000))
        assert log_again(cluster, tmp_path) is not None  # of all rows
        assert log_again(cluster, tmp_path) is None


def log_again(cluster: kvemb.Cluster, folder: Path) -> object:
    return CheckpointLog(cluster.save, str(folder)).save().manifest.base


def test_where_rows_have_other_owners_or_a_table_was_dropped_the_log_goes_on_with_a_full_one(small: LocalCluster, tmp_path: Path) -> None:
    with kvemb.connect(small.url) as cluster:
        table, other = new_table(cluster), new_table(cluster, "other")
        log, moves = CheckpointLog(cluster.save, str(tmp_path)), ShardMoves(small.url)
        push(table, np.arange(1000))
        push(other, np.arange(10))
        log.save()
        push(table, np.arange(500))
        assert log.save().manifest.base is not None
        try:
            moves.begin(np.where(equal_runs(2) == 1, np.arange(N_SLOTS) % 2, 0))
            moves.wait()
        finally:
            moves.close()
        push(table, np.arange(100))
        assert log.save().manifest.base is None
        push(table, np.arange(50))
        assert log.save().manifest.base is not None
        cluster.drop_table("other")
        done = log.save()
        assert done.manifest.base is None
        assert weights(saved_rows(done.url)) == in_cluster(table)
        assert {one.problem for one in list_checkpoints(str(tmp_path))} == {""}


@pytest.mark.parametrize("hurt", ["cut off", "a flipped bit", "a part is gone", "a base is gone"])
def test_a_moment_that_is_not_whole_is_refused_by_name_and_no_row_changes(small: LocalCluster, tmp_path: Path, hurt: str) -> None:
    with kvemb.connect(small.url) as cluster:
        table, log = new_table(cluster), CheckpointLog(cluster.save, str(tmp_path))
        for number in range(4):
            push(table, np.arange(2000) if not number else np.arange(100 * number, 100 * number + 300))
            log.save()
        base = tmp_path / "000000003"  # of the fourth
        part = next(base.glob("user/*.parquet"))
        if hurt == "cut off":
            part.write_bytes(part.read_bytes()[:-7])
        elif hurt == "a flipped bit":
            data = bytearray(part.read_bytes())
            data[len(data) // 2] ^= 4
            part.write_bytes(data)
        elif hurt == "a part is gone":
            part.unlink()
        else:
            (base / MANIFEST).unlink()
        push(table, np.arange(50))
        before, now = in_cluster(table), datetime.now(UTC).isoformat()
        threading.Event().wait(1.0)  # the moment of the last one is rounded up to a second
        said = run("load", str(tmp_path), "--until", datetime.now(UTC).isoformat(), "--yes", "--config", str(small.config_path), code=1)
        assert "CheckpointError" in said
        assert base.name in said
        assert in_cluster(table) == before
        (tmp_path / "000000002" / MANIFEST).write_text("{}")
        said = run("load", str(tmp_path), "--until", now, "--yes", "--config", str(small.config_path), code=1)
        assert "000000002: " in said
        assert "It may be that of" in said
        assert in_cluster(table) == before
        run("load", str(tmp_path / "000000001"), "--yes", "--config", str(small.config_path))
        assert len(in_cluster(table)) == 2000
