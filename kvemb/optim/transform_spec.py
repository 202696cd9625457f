"""Gradient transforms as a specification, and the ranges that values given by people are checked against.

Trainers and parameter servers share these values: which transforms a table has, in which order, and with which run-time values. The maths
is in `paramserver.optim.update_rule`; no NumPy and no I/O here. Users reach these names through `kvemb.optim`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real

from kvemb.errors import InvalidInputError


@dataclass(frozen=True)
class Value:
    """A number that users may give: its default (None: must be given) and its range [low, high); `open_low` excludes low."""

    default: float | None
    low: float = 0.0
    high: float = 1e9
    open_low: bool = False

    def check(self, where: str, name: str, value: object) -> float:
        """Return `value` as a Python float.

        Args:
            where: the optimizer or transform, for the message.
            name: the value's name, for the message.
            value: as given; NumPy's scalars are fine, text and booleans are not.

        Raises:
            InvalidInputError: not a number, NaN or out of range.

        Example:
            >>> Value(0.9, high=1.0).check("adam", "beta1", 0.5)
            0.5
        """
        if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):  # the second costs more than all else
            raise InvalidInputError(f"{where}: {name} must be a number, got {value!r}")
        number = float(value)
        if math.isnan(number) or not self.low <= number < self.high or (self.open_low and number == self.low):
            bracket = "(" if self.open_low else "["
            raise InvalidInputError(f"{where}: {name} must lie in {bracket}{self.low:g}, {self.high:g}), got {number!r}")
        return number


def refuse_unknown(where: str, given: Iterable[object], known: Iterable[str]) -> None:
    """Raise InvalidInputError naming every name in `given` that is not in `known`, and the known ones."""
    known = list(known)
    unknown = sorted(repr(name) for name in given if name not in known)
    if unknown:
        raise InvalidInputError(f"{where}: unknown {', '.join(unknown)}; known: {', '.join(known) or 'none'}")


@dataclass(frozen=True)
class _TransformKind:
    """One kind of gradient transform: its parameter, and the name under which pushes may change it."""

    param: str  # its name in the constructor and in YAML
    runtime: str  # its name among a table's run-time values, where it stands beside the optimizer's own
    value: Value


_KINDS: Mapping[str, _TransformKind] = {
    "clip_by_value": _TransformKind("v", "clip_value", Value(None, open_low=True)),
    "clip_by_norm": _TransformKind("max_norm", "clip_norm", Value(None, open_low=True)),
    "l2": _TransformKind("weight", "l2_weight", Value(None)),
}


@dataclass(frozen=True)
class TransformSpec:
    """One transform of a row's gradient. The kind belongs to the table's identity; the parameter is a run-time value.

    Args:
        kind: "clip_by_value", "clip_by_norm" or "l2".
        params: its parameter, ((name, value),), under the constructor's name.

    Raises:
        InvalidInputError: an unknown kind or parameter, or a value out of range.
    """

    kind: str
    params: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        refuse_unknown("transform kind", [self.kind], _KINDS)
        kind, where = _KINDS[self.kind], f"transform {self.kind}"
        given = dict(self.params)
        refuse_unknown(where, given, [kind.param])
        value = kind.value.check(where, kind.param, given.get(kind.param))
        object.__setattr__(self, "params", ((kind.param, value),))

    def ranges(self) -> dict[str, Value]:
        """Return the range of its run-time value, by run-time name.

        Example:
            >>> list(clip_by_norm(2.0).ranges())
            ['clip_norm']
        """
        return {_KINDS[self.kind].runtime: _KINDS[self.kind].value}

    def defaults(self) -> dict[str, float]:
        """Return the value given at creation, by run-time name.

        Example:
            >>> clip_by_norm(2.0).defaults()
            {'clip_norm': 2.0}
        """
        return {_KINDS[self.kind].runtime: self.params[0][1]}

    def to_dict(self) -> dict[str, str | float]:
        """Return plain types, as they stand in YAML.

        Example:
            >>> clip_by_norm(2.0).to_dict()
            {'kind': 'clip_by_norm', 'max_norm': 2.0}
        """
        return {"kind": self.kind, **dict(self.params)}

    @classmethod
    def from_dict(cls, data: object) -> "TransformSpec":
        """Read what `to_dict` wrote, or raise InvalidInputError naming the fault.

        Example:
            >>> TransformSpec.from_dict({"kind": "l2", "weight": 0.01}) == l2(0.01)
            True
        """
        if not isinstance(data, Mapping):
            raise InvalidInputError(f"a transform must be a mapping with a kind, got {data!r}")
        return cls(str(data.get("kind")), tuple((name, value) for name, value in data.items() if name != "kind"))


def clip_by_value(v: float) -> TransformSpec:
    """Clip every element of the gradient to [-v, v]; `v` at run time: clip_value. As torch.nn.utils.clip_grad_value_.

    Example:
        >>> clip_by_value(0.5).kind
        'clip_by_value'
    """
    return TransformSpec("clip_by_value", (("v", v),))


def clip_by_norm(max_norm: float) -> TransformSpec:
    """Scale each row's gradient down to the 2-norm `max_norm` where it is longer; `max_norm` at run time: clip_norm.

    As torch.nn.utils.clip_grad_norm_ on one row at a time: g * min(1, max_norm / (|g| + 1e-6)). There is no norm over
    the whole table: no shard sees it.

    Example:
        >>> clip_by_norm(1.0).kind
        'clip_by_norm'
    """
    return TransformSpec("clip_by_norm", (("max_norm", max_norm),))


def l2(weight: float) -> TransformSpec:
    """Add weight * W to the gradient, as `weight_decay` of torch.optim.Adam; `weight` at run time: l2_weight.

    Only rows that are pushed decay; a row that no batch touches keeps its weights.

    Example:
        >>> l2(0.01).kind
        'l2'
    """
    return TransformSpec("l2", (("weight", weight),))
