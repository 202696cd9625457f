"""A name occurs once in the house: `Batch` means the same in every place."""

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from test_architecture import CAPABILITIES, SOURCES, nodes, read, without_collection  # noqa: F401  (the last is a fixture)

# Classes that may have another one's name, up to the underscore of a private one.
CLASSES_TWICE = {
    "Loader": "kvemb.config's is PyYAML's word for what it derives from",
}
# Modules and folders that may have another one's name: a search for one of them must not mislead to the other.
MODULES_TWICE = dict.fromkeys({*CAPABILITIES, "capabilities"}, "a shard's part and a client's") | {
    "columns": "a facade (kvemb.own): both are the same module",
    "engine": "the file for which its folder is named",
    "ingest": "the file for which its folder is named",
    "jax": "a facade (kvemb.own): both are the same module",
    "keras": "a facade (kvemb.own): both are the same module",
    "optim": "what users write, and its maths in a shard: one idea, two packages",
    "tensorflow": "a facade (kvemb.own): both are the same module",
    "torch": "a facade (kvemb.own): both are the same module",
    "trainer": "a facade (kvemb.own): both are the same module",
}


def repeated(homes: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {name: where for name, where in homes.items() if len(where) > 1}


def test_a_class_name_occurs_once() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for module in SOURCES:
        for node in nodes(read(module)):
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(f"{module}.{node.name}")
    assert {name: where for name, where in repeated(homes).items() if name not in CLASSES_TWICE} == {}
    assert sorted(CLASSES_TWICE) == sorted(CLASSES_TWICE.keys() & repeated(homes).keys()), "an exception that is needed no more"


def test_a_module_name_occurs_once() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for module in SOURCES:
        homes[module.rpartition(".")[2]].append(module)
    homes.pop("__main__")
    assert {name: where for name, where in repeated(homes).items() if name not in MODULES_TWICE} == {}
    assert sorted(MODULES_TWICE) == sorted(MODULES_TWICE.keys() & repeated(homes).keys()), "an exception that is needed no more"


def test_a_test_files_name_occurs_once() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in Path(__file__).parent.rglob("test_*.py"):
        homes[path.name].append(str(path))
    assert repeated(homes) == {}, "pytest imports them by their names"


def test_the_headings_of_the_changelog_are_those_that_its_readers_know() -> None:
    """A merge that keeps both sides may bring back lines that were folded into a release: then only the new ones belong into Unreleased."""
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    text = (Path(__file__).resolve().parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = [part.splitlines() for part in re.split(r"(?m)^## ", text)[1:]]
    assert [lines[0].partition("]")[0] for lines in versions][:1] == ["[Unreleased"]
    for lines in versions:
        headings = [line.removeprefix("### ") for line in lines if line.startswith("### ")]
        assert len(headings) == len(set(headings)), f"{lines[0]}: a heading twice"
        first = lines[0].startswith("[0.1.0]")  # has no past: it says what there is
        assert kinds.isdisjoint(headings) if first else kinds.issuperset(headings), f"{lines[0]}: {headings}"
