"""Initializers, the first values of a table's rows: kinds, their parameters, their plain form, and the rows.

The first value of a row is a pure function of (table name, seed, id, column), so a pull of an unseen id writes nothing. Its draws are made
in kvemb.init.first_draws; the functions that users call are in kvemb.init.
"""

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.rounding import round_nearest, to_float32
from kvemb.errors import InvalidInputError
from kvemb.init.first_draws import ALGORITHM_VERSION, Distribution, draw, row_states

# What each kind takes, in canonical order, with its default. None: no default ("value"), or the table's dim ("fan_in",
# "fan_out").
_XAVIER: Final[dict[str, float | None]] = {"gain": 1.0, "fan_in": None, "fan_out": None}
_DEFAULTS: Final[dict[str, dict[str, float | None]]] = {
    "zeros": {},
    "constant": {"value": None},
    "uniform": {"low": -0.05, "high": 0.05},
    "normal": {"mean": 0.0, "std": 0.01},
    "truncated_normal": {"mean": 0.0, "std": 0.01},
    "xavier_uniform": _XAVIER,
    "xavier_normal": _XAVIER,
    "columns": {},
}
_FIXED: Final = ("zeros", "constant")  # these draw nothing
FANS: Final = ("fan_in", "fan_out")
_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
_MAX_DEVIATION: Final = 8.5  # No draw is farther from the mean, in std: Phi(-8.5) < 2**-53.


@dataclass(frozen=True)
class Initializer:
    """How the rows of a table begin; equal definitions compare and hash equal. Build one with kvemb.init's functions.

    Args:
        kind: zeros, constant, uniform, normal, truncated_normal, xavier_uniform, xavier_normal or columns.
        params: (name, value) pairs in any order; missing ones take their default. Stored in canonical order.
        parts: of kind columns, and no other: (width, initializer) pairs from the first column to the last.

    Raises:
        InvalidInputError: unknown kind or parameter, a value that is not a finite number, std < 0, low > high. Also a fan that is not a
            positive integer, or values that could leave float32's range. Of parts: none, one that is no (width, initializer) pair
            with a width of at least 1, or one that has parts itself.
    """

    kind: str
    params: tuple[tuple[str, float], ...] = ()
    parts: tuple[tuple[int, "Initializer"], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in _DEFAULTS:
            raise InvalidInputError(f"unknown initializer kind {self.kind!r}; known: {', '.join(_DEFAULTS)}")
        given, defaults = dict(self.params), _DEFAULTS[self.kind]
        for name in given:
            if name not in defaults:
                known = ", ".join(defaults) or ("parts" if self.kind == "columns" else "nothing")
                raise InvalidInputError(f"initializer {self.kind} takes no {name!r}; it takes: {known}")
        merged = {name: default for name, default in defaults.items() if default is not None} | given
        checked = tuple((name, _checked(self.kind, name, merged[name])) for name in defaults if name in merged)
        object.__setattr__(self, "params", checked)
        self._check_together()
        self._settle_parts()

    def rows(
        self,
        ids: NDArray[np.uint64],
        dim: int,
        *,
        table: str,
        seed: int,
        dtype: str = "float32",
        algorithm: int = ALGORITHM_VERSION,
    ) -> NDArray[np.float32]:
        """Compute the first values of rows; an id's row does not depend on the other ids, their order or number.

        Args:
            ids: [n] uint64, duplicates fine.
            dim: number of columns, >= 1. Column c is the same for every dim > c (unless a Xavier fan defaults to dim); with
                parts, their widths' sum.
            table: the table's name; tables of different names draw independent values.
            seed: the table's seed, any int.
            dtype: the table's storage dtype, to whose nearest numbers values are rounded.
            algorithm: which version draws; see `kvemb.init.first_draws`.

        Returns:
            float32 [n, dim], a new array.

        Raises:
            InvalidInputError: `ids` is not a 1-D uint64 array, or dim < 1 or not what the parts give.

        Example:
            >>> from kvemb.init import normal
            >>> rows = normal(std=0.01).rows(np.array([7, 8], np.uint64), 3, table="user", seed=0)
            >>> rows.shape, rows.dtype.name
            ((2, 3), 'float32')
            >>> again = normal(std=0.01).rows(np.array([8], np.uint64), 3, table="user", seed=0)
            >>> bool((again[0] == rows[1]).all())
            True
        """
        if not isinstance(ids, np.ndarray) or ids.dtype != np.uint64 or ids.ndim != 1:
            raise InvalidInputError(f"ids must be a 1-D uint64 array, got {getattr(ids, 'dtype', type(ids).__name__)}")
        if dim < 1:
            raise InvalidInputError(f"dim must be at least 1, got {dim}")
        self.check_dim(dim)
        out = np.empty((len(ids), dim), np.float32)
        ranges = list(self._ranges(dim))
        draws = any(part.kind not in _FIXED for _, _, part in ranges)
        states = row_states(ids, table, seed, algorithm) if draws else ids
        for first, end, part in ranges:
            columns = out[:, first:end]
            if part.kind in _FIXED:
                value = np.array(dict(part.params).get("value", 0.0), np.float32)
                columns[...] = to_float32(round_nearest(value, dtype), dtype)
            else:
                draw(columns, first, states, part._distribution(end - first, dtype), algorithm)
        return out

    def check_dim(self, dim: int) -> None:
        """Refuse a number of columns that the parts do not give; without parts any will do.

        Raises:
            InvalidInputError: the parts' widths have another sum.
        """
        if self.parts and (total := sum(width for width, _ in self.parts)) != dim:
            raise InvalidInputError(
                f"initializer.parts: the widths of the {len(self.parts)} parts give {total} columns together, dim is {dim}; make them equal"
            )

    def to_dict(self) -> dict[str, Any]:
        """Describe this initializer with plain values, as in kvemb.yaml and in messages.

        Example:
            >>> Initializer("normal").to_dict()
            {'kind': 'normal', 'mean': 0.0, 'std': 0.01}
        """
        parts = [{"width": width, **part.to_dict()} for width, part in self.parts]
        return {"kind": self.kind, **dict(self.params)} | ({"parts": parts} if parts else {})

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> "Initializer":
        """Rebuild what `to_dict` described; parameters left out take their default.

        Raises:
            InvalidInputError: no or unknown kind, unknown parameter (named), or a value its constructor refuses.

        Example:
            >>> Initializer.from_dict({"kind": "normal", "std": 0.1}) == Initializer("normal", (("std", 0.1),))
            True
        """
        if not isinstance(d, Mapping) or "kind" not in d:
            raise InvalidInputError(f"an initializer is a mapping with a 'kind' ({', '.join(_DEFAULTS)}), got {d!r}")
        apart = ("kind", "parts") if d["kind"] == "columns" else ("kind",)
        parts = _parts_from(d.get("parts", ())) if "parts" in apart else ()
        # Values of a wrong type are refused by name in __post_init__.
        return cls(d["kind"], tuple((k, v) for k, v in d.items() if k not in apart), parts)

    def _settle_parts(self) -> None:
        """Keep widths as Python ints, which messages and digests need; refuse anything that is no list of parts."""
        if bool(self.parts) != (self.kind == "columns"):
            needs = "needs at least one part" if self.kind == "columns" else "takes no parts"
            raise InvalidInputError(f"initializer {self.kind} {needs}")
        settled = []
        for at, given in enumerate(self.parts):
            where = f"initializer.parts[{at}]"
            if not isinstance(given, tuple | list) or len(given) != 2 or not isinstance(given[1], Initializer):
                raise InvalidInputError(f"{where} must be (width, initializer), as (1, kvemb.init.zeros()); got {given!r}")
            width, part = given
            if part.parts:
                raise InvalidInputError(f"{where} has parts itself; write them all side by side")
            settled.append((_checked_width(where, width), part))
        object.__setattr__(self, "parts", tuple(settled))

    def _ranges(self, dim: int) -> Iterator[tuple[int, int, "Initializer"]]:
        """Yield the first column, the column after the last, and their initializer."""
        first = 0
        for width, part in self.parts or ((dim, self),):
            yield first, first + width, part
            first += width

    def _check_together(self) -> None:
        p = dict(self.params)
        if "low" in p and p["low"] > p["high"]:
            raise InvalidInputError(f"initializer {self.kind}: low {p['low']!r} is above high {p['high']!r}")
        if self.kind == "constant" and "value" not in p:
            raise InvalidInputError("initializer constant needs a 'value'")
        bounds = [abs(p[name]) for name in ("value", "low", "high") if name in p]
        bounds.append(abs(p.get("mean", 0.0)) + _MAX_DEVIATION * p.get("std", 0.0))
        bounds.append(_MAX_DEVIATION * abs(p.get("gain", 0.0)))  # fans >= 1, so no Xavier std is above gain.
        if max(bounds) > _FLOAT32_MAX:
            raise InvalidInputError(f"initializer {self.to_dict()} could leave the range of float32")

    def _distribution(self, dim: int, dtype: str) -> Distribution:
        """Return the distribution that `dim` columns of this kind are drawn from."""
        p = dict(self.params)
        if self.kind == "uniform":
            return Distribution("uniform", p["low"], p["high"] - p["low"], dtype)
        if self.kind in ("normal", "truncated_normal"):
            return Distribution(self.kind, p["mean"], p["std"], dtype)
        fans = p.get("fan_in", dim) + p.get("fan_out", dim)
        if self.kind == "xavier_normal":
            return Distribution("normal", 0.0, p["gain"] * math.sqrt(2.0 / fans), dtype)
        bound = p["gain"] * math.sqrt(6.0 / fans)
        return Distribution("uniform", -bound, 2.0 * bound, dtype)


def _checked(kind: str, name: str, value: float) -> float:
    where = f"initializer {kind}: {name} must be"
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidInputError(f"{where} a number, got {value!r}")
    if name in FANS:
        if value != value // 1 or not 1 <= value < 1 << 53:
            raise InvalidInputError(f"{where} an integer >= 1, got {value!r}")
        return int(value)
    if not abs(value) <= _FLOAT32_MAX:  # Also NaN, and integers too large for a float.
        raise InvalidInputError(f"{where} finite and within float32, got {value!r}")
    if name == "std" and value < 0:
        raise InvalidInputError(f"{where} >= 0, got {value!r}")
    return float(value) + 0.0  # -0.0 becomes 0.0: one definition, one text.


def _checked_width(where: str, width: object) -> int:
    try:
        value = 0 if isinstance(width, bool) else operator.index(width)  # type: ignore[arg-type]
    except TypeError:
        value = 0
    if value < 1:
        raise InvalidInputError(f"{where}: width must be an integer >= 1, got {width!r}")
    return value


def _parts_from(given: object) -> tuple[tuple[int, Initializer], ...]:
    """Rebuild the parts of columns from their plain values."""
    if not isinstance(given, list | tuple):
        raise InvalidInputError(f"initializer.parts must be a list of mappings with a 'width' and a 'kind', got {given!r}")
    parts = []
    for at, d in enumerate(given):
        where = f"initializer.parts[{at}]"
        if not isinstance(d, Mapping) or not {"width", "kind"} <= set(d):
            raise InvalidInputError(f"{where} must be a mapping with a 'width' and a 'kind', got {d!r}")
        try:
            part = Initializer.from_dict({key: value for key, value in d.items() if key != "width"})
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}: {error}") from error
        parts.append((d["width"], part))
    return tuple(parts)
