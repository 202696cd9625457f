"""Eviction policies: which rows of a table are erased by its shards, as functions that users call.

Two of them are combined by `|` (a row goes where either says so) and `&` (where both do).
"""

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvemb.errors import InvalidInputError

_LIMITS = {"older_than": ("days", "batches"), "l2_below": ("norm",), "keep": ("rows",)}
_WHOLE = ("batches", "rows")
_COMBINED = {"any_of": " | ", "all_of": " & "}
_KINDS = ("never", *_LIMITS, *_COMBINED)
_MOST_POLICIES = 16  # in one


@dataclass(frozen=True)
class Eviction:
    """Which rows of a table are erased; build one with kvemb.evict's functions, `|` and `&`.

    Args:
        kind: "never", "older_than", "l2_below", "keep", or of several together "any_of" or "all_of".
        unit: what `limit` counts: "days" or "batches" of "older_than", "norm" of "l2_below", "rows" of "keep".
        limit: above 0; an integer where it counts batches or rows.
        of: the policies that are combined, at least two.

    Raises:
        InvalidInputError: no such kind, or values that it does not take.
    """

    kind: str = "never"
    unit: str = ""
    limit: float = 0
    of: tuple["Eviction", ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in _KINDS:
            raise InvalidInputError(f"unknown eviction kind {self.kind!r}; known: {', '.join(_KINDS)}")
        units = _LIMITS.get(self.kind, ())
        if units and self.unit not in units:
            raise InvalidInputError(f"eviction {self.kind}: give {' or '.join(units)}, got {self.unit!r}")
        if units:
            object.__setattr__(self, "limit", _checked(self.kind, self.unit, self.limit))
        if (not units and (self.unit or self.limit)) or (self.kind not in _COMBINED and self.of):
            raise InvalidInputError(f"eviction {self.kind} does not take {self.unit or 'other policies'!r}")
        if self.kind in _COMBINED:
            self._check_combined()

    def _check_combined(self) -> None:
        if len(self.of) < 2 or not all(isinstance(one, Eviction) and one.kind != "never" for one in self.of):
            raise InvalidInputError(f"eviction {self.kind} combines two or more policies that evict; got {self.of!r}")
        if len(self.parts) > _MOST_POLICIES:
            raise InvalidInputError(f"eviction {self.kind}: {len(self.parts)} policies; combine at most {_MOST_POLICIES}")

    @property
    def parts(self) -> "tuple[Eviction, ...]":
        """The policies that are combined in it, itself for one that combines none."""
        return tuple(part for one in self.of for part in one.parts) or (self,)

    def __or__(self, other: object) -> "Eviction":
        return self._with("any_of", other) if isinstance(other, Eviction) else NotImplemented

    def __and__(self, other: object) -> "Eviction":
        return self._with("all_of", other) if isinstance(other, Eviction) else NotImplemented

    def __bool__(self) -> bool:
        """Refuse `and`, `or` and `not`: of two policies they would silently take one."""
        raise InvalidInputError(f"eviction {self} is neither true nor false: combine policies by & and |, not by `and` and `or`")

    def _with(self, kind: str, other: "Eviction") -> "Eviction":
        sides = [one.of if one.kind == kind else (one,) for one in (self, other)]
        return Eviction(kind, of=(*sides[0], *sides[1]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in messages and in the registry of tables.

        Example:
            >>> (older_than(days=7) | keep(1000)).to_dict()
            {'kind': 'any_of', 'of': [{'kind': 'older_than', 'days': 7.0}, {'kind': 'keep', 'rows': 1000}]}
        """
        if self.of:
            return {"kind": self.kind, "of": [one.to_dict() for one in self.of]}
        return {"kind": self.kind} | ({self.unit: self.limit} if self.unit else {})

    @staticmethod
    def from_dict(fields: object) -> "Eviction":
        """Rebuild what `to_dict` described.

        Raises:
            InvalidInputError: it is none, or has another key or value.
        """
        return _from_dict(fields, 0)

    def __str__(self) -> str:
        if self.of:
            return _COMBINED[self.kind].join(f"({one})" if one.of else str(one) for one in self.of)
        limit = int(self.limit) if self.limit == self.limit // 1 else self.limit
        return f"{self.kind}({f'{self.unit}=' * (self.kind == 'older_than')}{limit if self.unit else ''})"

    __repr__ = __str__


def never() -> Eviction:
    """Erase no row, as tables do unless told otherwise.

    Example:
        >>> never()
        never()
    """
    return Eviction()


def older_than(*, days: float | None = None, batches: int | None = None) -> Eviction:
    """Erase rows whose last push is so long ago; give one of the two.

    Args:
        days: of wall-clock time, 0.5 is twelve hours.
        batches: of the row's shard, those of pushes, assigns and erases.

    Example:
        >>> older_than(days=30) & l2_below(0.01)
        older_than(days=30) & l2_below(0.01)
    """
    if (days is None) == (batches is None):
        raise InvalidInputError("eviction older_than: give days=, or batches=, and not both")
    return Eviction("older_than", "batches", batches or 0) if days is None else Eviction("older_than", "days", days)


def l2_below(x: float) -> Eviction:
    """Erase rows whose weights have an L2 norm below x.

    Example:
        >>> l2_below(0.01)
        l2_below(0.01)
    """
    return Eviction("l2_below", "norm", x)


def keep(rows: int) -> Eviction:
    """Keep about so many rows of the table, over all shards; those that were pushed longest ago go.

    In a sync job they go with its steps: what the last ones brought stays until there are further steps.

    Example:
        >>> keep(1_000_000).limit
        1000000
    """
    return Eviction("keep", "rows", rows)


def _checked(kind: str, unit: str, value: object) -> float:
    where = f"eviction {kind}: {unit} is {value!r}; give"
    if unit in _WHOLE:
        try:
            whole = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # it raises TypeError
        except TypeError:
            whole = 0
        if not 1 <= whole < 1 << 62:
            raise InvalidInputError(f"{where} an integer of at least 1")
        return whole
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise InvalidInputError(f"{where} a finite number above 0")
    return float(value)  # type: ignore[arg-type]


def _from_dict(fields: object, depth: int) -> Eviction:
    if not isinstance(fields, Mapping) or not isinstance(kind := fields.get("kind"), str) or kind not in _KINDS or depth > _MOST_POLICIES:
        raise InvalidInputError(f"an eviction is a mapping with a 'kind' ({', '.join(_KINDS)}), got {fields!r}")
    given = {name: value for name, value in fields.items() if name != "kind"}
    if kind in _COMBINED:
        parts = given.pop("of", None)
        if given or not isinstance(parts, list | tuple):
            raise InvalidInputError(f"eviction {kind} takes a list 'of' policies, got {fields!r}")
        return Eviction(kind, of=tuple(_from_dict(part, depth + 1) for part in parts))
    if len(given) != (kind in _LIMITS):
        raise InvalidInputError(f"eviction {kind} takes {' or '.join(_LIMITS.get(kind, ('nothing',)))}, got {fields!r}")
    unit, limit = next(iter(given.items()), ("", 0))
    return Eviction(kind, unit, limit)
