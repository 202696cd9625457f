"""A sync job of two trainers learns exactly what one process learns: same losses, on every storage kind and optimizer.

Two trainer processes, two shards, two storage nodes (Redis Cluster: its least, three) against torch's own embeddings and
optimizers on the concatenated batch. SGD shows a wrong factor, which Adam would hide.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name

import sync_job

import kvemb

# One test of each kind runs the whole job: half a minute on two busy cores. What differs between kinds, the store contract tests on all.
pytestmark = [pytest.mark.timeout(300), pytest.mark.full]

ROOT = Path(__file__).resolve().parents[2]
N_TRAINERS = 2
SERVER = {"redis": "redis-server", "memcached": "memcached"}


@pytest.fixture(scope="module", params=["redis", "memcached"])
def sync_losses(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, require_server: Callable[[str], str]
) -> dict[str, np.ndarray]:
    """Run the job once per storage kind, all optimizers one after another: mean loss of the trainers, by optimizer."""
    store = request.param
    require_server(SERVER[store])
    folder = tmp_path_factory.mktemp(store)
    with kvemb.local(store=store, nodes=2, shards=2, mode="sync", trainers=N_TRAINERS) as url:
        run_trainers(url, folder)
    parts = [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in range(N_TRAINERS)]
    return {kind: np.mean([part[kind] for part in parts], axis=0) for kind in parts[0]}


def run_trainers(url: str, folder: Path) -> None:
    """Run all trainers to their end; when one fails, so does the test, with what they said."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    script = str(Path(__file__).with_name("sync_job.py"))
    outputs = [folder / f"output-{rank}.txt" for rank in range(N_TRAINERS)]
    trainers = []
    try:
        for rank, output in enumerate(outputs):
            command = [sys.executable, script, url, str(rank), str(N_TRAINERS), str(folder)]
            with output.open("w") as file:
                trainers.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
        codes = [trainer.wait(timeout=240) for trainer in trainers]
    finally:
        for trainer in trainers:
            if trainer.poll() is None:
                trainer.kill()
                trainer.wait()
    assert codes == [0] * N_TRAINERS, "\n".join(output.read_text()[-3000:] for output in outputs)


@pytest.mark.parametrize("kind", list(sync_job.LEARNING_RATES))
def test_two_trainers_have_the_losses_of_one_process_on_the_whole_batch(sync_losses: dict[str, np.ndarray], kind: str) -> None:
    local = np.array(sync_job.local_losses(kind))
    assert len(local) == sync_job.N_STEPS
    assert local[-20:].mean() < 0.95 * local[:20].mean(), "it learns, so that equal losses mean something"
    np.testing.assert_allclose(sync_losses[kind], local, rtol=1e-4)
