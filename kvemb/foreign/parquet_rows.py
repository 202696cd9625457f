"""Rows in Parquet files of any program: an id column of integers or text, a column of lists of numbers, more of them for state.

pyarrow reads them, one row group after the other, and is imported on first use. A folder stands for the Parquet files in it, in the order
of their names, as Spark and others write them.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.checkpoint.format.parquet_blocks import binary_rows
from kvemb.errors import ForeignRowsError, n_of
from kvemb.foreign.foreign_file import ForeignFile, translated
from kvemb.foreign.foreign_rows import ArrayNames, ForeignRows, block_rows, gathered, ids_of, values_of, weights_of
from kvemb.process.extras import require_extra
from kvemb.schema.table_def import TableDef

_FOOTER_BYTES = 16 << 20


class ParquetRows:
    """The rows of Parquet files: a RowSource.

    Args:
        definition: of the table.
        urls: of the files, at least one; all have the same columns.
        names: of the columns.

    Raises:
        ForeignRowsError: a file is none, or lacks a column.
        InvalidInputError: the names of state are not the table's.
        ConfigError: pyarrow is not installed.
    """

    def __init__(self, definition: TableDef, urls: Sequence[str], names: ArrayNames) -> None:
        self._definition, self._urls = definition, urls
        self._state, self._names = names.state_parts(definition), names
        self.n_rows = 0
        for url in urls:
            with ForeignFile(url) as file, translated(file.where), closing(_parquet(file)) as parquet:
                self.where = file.where
                chosen = names.choose(_shapes(parquet.schema_arrow), self.where)
                if chosen.ids is None:
                    _refuse_unnamed_ids(parquet.schema_arrow, {chosen.weights, *(name for name, _ in self._state)}, self.where)
                if self.n_rows and chosen != self._names:
                    got, before = ((of.ids or "none", of.weights) for of in (chosen, self._names))
                    raise ForeignRowsError(f"{self.where}: has other columns (ids, weights) than the file before it: {got}, {before}")
                self._names = chosen
                self.n_rows += parquet.metadata.num_rows

    def blocks(self) -> Iterator[ForeignRows]:
        """See `RowSource.blocks`."""
        return gathered(self._blocks(), block_rows(self._definition))

    def _blocks(self) -> Iterator[ForeignRows]:
        names = self._names
        assert names.weights is not None
        columns = [*([] if names.ids is None else [names.ids]), names.weights, *(name for name, _ in self._state)]
        first = 0
        for url in self._urls:
            with ForeignFile(url) as file, closing(_parquet(file)) as parquet:
                batches = parquet.iter_batches(block_rows(self._definition), columns=columns)
                while True:
                    with translated(file.where):  # not around the yield: what the caller raises there is its own
                        batch = next(batches, None)
                    if batch is None:
                        break
                    yield self._block(batch, first, file.where)
                    first += batch.num_rows

    def _block(self, batch: Any, first: int, where: str) -> ForeignRows:
        names, definition = self._names, self._definition
        assert names.weights is not None
        ids = np.arange(first, first + batch.num_rows, dtype=np.uint64)
        if names.ids is not None:
            with translated(_at(where, names.ids)):
                given = _id_array(batch.column(names.ids), _at(where, names.ids))
            ids = ids_of(given, definition, _at(where, names.ids))
        weights = weights_of(_array(batch, names.weights, definition.dim, where), definition, _at(where, names.weights), first=first)
        state = [values_of(_array(batch, name, width, where), width, _at(where, name), first=first) for name, width in self._state]
        return ForeignRows(ids, weights, np.concatenate(state, axis=1) if state else None)


def _parquet(file: ForeignFile) -> Any:
    limits = {"thrift_string_size_limit": _FOOTER_BYTES, "thrift_container_size_limit": _FOOTER_BYTES}
    return require_extra("pyarrow.parquet").ParquetFile(file.stream, **limits)


def _shapes(schema: Any) -> dict[str, list[int]]:
    """The columns as arrays: of lists, and of bytes of one length, with two axes, all others with one."""
    types = require_extra("pyarrow").types
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    shapes = {field.name: [-1, getattr(field.type, "list_size", -1)] if _is(field, lists) else [-1] for field in schema}
    return shapes | {field.name: [-1, field.type.byte_width] for field in schema if types.is_fixed_size_binary(field.type)}


def _refuse_unnamed_ids(schema: Any, used: Collection[str | None], where: str) -> None:
    """Refuse to number the rows of a file that may have ids under another name, of any type: they would be other rows."""
    types = require_extra("pyarrow").types
    arrays = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_nested)
    found = [repr(field.name) for field in schema if field.name not in used and not _is(field, arrays)]
    if found:
        raise ForeignRowsError(
            f"{where}: say which column holds the ids (ids=): {' or '.join(found)}? Row i is id i in a file without such columns"
        )


def _is(field: Any, kinds: Sequence[Any]) -> bool:
    return any(is_(field.type) for is_ in kinds)


def _id_array(column: Any, where: str) -> NDArray[Any]:
    types = require_extra("pyarrow").types
    if column.null_count:
        raise ForeignRowsError(f"{where}: {n_of(column.null_count, 'id')} missing")
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_string(column.type) or types.is_large_string(column.type):
        return np.array(column.to_pylist(), object)
    if types.is_decimal(column.type) and column.type.scale == 0:  # so Spark has the unsigned integers that it reads
        column = column.cast(require_extra("pyarrow").uint64())
    if not types.is_integer(column.type):
        raise ForeignRowsError(f"{where}: holds {column.type}, expected integers or text")
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _at(where: str, name: str) -> str:
    return f"{where}: column {name!r}"


def _array(batch: Any, name: str, width: int, where: str) -> NDArray[Any]:
    """A column of lists as [n, values of a row], of bytes of one length as uint8 [n, bytes], of numbers as [n]."""
    column, where, pa = batch.column(name), _at(where, name), require_extra("pyarrow")
    with translated(where):
        if pa.types.is_fixed_size_binary(column.type) and not column.null_count:
            return binary_rows(column)
        flat = column.flatten() if hasattr(column, "flatten") and hasattr(column.type, "value_type") else column
        if column.null_count or flat.null_count:
            raise ForeignRowsError(f"{where}: values are missing")
        if not (pa.types.is_floating(flat.type) or pa.types.is_integer(flat.type)):
            raise ForeignRowsError(f"{where}: holds {column.type}, expected lists of numbers")
        if flat is not column and not pa.types.is_fixed_size_list(column.type):
            lengths = np.diff(column.offsets.to_numpy())
            if (lengths != width).any():
                raise ForeignRowsError(f"{where}: a list of {int(lengths[lengths != width][0])} values, expected {width}")
        array = np.asarray(flat.to_numpy(zero_copy_only=False))
        shape = (-1, column.type.list_size) if pa.types.is_fixed_size_list(column.type) else (-1, width) if flat is not column else (-1,)
        return array.reshape(shape)
