"""A batch that lies on several devices gives the gradients of one device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax.numpy")

HERE = Path(__file__).resolve().parent


def test_a_sharded_batch_and_shard_map_give_the_gradients_of_one_device() -> None:
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), *sys.path])
    command = [sys.executable, str(HERE / "sharded_job.py")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "equal on 2 devices"), done.stderr[-3000:]
