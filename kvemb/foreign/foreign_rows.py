"""Foreign rows: what a reader of any format yields, and how other programs' arrays become ids, weights and state of a table. Pure.

A reader knows its format and nothing else. Which names are meant, what fits the table and what is no number is decided here, once for all
formats.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import hash_ids
from kvemb.arrays.ids import normalize
from kvemb.arrays.rounding import LARGEST
from kvemb.errors import ForeignRowsError, InvalidInputError, n_of
from kvemb.schema.table_def import TableDef

BLOCK_BYTES = 64 << 20
"""Of one block, about: what a reader holds at once, twice, since the next block is read while one is sent."""

State = str | Mapping[str, str] | None
"""The name of one array [n, state values], or the names of the arrays of each field of the optimizer's state; None: no state."""


@dataclass(frozen=True, eq=False)
class ForeignRows:
    """n rows for one table, as a file has them."""

    ids: NDArray[np.uint64]  # uint64 [n]
    weights: NDArray[Any]  # [n, dim] of the table's `row_dtype`
    state: NDArray[np.float32] | None  # float32 [n, state values], or None
    texts: NDArray[Any] | None = None  # [n], of which the ids are hashes; None where ids are integers

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, which: slice) -> "ForeignRows":
        """Return some of the rows."""
        state, texts = (None if array is None else array[which] for array in (self.state, self.texts))
        return ForeignRows(self.ids[which], self.weights[which], state, texts)

    @staticmethod
    def concatenate(blocks: Sequence["ForeignRows"]) -> "ForeignRows":
        """Put blocks behind each other; at least one, all with state and texts or all without."""
        if len(blocks) == 1:
            return blocks[0]
        state = [block.state for block in blocks if block.state is not None]
        texts = [block.texts for block in blocks if block.texts is not None]
        return ForeignRows(
            np.concatenate([block.ids for block in blocks]),
            np.concatenate([block.weights for block in blocks]),
            np.concatenate(state) if state else None,
            np.concatenate(texts) if texts else None,
        )


class RowSource(Protocol):
    """Rows of one table in a file, or several: a reader of each format is one."""

    @property
    def where(self) -> str:
        """Names the file in messages, without credentials."""

    @property
    def n_rows(self) -> int:
        """How many there are; 0 where that is not known before all are read."""

    def blocks(self) -> Iterator[ForeignRows]:
        """Yield all rows from the first on, in blocks that memory has room for, each time anew; ForeignRowsError: damaged, or unfit."""


@dataclass(frozen=True)
class ArrayNames:
    """Which arrays (columns, tensors, variables) of a file are meant."""

    ids: str | None = None  # of the ids; None: "id" where there is such an array, else row i is id i
    weights: str | None = None  # of the rows; None: "weights" where there is such an array, else the only one that could be meant
    state: State = None  # of the optimizer's state

    def choose(self, shapes: Mapping[str, Sequence[int]], where: str) -> "ArrayNames":
        """Return the names that are meant in a file of these arrays, by name their shape (-1: not known)."""
        weights = self.weights
        if weights is None:
            tables = [name for name, shape in shapes.items() if len(shape) == 2]
            weights = "weights" if "weights" in shapes else tables[0] if len(tables) == 1 else None
        if weights is None and not tables:
            raise ForeignRowsError(
                f"{where}: has no array of rows, with two axes (in Parquet: one column of lists of numbers, as pandas makes of several "
                f"columns by frame['rows'] = list(frame[columns].to_numpy())); there are {_listed(shapes)}"
            )
        if weights is None:
            raise ForeignRowsError(f"{where}: say which array holds the weights (weights=); there are {_listed(shapes)}")
        ids = "id" if self.ids is None and "id" in shapes else self.ids
        named = [self.state] if isinstance(self.state, str) else list((self.state or {}).values())
        for name in (weights, *([] if ids is None else [ids]), *named):
            if name not in shapes:
                raise ForeignRowsError(f"{where}: has no array {name!r}; there are {_listed(shapes)}")
        return ArrayNames(ids, weights, self.state)

    def state_parts(self, definition: TableDef) -> list[tuple[str, int]]:
        """Return the names of the arrays of state in the order of the record, each with its values per row."""
        if self.state is None:
            return []
        fields = definition.optimizer.state_fields()
        names = [field.name for field in fields]
        where = f"table {definition.name!r}: {definition.optimizer.kind}"
        if not names:
            raise InvalidInputError(f"{where} has no state beside its rows: leave state out")
        if isinstance(self.state, str):
            return [(self.state, definition.record.state_size)]
        if set(self.state) != set(names):
            raise InvalidInputError(f"{where} has state {', '.join(names)}; got {', '.join(self.state) or 'none'}. Name an array for each")
        return [(self.state[field.name], field.size(definition.dim)) for field in fields]


def block_rows(definition: TableDef) -> int:
    """Return how many rows one block has."""
    return max(1, BLOCK_BYTES // (definition.row_dtype.itemsize * definition.dim + 4 * definition.record.state_size + 8))


def gathered(blocks: Iterable[ForeignRows], n_rows: int) -> Iterator[ForeignRows]:
    """Yield blocks of n rows, the last one fewer, of blocks of any size."""
    waiting, n_waiting = list[ForeignRows](), 0
    for block in blocks:
        waiting.append(block)
        n_waiting += len(block)
        if n_waiting < n_rows:
            continue
        whole = ForeignRows.concatenate(waiting)
        full = n_waiting - n_waiting % n_rows
        yield from (whole.take(slice(at, at + n_rows)) for at in range(0, full, n_rows))
        waiting, n_waiting = [whole.take(slice(full, n_waiting))], n_waiting - full
    if n_waiting:
        yield ForeignRows.concatenate(waiting)


def ids_of(array: NDArray[Any], definition: TableDef, where: str) -> NDArray[np.uint64]:
    """Return ids, [n] of integers or text, as 64 bits; text is hashed as `kvemb.hash_ids` does."""
    if array.ndim != 1:
        raise ForeignRowsError(f"{where}: ids have shape {array.shape}, expected one axis")
    try:
        if texts_of(array) is not None:
            hashed = hash_ids(array)
            array = hashed if definition.id_dtype == "int64" else hashed.view(np.uint64)
        return normalize(array, definition.id_dtype, definition.name, definition.num_ids)[0]
    except InvalidInputError as error:
        raise ForeignRowsError(f"{where}: {error}") from error


def refuse_unnamed_ids(names: Sequence[str], what: str, where: str) -> NoReturn:
    """Refuse to number the rows of a file that may have ids under another name: they would be other rows."""
    raise ForeignRowsError(
        f"{where}: say which {what} holds the ids (ids=): {' or '.join(map(repr, names))}? Row i is id i in a file without such {what}s"
    )


def texts_of(array: NDArray[Any]) -> NDArray[Any] | None:
    """Return the array where it holds text, which ids are hashes of; None where it holds the ids."""
    return array if array.dtype.kind in "UTO" else None


def weights_of(array: NDArray[Any], definition: TableDef, where: str, *, first: int = 0) -> NDArray[Any]:
    """Return rows as the table takes them, [n, dim] of its `row_dtype`: numbers become floats; opaque bytes are uint8. See `values_of`."""
    if definition.row_dtype == np.float32:
        return values_of(array, definition.dim, where, LARGEST[definition.dtype], first=first)
    if array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != definition.dim:
        raise ForeignRowsError(f"{where}: has {array.dtype} {array.shape}, expected uint8 (n, {definition.dim}) for {definition.dtype}")
    return array


def values_of(array: NDArray[Any], width: int, where: str, largest: float = LARGEST["float32"], *, first: int = 0) -> NDArray[np.float32]:
    """Return numbers, [n, width], or [n] where width is 1, as float32 [n, width]."""
    if array.ndim == 1 and width == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[1] != width:
        raise ForeignRowsError(f"{where}: has shape {array.shape}, expected (n, {width}): {width} values of a row")
    if array.dtype.kind not in "fiu":
        raise ForeignRowsError(f"{where}: has dtype {array.dtype}, expected numbers")
    with np.errstate(over="ignore"):  # becomes infinity, which is refused
        values = array.astype(np.float32, copy=False)
    # NaN compares as false with everything, so it is found, too
    if values.size and not (float(values.min()) >= -largest and float(values.max()) <= largest):
        bad = ~(np.abs(values) <= largest).all(axis=1)
        at, n_bad = first + int(np.argmax(bad)), n_of(int(bad.sum()), "such row")
        raise ForeignRowsError(f"{where}: row {at} holds NaN, infinity or a value beyond {largest:.4g} ({n_bad})")
    return values


def _listed(shapes: Mapping[str, Sequence[int]]) -> str:
    shown = [f"{name!r} {str(list(shape)).replace('-1', 'n')}" for name, shape in list(shapes.items())[:20]]
    return ", ".join([*shown, *([f"and {len(shapes) - 20} more"] if len(shapes) > 20 else [])]) or "none"
