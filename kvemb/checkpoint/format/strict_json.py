"""JSON documents that carry their own checksum, read without trusting anything. Pure.

The checksum (xxh3, 128 bits, over the canonical form of everything else) finds accidents, not attackers. A bit that flipped in a number is
as silent as one in a weight. Every value is fetched through `Fields`, which names the document and place of a value that is wrong.
"""

import json
from collections.abc import Iterator
from typing import Any

import xxhash

from kvemb.errors import CheckpointError

MAX_DOCUMENT_BYTES = 128 << 20
_MAX_DEPTH = 32
_CHECKSUM = "checksum"


def encode(fields: dict[str, Any]) -> bytes:
    """Return the document, indented for people, with its checksum as the last field."""
    return json.dumps({**fields, _CHECKSUM: _checksum(fields)}, indent=1, allow_nan=False).encode() + b"\n"


def decode(data: bytes, where: str) -> "Fields":
    """Read a document."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise CheckpointError(f"{where}: {len(data)} bytes, more than the {MAX_DOCUMENT_BYTES} that a document may have")
    try:
        tree = json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{where}: damaged, it is no JSON document of ours: {error}") from error
    if not isinstance(tree, dict) or _depth_exceeds(tree, _MAX_DEPTH):
        raise CheckpointError(f"{where}: damaged, expected one JSON object of at most {_MAX_DEPTH} levels")
    found = tree.pop(_CHECKSUM, None)
    if found != _checksum(tree):
        raise CheckpointError(f"{where}: damaged or edited, its checksum does not match its contents")
    return Fields(tree, where)


class Fields:
    """The fields of one JSON object, each fetched with the type and range that it must have."""

    def __init__(self, tree: object, where: str) -> None:
        if not isinstance(tree, dict):
            raise CheckpointError(f"{where}: got {type(tree).__name__}, expected an object")
        self._tree, self._where = tree, where

    def only(self, *names: str) -> "Fields":
        """Refuse missing and unknown fields."""
        if set(names) != set(self._tree):
            wrong = sorted(set(names) ^ set(self._tree))
            raise CheckpointError(f"{self._where}: unknown or missing fields: {', '.join(wrong)}")
        return self

    def has(self, name: str) -> bool:
        """Return whether there is such a field."""
        return name in self._tree

    def text(self, name: str, max_size: int = 4096) -> str:
        """Return a text field."""
        value: str = self._typed(name, str, lambda value: len(value) <= max_size, f"text of at most {max_size} characters")
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        """Return a whole number in [low, high]."""
        value: int = self._typed(name, int, lambda value: low <= value <= high, f"a whole number from {low} to {high}")
        return value

    def flag(self, name: str) -> bool:
        """Return true or false."""
        return bool(self._typed(name, bool, lambda _: True, "true or false"))

    def integers(self, name: str, length: int | None, high: int) -> tuple[int, ...]:
        """Return a list of whole numbers from 0 to `high`, of this length unless it is None."""
        shown = "" if length is None else f"{length} "
        value = self._typed(name, list, lambda value: length is None or len(value) == length, f"a list of {shown}whole numbers")
        if not all(type(item) is int and 0 <= item <= high for item in value):
            raise self.wrong(name, f"whole numbers from 0 to {high}")
        return tuple(value)

    def objects(self, name: str, max_length: int) -> Iterator["Fields"]:
        """Yield the objects of a list."""
        value = self._typed(name, list, lambda value: len(value) <= max_length, f"a list of at most {max_length} objects")
        for number, item in enumerate(value):
            yield Fields(item, f"{self._where}: {name}[{number}]")

    def object(self, name: str) -> dict[str, Any]:
        """Return a nested object as it is."""
        value: dict[str, Any] = self._typed(name, dict, lambda _: True, "an object")
        return value

    def maybe(self, name: str) -> "Fields | None":
        """Return a nested object, or None where the field is null."""
        return None if self._tree[name] is None else Fields(self._tree[name], f"{self._where}: {name}")

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """Make the error for a field with a wrong value."""
        return CheckpointError(f"{self._where}: {name} is {repr(self._tree.get(name))[:200]}, expected {expected}")

    def _typed(self, name: str, kind: type, allowed: Any, expected: str) -> Any:
        value = self._tree.get(name)
        if type(value) is not kind or not allowed(value):  # `type is`: True is no number here
            raise self.wrong(name, expected)
        return value


def _checksum(fields: dict[str, Any]) -> str:
    try:
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"a value that JSON cannot hold: {error}") from error
    return xxhash.xxh3_128_hexdigest(canonical)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field stands twice in one object")
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _depth_exceeds(tree: object, limit: int) -> bool:
    level: list[object] = [tree]
    for _ in range(limit):
        level = [child for node in level for child in _children(node)]
        if not level:
            return False
    return True


def _children(node: object) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []
