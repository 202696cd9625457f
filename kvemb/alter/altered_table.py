"""Another definition for a table that has rows: which changes there are, and what becomes of each row. Pure.

Columns and fields of the optimizer's state that both definitions have keep their bits; weights are rounded to the nearest where the new
dtype has fewer.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.rounding import LARGEST, opaque_bytes
from kvemb.errors import InvalidInputError, n_of
from kvemb.optim import OptimizerSpec, StateField
from kvemb.schema.table_def import MAX_DIM, TableDef

INITIALIZER, ZEROS = "initializer", "zeros"


@dataclass(frozen=True)
class TableChanges:
    """What a table's definition is to be; None: as it is."""

    # dim, optimizer, dtype, layout: see `TableDef`
    dim: int | None = None
    optimizer: OptimizerSpec | None = None
    dtype: str | None = None
    layout: str | None = None
    expected_rows: int | None = None  # decides on the number of buckets anew, as at `create_table`
    # what columns beyond the old dim get in rows that exist: INITIALIZER, as for rows that are new, or ZEROS
    new_columns: str = INITIALIZER


@dataclass(frozen=True)
class AlteredTable:
    """One table before and after a change of its definition."""

    old: TableDef
    new: TableDef
    new_columns: str

    @staticmethod
    def of(old: TableDef, changes: TableChanges) -> "AlteredTable":
        """Return the change of a table.

        Raises:
            InvalidInputError: a value is out of range, or there is nothing sensible that rows could become.
        """
        at = f"table {old.name!r}"
        if changes.new_columns not in (INITIALIZER, ZEROS):
            raise InvalidInputError(f"{at}: new_columns is {changes.new_columns!r}; give {INITIALIZER} or {ZEROS}")
        if not isinstance(changes.optimizer, OptimizerSpec | None):
            raise InvalidInputError(f"{at}: got {changes.optimizer!r} where one of kvemb.optim's functions is expected to be called")
        given = {"dim": changes.dim, "optimizer": changes.optimizer, "dtype": changes.dtype}
        given = {name: value for name, value in given.items() if value is not None and value != getattr(old, name)}
        if given and (opaque_bytes(old.dtype) or opaque_bytes(changes.dtype)):
            raise InvalidInputError(
                f"{at}: rows of opaque bytes mean something to their users only; make another table, and fill it by assign"
            )
        new = replace(old, **given)  # type: ignore[arg-type]  # checked there
        if changes.layout is not None or changes.expected_rows is not None:
            new = new.laid_out(changes.expected_rows, changes.layout or old.layout)
        if new.optimizer.kind == "ftrl" != old.optimizer.kind:
            raise InvalidInputError(
                f"{at}: ftrl computes weights from its state alone, which {old.optimizer.kind} does not have: every row would begin anew "
                "with its next push. Keep the optimizer, or make another table"
            )
        if (width := new.dim + new.record.state_size) > MAX_DIM:
            raise InvalidInputError(f"{at}: weights and state of a row would be {width} values; at most {MAX_DIM} are assigned together")
        return AlteredTable(old, new, changes.new_columns)

    @property
    def is_none(self) -> bool:
        """Whether the definition stays as it is, also its run-time values by default."""
        return self.new == self.old

    @property
    def keeps_steps(self) -> bool:
        """Whether the table goes on to count its optimizer's steps, since it keeps state that is read by them."""
        return any(self._kept_at(field) is not None for field in self.new.optimizer.state_fields())

    def rows(self, ids: NDArray[np.uint64], weights: NDArray[Any], state: NDArray[np.float32]) -> NDArray[Any]:
        """Return what rows become, as an assign takes them, [n, new dim + new state values]; opaque bytes are returned as they are."""
        if opaque_bytes(self.old.dtype):
            return weights
        new, kept = self.new, min(self.old.dim, self.new.dim)
        out = np.zeros((len(ids), new.dim + new.record.state_size), np.float32)
        if new.dim > kept and self.new_columns == INITIALIZER:
            out[:, : new.dim] = new.initial_rows(ids)
        out[:, :kept] = weights[:, :kept]
        beyond = np.flatnonzero((np.abs(out[:, : new.dim]) > LARGEST[new.dtype]).any(axis=1))
        if len(beyond):
            first = new.shown_id(int(ids[beyond[0]]))
            raise InvalidInputError(f"table {new.name!r}, id {first}: has a weight beyond {LARGEST[new.dtype]:g}, the largest {new.dtype}")
        start = new.dim
        for field in new.optimizer.state_fields():
            size, old_at = field.size(new.dim), self._kept_at(field)
            out[:, start : start + size] = field.initial
            if old_at is not None:
                both = min(size, field.size(self.old.dim))
                out[:, start : start + both] = state[:, old_at : old_at + both]
            start += size
        return out

    def words(self) -> list[str]:
        """Say what becomes of the table, a line for each change."""
        old, new = self.old, self.new
        lines = []
        if new.dim > old.dim:
            filled = "zeros" if self.new_columns == ZEROS else f"those of the initializer, {new.initializer.kind}"
            lines.append(f"dim {old.dim} -> {new.dim}: {n_of(old.dim, 'column')} kept, the {new.dim - old.dim} new ones are {filled}")
        elif new.dim < old.dim:
            lines.append(f"dim {old.dim} -> {new.dim}: the last {n_of(old.dim - new.dim, 'column')} of every row go, for good")
        if new.dtype != old.dtype:
            lines.append(f"dtype {old.dtype} -> {new.dtype}: weights are rounded to the nearest; what {new.dtype} cannot hold is refused")
        if new.optimizer != old.optimizer:
            names = [field.name for field in new.optimizer.state_fields()]
            kept = [field.name for field in new.optimizer.state_fields() if self._kept_at(field) is not None]
            begun = [name for name in names if name not in kept]
            fate = "; ".join(f"{', '.join(some)} {what}" for some, what in ((kept, "kept, with the steps"), (begun, "begins anew")) if some)
            lines.append(f"optimizer {_shown(old.optimizer)} -> {_shown(new.optimizer)}: state: {fate or 'none'}")
        if (new.n_buckets, new.layout) != (old.n_buckets, old.layout):
            lines.append(f"layout: {old.n_buckets} {old.layout} buckets -> {new.n_buckets} {new.layout}")
        lines.append(f"a row takes {new.record.size_bytes} bytes, {old.record.size_bytes} before")
        return lines

    def _kept_at(self, field: StateField) -> int | None:
        """Where the old state has a field of the same name and shape; None: nowhere."""
        at = 0
        for other in self.old.optimizer.state_fields():
            if (other.name, other.per_row) == (field.name, field.per_row):
                return at
            at += other.size(self.old.dim)
        return None


def _shown(optimizer: OptimizerSpec) -> str:
    values = ", ".join(f"{name}={value:g}" for name, value in optimizer.defaults().items())
    return f"{optimizer.kind}({values})"
