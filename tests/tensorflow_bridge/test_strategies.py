"""Under a tf.distribute strategy rows are trained right, or refused by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

HERE = Path(__file__).resolve().parent


@pytest.mark.timeout(300)
def test_one_device_trains_and_replicas_are_refused() -> None:
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), *sys.path])
    command = [sys.executable, str(HERE / "strategies_job.py")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ways = ("eager", "graph", "rows as arguments")
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "one device": dict.fromkeys(ways, "trained"),
        "mirrored": dict.fromkeys(ways, "refused"),
    }
