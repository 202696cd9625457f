"""Shards that die, or whose disk is full, at any step of a save, a load, a flush or an alteration: nothing is lost, and nothing is half."""

import copy
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from chaos import processes
from chaos.cluster import FaultyCluster
from chaos.run import LedgerRun
from jobs import PATIENCE_S, add, counting_table, eventually, require
from matrix import one_of
from replayed import Replayed
from shard_launcher import FLUSH_POINTS, LOAD_POINTS, MERGE_POINTS, SAVE_POINTS
from training import LAUNCHER

import kvemb
from kvemb.checkpoint.checkpoint_log import CheckpointLog
from kvemb.checkpoint.verify import verify
from kvemb.client.shard_channel import SAY_AFTER_S
from kvemb.errors import CheckpointError, KvembError
from kvemb.local_cluster.processes import LocalProcess, LocalProcessError
from kvemb.net.deadline import Deadline
from kvemb.schema.record import make_version
from paramserver.row_log.state_file import STATE, decode_state

pytestmark = pytest.mark.full  # test_save_load.py: a shard killed in a save, in a load; unit/test_loader.py: at every step

N, DIM = 3000, 5
OLD = np.arange(2000)


class Job:
    """One table with optimizer state, and what must be in it."""

    def __init__(self, cluster: kvemb.Cluster, name: str, dim: int = DIM) -> None:
        self.cluster, self._n = cluster, 0
        self.table = cluster.create_table(name, dim=dim, optimizer=kvemb.optim.adam(lr=0.05), reduce="mean")
        self.expected = Replayed(self.table.definition, N)

    def push(self, ids: np.ndarray) -> None:
        """Push random gradients; returns when they are acknowledged."""
        self._n += 1
        grads = np.random.default_rng(self._n).standard_normal((len(ids), self.table.definition.dim), dtype=np.float32)
        self.table.push(ids, grads, timeout_s=PATIENCE_S).wait(timeout_s=PATIENCE_S)
        self.expected.push(ids, grads)

    def check(self) -> None:
        """Storage is as expected, and all of it is applied."""
        self.cluster.flush(timeout_s=PATIENCE_S)
        self.expected.require_stored(self.cluster)


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which a file of the name "<point> <shard>" ends that shard at that point; see shard_launcher."""
    return tmp_path_factory.mktemp("points")


@pytest.fixture(scope="module", params=one_of("memcached", "redis"))
def local(request: pytest.FixtureRequest, points: Path, require_server: Callable[[str], str]) -> Iterator[FaultyCluster]:
    """Two shards that die where they are told to."""
    require_server("memcached" if request.param == "memcached" else "redis-server")
    program = [sys.executable, LAUNCHER, str(points)]
    with FaultyCluster(request.param, 2, shards=2, storage={"timeout_s": 2}, shard_program=program) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(local: FaultyCluster) -> Iterator[kvemb.Cluster]:
    """A trainer's connection."""
    with kvemb.connect(local.url, timeout_s=PATIENCE_S) as connected:
        yield connected


@contextmanager
def dying(local: FaultyCluster, points: Path, point: str, shard: int, look: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Have the shard die at that point, once, and be started again, after a look at what it left."""
    process, troubles = local.shards[shard], list[BaseException]()
    (points / f"{point} {shard}").touch()

    def start_again() -> None:
        try:
            has_died(process, point)
            look()
            local.start_shard(shard)
        except BaseException as error:
            troubles.append(error)

    thread = threading.Thread(target=start_again, name="starts the shard again")
    thread.start()
    try:
        yield
    finally:
        thread.join()
        assert troubles == []


def has_died(process: LocalProcess, point: str) -> None:
    """It comes to its point."""
    eventually(lambda: process.poll() is not None, f"{process.name} never came to the point {point!r}: {process.log_tail()}")
    assert process.poll() == -signal.SIGKILL, process.log_tail()


@pytest.mark.parametrize("point", SAVE_POINTS)
def test_a_save_whose_shard_is_killed_at_any_step_can_be_resumed_and_is_whole(
    point: str, local: FaultyCluster, cluster: kvemb.Cluster, points: Path, tmp_path: Path
) -> None:
    job, shard, url = Job(cluster, f"save_{SAVE_POINTS.index(point)}"), SAVE_POINTS.index(point) % 2, str(tmp_path / "a")
    for _ in range(2):
        job.push(OLD)
    with dying(local, points, point, shard), pytest.raises(KvembError):
        cluster.save(url)
    with pytest.raises(CheckpointError):
        cluster.load(url)
    cluster.save(url, resume=True)
    verify(url).require_good()
    saved = copy.deepcopy(job.expected)
    job.check()
    job.push(np.arange(1000, N))
    job.check()
    cluster.load(url)
    job.expected = saved
    job.check()


@pytest.mark.parametrize("point", LOAD_POINTS)
def test_a_load_whose_shard_is_killed_at_any_step_ends_exactly_at_the_checkpoint(
    point: str, local: FaultyCluster, cluster: kvemb.Cluster, points: Path, tmp_path: Path
) -> None:
    job, shard, url = Job(cluster, f"load_{LOAD_POINTS.index(point)}"), LOAD_POINTS.index(point) % 2, str(tmp_path / "a")
    for _ in range(2):
        job.push(OLD)
    cluster.save(url)
    saved = copy.deepcopy(job.expected)
    job.push(np.arange(1000, N))
    with dying(local, points, point, shard):
        cluster.load(url)
    job.expected = saved
    job.check()
    job.push(np.arange(0, N, 2))
    job.check()


def test_shards_killed_at_the_steps_of_flushes_go_on_where_they_were(points: Path, require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    program = [sys.executable, LAUNCHER, str(points)]
    options = {"journal_max_mb": 1}  # so that flushes come one after the other
    with (
        FaultyCluster("redis", 2, shards=2, storage={"timeout_s": 2}, servers=options, shard_program=program) as local,
        LedgerRun(local, n_trainers=2, seed=3) as run,
    ):
        run.wait_for_acks(5, Deadline.after(PATIENCE_S))
        for number, point in enumerate(FLUSH_POINTS):
            with dying(local, points, point, number % 2):
                pass
            run.wait_for_acks(5, Deadline.after(2 * PATIENCE_S))
        verdict = run.finish()
        assert verdict.kept, f"{verdict}\n{run.last_words()}"


def test_a_shard_killed_in_a_merge_of_runs_keeps_its_rows_and_leaves_nothing_behind(
    points: Path, tmp_path: Path, require_server: Callable[[str], str]
) -> None:
    require_server("redis-server")
    program, folder = [sys.executable, LAUNCHER, str(points)], tmp_path / "shard-0"
    options = {"journal_max_mb": 1, "data_dir": str(tmp_path)}  # so that flushes come one after the other, and with them merges

    def rubbish() -> set[Path]:
        state = decode_state((folder / STATE).read_bytes(), STATE)
        named = {f"{run.number:012d}.run" for table in state.tables for run in table.runs}
        return {path for path in (folder / "snapshot").glob("*.run") if path.name not in named}

    with (
        FaultyCluster("redis", 1, shards=1, storage={"timeout_s": 2}, servers=options, shard_program=program) as local,
        kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster,
    ):
        job = Job(cluster, "merged")
        for point in MERGE_POINTS:
            left: set[Path] = set()
            with dying(local, points, point, 0, lambda left=left: left.update(rubbish())):  # type: ignore[misc]
                while (points / f"{point} 0").exists():
                    job.push(OLD)
            assert left, point
            assert not [path for path in left if path.exists()], point
            job.push(np.arange(1000, N))
            job.check()
        job.push(OLD)
        assert processes.terminate(local.shards[0], PATIENCE_S) == 0
        assert not rubbish()
        state = decode_state((folder / STATE).read_bytes(), STATE)
        assert make_version(state.epoch, state.k) == state.cut  # a stop in order flushes: the next start need not read the journal
        size = sum(path.stat().st_size for path in (folder / "snapshot").iterdir())
        assert size < 3.5 * N * (20 + job.table.definition.record.size_bytes)  # at most three runs that have all rows
        local.start_shard(0)
        job.check()


# --- full disks -----------------------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(path: Path, size_mb: int) -> Iterator[None]:
    """Mount a disk of that size, where that is allowed."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path, leave_bytes: int) -> Path:
    """Take up the room on a disk, except so much; return the file that does."""
    filler = path / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    os.truncate(filler, max(0, filler.stat().st_size - leave_bytes))
    return filler


def test_a_save_to_a_full_disk_fails_by_name_and_is_resumed_when_there_is_room(
    local: FaultyCluster, cluster: kvemb.Cluster, tmp_path: Path
) -> None:
    job, disk = Job(cluster, "full_save", 64), tmp_path / "disk"
    with small_disk(disk, 8):
        filler = fill(disk, 300_000)  # for the note that a save begins; 2000 rows are 1.5 MB
        job.push(OLD)
        with pytest.raises(CheckpointError, match="No space left"):
            cluster.save(str(disk / "a"))
        saved = copy.deepcopy(job.expected)
        filler.unlink()
        cluster.save(str(disk / "a"), resume=True)
        verify(str(disk / "a")).require_good()
        job.push(np.arange(1000, N))
        cluster.load(str(disk / "a"))
        job.expected = saved
        job.check()


def test_a_log_that_met_a_full_disk_goes_on_with_the_same_number_and_its_earlier_moments_are_whole(
    local: FaultyCluster, cluster: kvemb.Cluster, tmp_path: Path
) -> None:
    job, disk = Job(cluster, "full_log", 64), tmp_path / "disk"
    with small_disk(disk, 16):
        job.push(OLD)
        log = CheckpointLog(cluster.save, str(disk))
        assert log.save().manifest.base is None
        first = copy.deepcopy(job.expected)
        filler = fill(disk, 200_000)
        job.push(np.arange(1000, N))
        for _ in range(2):
            with pytest.raises(CheckpointError, match="No space left"):
                log.save()
        verify(str(disk / "000000001")).require_good()
        filler.unlink()
        done = CheckpointLog(cluster.save, str(disk)).save()  # another writer
        assert done.url.endswith("/000000002")
        assert done.manifest.base is not None
        verify(done.url).require_good()
        second = copy.deepcopy(job.expected)
        for url, rows in ((str(disk / "000000001"), first), (done.url, second)):
            cluster.load(url)
            job.expected = rows
            job.check()


@contextmanager
def on_small_disk(disk: Path, n: int) -> Iterator[tuple[FaultyCluster, kvemb.Cluster]]:
    """So many nodes and shards, whose folders lie on a disk of 24 MB, and a connection."""
    with (
        small_disk(disk, 24),
        FaultyCluster("redis", n, shards=n, storage={"timeout_s": 2}, servers={"data_dir": str(disk)}) as local,
        kvemb.connect(local.url, timeout_s=PATIENCE_S) as cluster,
    ):
        yield local, cluster


@pytest.mark.parametrize("leave_bytes", [0, 1 << 14])
def test_an_alteration_that_finds_a_full_disk_gives_itself_up(
    tmp_path: Path, require_server: Callable[[str], str], leave_bytes: int
) -> None:
    require_server("redis-server")
    disk = tmp_path / "disk"
    with on_small_disk(disk, 2) as (_, cluster):
        table = counting_table(cluster, "altered")
        add(table, OLD).wait_applied(PATIENCE_S)
        filler = fill(disk, leave_bytes)
        with pytest.raises(KvembError) as failed:
            cluster.alter_table("altered", dim=2 * table.dim, timeout_s=10)
        assert "No space left" in str(failed.value)
        filler.unlink()
        add(table, OLD).wait_applied(PATIENCE_S)
        require(table, OLD, 2)
        assert cluster.alter_table("altered", dim=2 * table.dim, timeout_s=PATIENCE_S).dim == 2 * table.dim


def test_an_assign_to_a_shard_whose_disk_is_full_says_what_it_waits_for(
    tmp_path: Path, require_server: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    require_server("redis-server")
    disk = tmp_path / "disk"
    with on_small_disk(disk, 1) as (_, cluster):
        table = counting_table(cluster, "assigned")
        add(table, OLD).wait_applied(PATIENCE_S)
        filler = fill(disk, 0)
        with pytest.raises(KvembError):
            table.assign(OLD, np.ones((len(OLD), table.dim)), timeout_s=4 * SAY_AFTER_S)
        assert any("waited for" in line and "No space left" in line for line in caplog.messages)
        filler.unlink()
        table.assign(OLD, np.ones((len(OLD), table.dim)), timeout_s=PATIENCE_S)
        require(table, OLD, 1)


def test_a_load_without_room_on_a_shards_disk_changes_nothing_and_goes_on_when_there_is_room(
    tmp_path: Path, require_server: Callable[[str], str]
) -> None:
    require_server("redis-server")
    disk = tmp_path / "disk"
    with on_small_disk(disk, 2) as (local, cluster):
        job = Job(cluster, "full_load", 64)
        job.push(OLD)
        cluster.save(str(tmp_path / "a"))
        saved = copy.deepcopy(job.expected)
        job.push(np.arange(1000, N))
        job.check()
        filler = fill(disk, 700_000)  # of 2.3 MB that the load needs, and more than saving the state takes
        with pytest.raises(CheckpointError, match="No space left"):
            cluster.load(str(tmp_path / "a"))
        job.expected.require_stored(cluster)
        for index, process in enumerate(local.shards):
            eventually(lambda process=process: process.poll() is not None, "a shard that cannot load serves")  # type: ignore[misc]
            with pytest.raises(LocalProcessError, match="No space left"):
                local.start_shard(index)
        filler.unlink()
        for index in (0, 1):
            local.start_shard(index)
        job.expected = saved
        job.check()
        job.push(np.arange(0, N, 2))
        job.check()
