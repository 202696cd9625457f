"""Objects are whole when they are constructed: no attribute is set from another module than that of its class."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "paramserver").rglob("*.py"))


def own_attributes(tree: ast.Module) -> set[str]:
    """The attributes that classes of a module declare, or set on themselves."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names |= {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return names


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def set_from_outside(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, attribute) of what a module sets on objects of other modules' classes."""
    tree = ast.parse(source)
    own = own_attributes(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not is_self(node.value) and node.attr not in own:
            yield node.lineno, node.attr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_attribute_is_set_from_another_module(path: Path) -> None:
    assert not list(set_from_outside(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("engine.witness = self", [(1, "witness")]),
        ("a.b = c.d = 1", [(1, "b"), (1, "d")]),
        ("one.n += 1", [(1, "n")]),
        ("x, y.z = 1, 2", [(1, "z")]),
        ("class A:\n    n: int = 0\n\ndef f(one: A) -> None:\n    one.n = 1", []),
        ("class A:\n    def f(self) -> None:\n        self.n = 1", []),
    ],
)
def test_what_is_set_from_outside_is_found(source: str, found: list[tuple[int, str]]) -> None:
    assert list(set_from_outside(source)) == found
