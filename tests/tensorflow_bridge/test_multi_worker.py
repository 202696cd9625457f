"""Two workers of MultiWorkerMirroredStrategy, half of each batch each: rows, weights and losses of one process with all of it."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from kvemb.local_cluster import LocalCluster  # noqa: E402

HERE = Path(__file__).resolve().parent
SLOW_START_S = 240


def both(*more: str, barrier_timeout_s: float = SLOW_START_S) -> list[Any]:
    """Run both workers, the second one with more arguments; return their (exit code, output, errors)."""
    with socket.socket() as one, socket.socket() as other:
        for free in (one, other):
            free.bind(("127.0.0.1", 0))
        ports = f"{one.getsockname()[1]},{other.getsockname()[1]}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path]), "KERAS_BACKEND": "tensorflow"}
    with LocalCluster("redis", 1, shards=2, mode="sync", trainers=2, durability="os", barrier_timeout_s=barrier_timeout_s) as local:
        commands = [[sys.executable, str(HERE / "multi_worker_job.py"), local.url, str(rank), ports, *more[:rank]] for rank in range(2)]
        workers = [subprocess.Popen(of, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for of in commands]
        try:
            said = [one.communicate(timeout=SLOW_START_S) for one in workers]
        finally:
            for one in workers:
                one.kill()
    return [(one.returncode, *of) for one, of in zip(workers, said, strict=True)]


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_two_workers_train_as_one_process(require_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    require_server("redis-server")
    ended = both()
    assert [code for code, _, _ in ended] == [0, 0], "\n".join(errors[-3000:] for _, _, errors in ended)
    first, second = (json.loads(output.splitlines()[-1]) for _, output, _ in ended)

    monkeypatch.syspath_prepend(str(HERE))
    import multi_worker_job as job

    model = job.Model(tf.Variable(job.first_rows()))
    step = job.step_of(model, job.optimizer())
    losses = [float(step(*map(tf.constant, batch))) for batch in job.batches()]
    assert (first["kernel"], first["rows"]) == (second["kernel"], second["rows"]), "bit for bit on both"
    np.testing.assert_allclose(np.array(first["losses"]) + second["losses"], losses, rtol=2e-5)
    np.testing.assert_allclose(first["kernel"], model.kernel, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(first["rows"], model.word, rtol=2e-5, atol=1e-6)


@pytest.mark.timeout(300)
def test_a_worker_whose_peer_ends_is_told_who_is_missing(require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    (code, _, errors), (peers, _, _) = both("3", barrier_timeout_s=20)
    assert (code, peers) == (1, 9)
    assert "BarrierError: step 4 waited 20 s for worker-1; here are worker-0" in errors, errors[-3000:]
