"""Admission policies: which ids get a row when a gradient comes for them, as functions that users call.

An id that has a row is trained in any case, and `assign` creates rows in any case. A gradient that is held back trains nothing, and pulls
of its id go on to give the first row. docs/id-lifecycle.md has the words of other libraries beside these.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvemb.errors import InvalidInputError

MAX_COUNT = 255
_PARAMETERS = {"any": None, "after": "n", "probability": "p"}


@dataclass(frozen=True)
class Admission:
    """Which new ids of a table get a row; build one with kvemb.admit's functions.

    Args:
        kind: "any", "after" or "probability".
        value: the n of "after", the p of "probability"; None of "any".

    Raises:
        InvalidInputError: no such kind, or a value that it does not take.
    """

    kind: str = "any"
    value: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in _PARAMETERS:
            raise InvalidInputError(f"unknown admission kind {self.kind!r}; known: {', '.join(_PARAMETERS)}")
        checked = {"any": _nothing, "after": _count, "probability": _share}[self.kind](self.value)
        object.__setattr__(self, "value", checked)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in messages and in the registry of tables.

        Example:
            >>> after(3).to_dict(), any().to_dict()
            ({'kind': 'after', 'n': 3}, {'kind': 'any'})
        """
        name = _PARAMETERS[self.kind]
        return {"kind": self.kind} | ({} if name is None else {name: self.value})

    @staticmethod
    def from_dict(fields: object) -> "Admission":
        """Rebuild what `to_dict` described.

        Raises:
            InvalidInputError: it is none, or has another key or value.
        """
        if not isinstance(fields, Mapping) or not isinstance(kind := fields.get("kind"), str) or kind not in _PARAMETERS:
            raise InvalidInputError(f"an admission is a mapping with a 'kind' ({', '.join(_PARAMETERS)}), got {fields!r}")
        name = _PARAMETERS[kind]
        if set(fields) != {"kind", name} - {None}:
            raise InvalidInputError(f"admission {kind} takes {name or 'nothing'}, got {fields!r}")
        return Admission(kind, None if name is None else fields[name])

    def __str__(self) -> str:
        return "any()" if self.value is None else f"{self.kind}({self.value})"

    __repr__ = __str__


def any() -> Admission:
    """Give every id a row when its first gradient comes, as tables do unless told otherwise.

    Example:
        >>> any()
        any()
    """
    return Admission()


def after(n: int) -> Admission:
    """Give an id a row when its n-th gradient comes: those before train nothing.

    Args:
        n: 1 to 255.

    Example:
        >>> after(3)
        after(3)
    """
    return Admission("after", n)


def probability(p: float) -> Admission:
    """Give an id a row with probability p each time that a gradient comes for it: after 1 / p gradients on average.

    Args:
        p: above 0 and at most 1.

    Example:
        >>> probability(0.1)
        probability(0.1)
    """
    return Admission("probability", p)


def _nothing(value: object) -> None:
    if value is not None:
        raise InvalidInputError(f"admission any takes no value, got {value!r}")


def _count(value: object) -> int:
    try:
        n = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # it raises TypeError
    except TypeError:
        n = 0
    if not 1 <= n <= MAX_COUNT:
        raise InvalidInputError(f"admission after: n is {value!r}; give an integer from 1 to {MAX_COUNT}")
    return n


def _share(value: object) -> float:
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not 0 < float(value) <= 1:  # type: ignore[arg-type]
        raise InvalidInputError(f"admission probability: p is {value!r}; give a number above 0 and at most 1")
    return float(value)  # type: ignore[arg-type]
