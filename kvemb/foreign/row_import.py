"""The one way by which foreign rows come into a table: verified as a whole, then assigned block by block, the next one read meanwhile.

Nothing here knows a format (`kvemb.foreign`), and nothing writes but `Connection.assign`: each block is journaled, applied and acknowledged
as any change of rows is. So an import that was broken off has set the rows of its first blocks and no others, and done again it ends with
the same rows. To resume, blocks that are in the table already are looked for by pulling them: no note of how far it came can be lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb.arrays.ids import refuse_masked, to_caller
from kvemb.arrays.rounding import round_nearest, to_float32
from kvemb.connection import Connection
from kvemb.datapath.push import prepare_assign
from kvemb.errors import ForeignRowsError, InvalidInputError, KvembError, n_of
from kvemb.foreign.foreign_rows import ArrayNames, ForeignRows, RowSource, block_rows, ids_of, values_of, weights_of
from kvemb.foreign.formats import open_rows
from kvemb.process.work_ahead import work_ahead
from kvemb.schema.table_def import TableDef

ImportProgress = Callable[[str, int, int], None]
"""Called with (name of the phase, rows done, rows in all), 0 where that is not known."""
RowArrays = tuple[ArrayLike, ArrayLike] | tuple[ArrayLike, ArrayLike, ArrayLike]
"""(ids [n], weights [n, dim]), or the state [n, state values] after them."""

_WHAT = ("ids", "weights", "state")


@dataclass(frozen=True)
class ImportResult:
    """The end of an import."""

    n_rows: int  # that the table has of the source
    n_found: int  # of these, which were in the table already, and were not sent
    seconds: float  # of all of it


def import_rows(
    connection: Connection,
    definition: TableDef,
    source: str | os.PathLike[str] | RowArrays | Iterable[RowArrays],
    names: ArrayNames,
    *,
    file_format: str,
    resume: bool,
    timeout_s: float | None,
    progress: ImportProgress | None,
) -> ImportResult:
    """Import rows; see `TableFiles.import_rows`."""
    begun, show = time.monotonic(), progress or (lambda what, done, total: None)
    rows = _opened(definition, source, names, file_format)
    if rows.can_be_read_again:
        _verify(definition, rows.source, show)
    done, n_found, left = 0, 0, rows.source.blocks()
    with closing(_read_ahead(left)) as blocks:
        try:
            for block in blocks:
                here = resume and n_found == done and _is_there(connection, definition, block)
                if here:
                    n_found += len(block)
                else:
                    ids = to_caller(block.ids, definition.id_dtype)
                    rows_of_block = prepare_assign(definition, ids, block.weights, block.state, minus_one=True)  # the file names them
                    connection.assign(rows_of_block, timeout_s)
                done += len(block)
                show("comparing" if here else "importing", done, rows.source.n_rows)
        except (KvembError, KeyboardInterrupt) as error:
            error.add_note(
                f"{n_of(done, 'row')} of {rows.source.where} are in table {definition.name!r}; import with resume goes on behind them"
            )
            raise
    return ImportResult(done, n_found, time.monotonic() - begun)


@dataclass(frozen=True)
class _OpenSource:
    source: RowSource
    can_be_read_again: bool


@dataclass(frozen=True)
class _ArrayBlocks:
    """Arrays in memory, one block or many: a RowSource."""

    definition: TableDef
    arrays: Iterable[RowArrays]
    n_rows: int = 0
    where: str = "the given rows"

    def blocks(self) -> Iterator[ForeignRows]:
        """See `RowSource.blocks`. Blocks are cut and never put together: an id may stand in two of them."""
        step = block_rows(self.definition)
        for block in map(self._block, self.arrays):
            yield from (block.take(slice(at, at + step)) for at in range(0, len(block), step))

    def _block(self, arrays: RowArrays) -> ForeignRows:
        if not isinstance(arrays, tuple | list) or len(arrays) not in (2, 3):
            raise InvalidInputError(
                f"{self.where}: got {type(arrays).__name__}, expected (ids, weights) or (ids, weights, state) of each block: give one such "
                "tuple, or an iterable of them"
            )
        given: list[NDArray[Any]] = [_array(array, f"{self.where}: {what}") for array, what in zip(arrays, _WHAT, strict=False)]
        definition, lengths = self.definition, {len(array) if array.ndim else -1 for array in given}
        if len(lengths) > 1:
            raise ForeignRowsError(f"{self.where}: ids, weights and state of a block have {sorted(lengths)} rows, expected as many of each")
        weights = weights_of(given[1], definition, f"{self.where}: weights")
        state = values_of(given[2], definition.record.state_size, f"{self.where}: state") if len(given) == 3 else None
        return ForeignRows(ids_of(given[0], definition, self.where), weights, state)


def _array(given: ArrayLike, what: str) -> NDArray[Any]:
    """Return an array; raises InvalidInputError where there is none."""
    refuse_masked(given, what)
    try:
        return np.asarray(given)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists; tensors that refuse
        raise InvalidInputError(f"{what} cannot be read as an array: {error}") from error


def _opened(definition: TableDef, source: Any, names: ArrayNames, file_format: str) -> _OpenSource:
    if isinstance(source, str | os.PathLike):
        return _OpenSource(open_rows(definition, os.fspath(source), names, file_format), True)
    if file_format or names != ArrayNames():
        raise InvalidInputError(
            "ids, weights, state and format name what is in a file; arrays are given as (ids, weights) or (ids, weights, state)"
        )
    if isinstance(source, tuple):
        ids = [_array(one, "the given rows: ids") for one in source[:1]]
        return _OpenSource(_ArrayBlocks(definition, [source], len(ids[0]) if ids and ids[0].ndim else 0), True)
    if not isinstance(source, Iterable):
        raise InvalidInputError(f"got {type(source).__name__}, expected a path or URL, (ids, weights), or blocks of such arrays")
    return _OpenSource(_ArrayBlocks(definition, source), isinstance(source, list))


def _read_ahead(blocks: Iterator[ForeignRows]) -> Generator[ForeignRows]:
    """Yield the blocks, the next one being read meanwhile on a thread of its own."""
    for block in work_ahead(lambda _: next(blocks, None), count(), n_threads=1, name="kvemb-import"):
        if block is None:
            return
        yield block


def _verify(definition: TableDef, source: RowSource, show: ImportProgress) -> None:
    """Read all of it once: afterwards every block has ids and values that the table takes, and no id stands twice; nothing was written."""
    done, ids = 0, [np.empty(0, np.uint64)]
    for block in source.blocks():
        done += len(block)
        ids.append(block.ids)
        show("verifying", done, source.n_rows)
    if source.n_rows and done != source.n_rows:
        raise ForeignRowsError(f"{source.where}: has {n_of(done, 'row')}, expected {source.n_rows:,} by its head")
    ordered = np.concatenate(ids)
    if (ordered[1:] > ordered[:-1]).all():
        return
    ordered.sort()
    twice = ordered[1:] == ordered[:-1]
    if twice.any():
        first = _shown_twice(definition, source, ordered[int(np.argmax(twice))])
        raise ForeignRowsError(
            f"{source.where}: {first} ({n_of(int(twice.sum()), 'such row')} in all); give each id one row. Nothing was written"
        )


def _shown_twice(definition: TableDef, source: RowSource, first: np.uint64) -> str:
    """Say which rows have one id, and of which words it is the hash: they are read once more."""
    done, rows, words = 0, list[int](), list[str]()
    for block in source.blocks():
        found = np.flatnonzero(block.ids == first)
        rows += (done + found).tolist()
        words += [] if block.texts is None else block.texts[found].tolist()
        done += len(block)
        if len(rows) > 1:
            break
    what, different = f"id {definition.shown_id(int(first))}", list(dict.fromkeys(words[:2]))
    if words:
        what = f"{' and '.join(map(repr, different))} ({what})"
    return f"{what} {'share an id' if len(different) > 1 else 'stands twice'}, in rows {rows[0]} and {rows[1]}"


def _is_there(connection: Connection, definition: TableDef, block: ForeignRows) -> bool:
    """Whether the table has exactly these weights already. State cannot be pulled; a row's weights and state are written as one."""
    [(found, versions)] = connection.pull_known([(definition, block.ids)])
    dtype = definition.dtype
    stored = to_float32(round_nearest(block.weights, dtype), dtype)
    return bool((versions != 0).all()) and found.tobytes() == np.ascontiguousarray(stored).tobytes()
