"""docs/seeds.md says what it counts, and names files that are there."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/seeds.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("* ")]
STATE = re.compile(r"\* \*\*(open|not offered)\*\*: ")
PATH = re.compile(r"`((?:tests|benchmarks)/[\w/.]+)`")


def state(row: str) -> str:
    said = STATE.match(row)
    return said[1] if said else "shown"


def test_each_document_has_as_many_promises_as_it_makes() -> None:
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    counts = [sum(line.startswith("* ") for line in part.splitlines()) for part in sections]
    assert counts == [14, 10, 9, 21, 20]
    assert len(ROWS) == sum(counts), "promises stand under their documents"


def test_the_counts_at_its_head_are_those_of_its_rows() -> None:
    of = Counter(map(state, ROWS))
    assert f"**{len(ROWS)} promises: {of['shown']} shown, {of['open']} open, {of['not offered']} not offered.**" in PAGE
    assert of["not offered"] <= 6


def test_what_is_shown_names_a_test_or_a_figure_that_is_there() -> None:
    for row in ROWS:
        paths = PATH.findall(row)
        assert [path for path in paths if not (ROOT / path).is_file()] == [], row
        assert paths or state(row) != "shown", f"{row}: say what shows it"
        assert all(path == "benchmarks/RESULTS.md" or re.search(r"def test_", (ROOT / path).read_text("utf-8")) for path in paths), row
