"""Two processes, half of each batch each: rows, parameters and losses of one process with all of it."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
optax = pytest.importorskip("optax")

from kvemb.local_cluster import LocalCluster  # noqa: E402

HERE = Path(__file__).resolve().parent
SLOW_START_S = 240


@pytest.mark.timeout(300)
def test_two_processes_that_average_the_dense_gradients_train_as_one(
    require_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_server("redis-server")
    monkeypatch.syspath_prepend(str(HERE))
    import processes_job as job

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path])}
    with LocalCluster("redis", 1, shards=2, mode="sync", trainers=2, durability="os", barrier_timeout_s=SLOW_START_S) as local:
        commands = [[sys.executable, str(HERE / "processes_job.py"), local.url, str(rank), coordinator] for rank in range(2)]
        ranks = [subprocess.Popen(of, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for of in commands]
        try:
            said = [one.communicate(timeout=SLOW_START_S) for one in ranks]
        finally:
            for one in ranks:
                one.kill()
    assert [one.returncode for one in ranks] == [0, 0], "\n".join(stderr[-3000:] for _, stderr in said)
    first, second = (json.loads(stdout.splitlines()[-1]) for stdout, _ in said)

    params, rows, losses = job.first_params(), jnp.zeros((job.N_ITEMS, job.DIM)), []
    state = job.RULE.init(params)
    step = jax.jit(jax.value_and_grad(lambda params, rows, batch: job.loss_fn(params, {"item": rows[batch["item"]]}, batch), (0, 1)))
    for batch in job.batches():
        loss, (grads, row_grads) = step(params, rows, batch)
        updates, state = job.RULE.update(grads, state, params)
        params, rows = optax.apply_updates(params, updates), rows - job.RATE * row_grads
        losses.append(float(loss))
    assert (first["w"], first["b"], first["rows"]) == (second["w"], second["b"], second["rows"]), "bit for bit on both"
    np.testing.assert_allclose((np.array(first["losses"]) + second["losses"]) / 2, losses, rtol=2e-5)
    np.testing.assert_allclose(first["w"], params["w"], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(first["rows"], rows, rtol=2e-4, atol=2e-6)
