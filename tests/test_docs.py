"""The documents name things that exist: functions, rooms, words, links. Reads sources; imports nothing of the project."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from test_architecture import PACKAGES, ROOMS, SOURCES

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "docs/site"))

from make_site import faults  # noqa: E402 (in docs/site; it needs no more than Python)

FUNCTION = re.compile(r"`((?:kvemb|paramserver|trainer)/[\w/]+\.py):([\w.]+)`")
THREAD = re.compile(r"(?i)the thread `(kvemb-[a-z-]+)(?:\d+)?`")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def defined(path: str) -> frozenset[str]:
    """The functions, classes and methods of a file, as `function`, `Class` or `Class.method`."""
    if not (ROOT / path).is_file():
        return frozenset()
    kinds = (ast.FunctionDef, ast.ClassDef)
    top = [node for node in ast.parse(read(path)).body if isinstance(node, kinds)]
    inner = [(of.name, node.name) for of in top if isinstance(of, ast.ClassDef) for node in of.body if isinstance(node, kinds)]
    return frozenset([*(node.name for node in top), *(f"{of}.{name}" for of, name in inner)])


def test_every_step_in_the_life_of_a_row_names_a_function_that_is_there() -> None:
    steps = set(FUNCTION.findall(read("docs/life-of-a-row.md")))
    assert len(steps) > 50
    assert [step for step in steps if step[1] not in defined(step[0])] == [], "docs/life-of-a-row.md: say where the step is now"


def test_the_life_of_a_row_says_where_it_becomes_exactly_once() -> None:
    rows = [line for line in read("docs/life-of-a-row.md").splitlines() if "**Here it becomes exactly-once.**" in line]
    assert len(rows) == 1
    assert "`paramserver/journal/write_ahead_log.py:FencedLog.commit`" in rows[0]


def test_every_thread_in_the_life_of_a_row_is_started_under_that_name() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in SOURCES.values())
    names = set(THREAD.findall(read("docs/life-of-a-row.md")))
    assert {"kvemb-journal", "kvemb-apply"} <= names
    assert not [name for name in names if f'name="{name}"' not in sources and f'name = f"{name}{{' not in sources]


GLOSSARY = [
    line.split(" | ") for line in read("docs/glossary.md").splitlines() if line.startswith("| ") and not line.startswith("| word |")
]
WORDS = [word for entry in GLOSSARY for word in entry[0].removeprefix("| ").split(", ")]


def test_the_glossary_says_each_word_once_in_one_line_with_a_module_that_is_there() -> None:
    assert sorted(set(WORDS)) == sorted(WORDS)
    for entry in GLOSSARY:
        assert len(entry) == 3, entry
        modules = re.findall(r"`([\w/.]+)`", entry[2])
        assert modules, entry
        assert [name for name in modules if not (ROOT / name).is_file()] == [], entry


def test_the_words_that_the_whole_project_uses_are_in_the_glossary() -> None:
    used = "table id row state record slot pull push apply shard node epoch version generation journal checkpoint"
    assert {*used.split(), "batch k"} <= set(WORDS)


def shown(name: str) -> str:
    """A room as docs/architecture.md names it: a path inside its package, a file's with its ending."""
    inner = name.split(".", 1)[1].replace(".", "/")
    return inner if SOURCES[name].name == "__init__.py" else f"{inner}.py"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_architecture_names_every_room_once(package: str) -> None:
    table = read("docs/architecture.md").split(f"| room of `{package}/` |")[1].split("\n\n")[0]
    cells = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    told = [name for cell in cells for name in re.findall(r"`([\w/.]+)`", cell)]
    rooms = {name for level in ROOMS[package] for name in level if name not in (package, f"{package}.__main__")}
    assert sorted(told) == sorted(shown(name) for name in rooms), "each room has one line in docs/architecture.md"


FOLDERS = ("", "docs", "docs/adr", "docs/api", "benchmarks")
MARKDOWN = sorted(path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
CODE_PATH = re.compile(r"`((?:kvemb|paramserver|trainer|tests|examples|benchmarks|docs|deploy|scripts)/(?:[\w./-]+\.\w+|[\w/-]+/))`")
PAST = ("CHANGELOG.md", "docs/adr/", "benchmarks/RESULTS.md")  # these tell of files as they were then


def anchors(name: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = [line.lstrip("#").strip().lower() for line in read(name).splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def test_every_link_to_a_file_of_ours_leads_somewhere() -> None:
    assert len(MARKDOWN) > 50
    assert [f"{page} links to {link}" for page in MARKDOWN for link in broken_links(page)] == []


def broken_links(page: str) -> Iterator[str]:
    for target, anchor in LINK.findall(re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)):
        if "://" in target:
            continue
        to = (ROOT / page).parent.joinpath(target).resolve() if target else ROOT / page
        if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to.relative_to(ROOT).as_posix())):
            yield f"{target}#{anchor}"


def test_every_path_in_a_document_is_there() -> None:
    named = [(page, path) for page in MARKDOWN if not page.startswith(PAST) for path in CODE_PATH.findall(read(page))]
    assert [name for name in named if not ((ROOT / name[1]).exists() or "NNNN" in name[1])] == []


def test_a_dead_link_and_an_address_outside_of_the_site_are_found_in_its_pages(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="x"><a href="b.html#y">b</a> <a href="#x">x</a> <a href="https://example.org">elsewhere</a>')
    (tmp_path / "b.html").write_text('<h1 id="y">b</h1><img src="data:image/png;base64,"><script src="style.css"></script>')
    (tmp_path / "style.css").write_text("body { background: url(paper.png) }")
    assert list(faults(tmp_path)) == []
    (tmp_path / "b.html").write_text('<a href="c.html">c</a> <link href="//fonts.example.org/f.css" rel="stylesheet">')
    (tmp_path / "style.css").write_text('@import "https://example.org/more.css"')
    assert sorted(faults(tmp_path)) == [
        "a.html leads to b.html#y, which is not there",
        "b.html leads to c.html, which is not there",
        "b.html loads //fonts.example.org/f.css",
        "style.css loads https://example.org/more.css",
    ]


# Lines that programs write, and tests read, stay whole.
@pytest.mark.parametrize("page", [page for page in MARKDOWN if page.startswith(("docs/adr/", "benchmarks/"))])
def test_decisions_and_results_are_wrapped(page: str) -> None:
    prose = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL).splitlines()
    whole = ("|", "#", "    ", "store ", "rows ")
    assert [line for line in prose if len(line) > 125 and not line.startswith(whole)] == [], "wrap them at 120 characters"
