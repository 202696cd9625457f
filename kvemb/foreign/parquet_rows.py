"""Rows in Parquet files of any program: an id column of integers or text, a column of lists of numbers, more of them for state.

pyarrow reads them, one row group after the other, and is imported on first use. Where no column has the ids they may stand in the files'
metadata, as pandas keeps a RangeIndex; else row i is id i.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.rounding import from_int8
from kvemb.checkpoint.format.parquet_blocks import binary_rows
from kvemb.errors import ForeignRowsError, n_of
from kvemb.foreign.foreign_file import ForeignFile, translated
from kvemb.foreign.foreign_rows import (
    ArrayNames,
    ForeignRows,
    block_rows,
    gathered,
    ids_of,
    refuse_unnamed_ids,
    texts_of,
    values_of,
    weights_of,
)
from kvemb.foreign.narrow_weights import scale_of
from kvemb.foreign.parquet_folder import ParquetFiles
from kvemb.process.extras import require_extra
from kvemb.schema.table_def import TableDef

_FOOTER_BYTES = 16 << 20


@dataclass(frozen=True)
class _RangeIndex:
    """pandas' index that stands in a file's metadata: one id a row, and no column of it."""

    name: str | None
    ids: range


class ParquetRows:
    """The rows of Parquet files: a RowSource."""

    def __init__(self, definition: TableDef, files: ParquetFiles, names: ArrayNames) -> None:
        self._definition, self._urls = definition, files.urls
        self._state, self._names = names.state_parts(definition), names
        self._scale: str | None = None  # the column by which int8 weights are multiplied
        indexes, counts = list[_RangeIndex | None](), list[int]()
        for url in files.urls:
            with ForeignFile(url) as file, translated(file.where), closing(_parquet(file)) as parquet:
                self.where = file.where
                index = _range_index(parquet.schema_arrow)
                chosen, scale = self._choose(parquet.schema_arrow, index, names, files)
                if sum(counts) and (chosen, scale) != (self._names, self._scale):
                    got, before = ((of.ids or "none", of.weights) for of in (chosen, self._names))
                    raise ForeignRowsError(f"{self.where}: has other columns (ids, weights) than the file before it: {got}, {before}")
                self._names, self._scale = chosen, scale
                indexes.append(index)
                counts.append(parquet.metadata.num_rows)
        self.n_rows = sum(counts)
        self._ids = None if self._names.ids is not None else _numbers(indexes, counts, files.no_order, self.where)

    def _choose(self, schema: Any, index: _RangeIndex | None, names: ArrayNames, files: ParquetFiles) -> tuple[ArrayNames, str | None]:
        """Return the names that are meant in one file, that of ids None where no column has them; and the scales' where there are some."""
        shapes, named = _shapes(schema), names.ids or "id"
        in_index = index is not None and index.name == named and named not in shapes
        if named in files.in_folders and named not in shapes:
            raise ForeignRowsError(
                f"{self.where}: its ids stand in the names of folders ({named}=…), which are not read. Write them as a column of the files"
            )
        chosen = (replace(names, ids=None) if in_index else names).choose(shapes, self.where)
        chosen = replace(chosen, ids=None) if in_index else chosen
        used = {chosen.ids, chosen.weights, *(name for name, _ in self._state)}
        if twice := [name for name in used if schema.names.count(name) > 1]:
            raise ForeignRowsError(f"{self.where}: two columns are named {twice[0]!r}. Write the file with one of them, or rename one")
        dtypes = {field.name: str(getattr(field.type, "value_type", field.type)) for field in schema}
        beside = {name: dtype for name, dtype in dtypes.items() if name not in used}
        scale = scale_of(dtypes[chosen.weights or ""], beside, self._definition, _at(self.where, chosen.weights or ""))
        if chosen.ids is None and not in_index:
            _refuse_unnamed_ids(schema, used | {scale}, self.where)
        return chosen, scale

    def blocks(self) -> Iterator[ForeignRows]:
        return gathered(self._blocks(), block_rows(self._definition))

    def _blocks(self) -> Iterator[ForeignRows]:
        names = self._names
        columns = [name for name in (names.ids, names.weights, *(name for name, _ in self._state), self._scale) if name is not None]
        first = 0
        for number, url in enumerate(self._urls):
            before = first
            with ForeignFile(url) as file, closing(_parquet(file)) as parquet:
                batches = parquet.iter_batches(block_rows(self._definition), columns=columns)
                while True:
                    with translated(file.where):  # not around the yield: what the caller raises there is its own
                        batch = next(batches, None)
                    if batch is None:
                        break
                    ids = None if self._ids is None else self._ids[number][first - before :][: batch.num_rows]
                    yield self._block(batch, first, ids, file.where)
                    first += batch.num_rows

    def _block(self, batch: Any, first: int, numbers: range | None, where: str) -> ForeignRows:
        names, definition = self._names, self._definition
        assert names.weights is not None
        at = where if names.ids is None else _at(where, names.ids)
        with translated(at):
            if numbers is not None:
                given = np.arange(numbers.start, numbers.stop, numbers.step)
            else:
                given = _id_array(batch.column(names.ids), definition, at, first)
        ids = ids_of(given, definition, at)
        weights = _array(batch, names.weights, definition.dim, where, first)
        if self._scale is not None:
            weights = from_int8(weights, _array(batch, self._scale, 1, where, first))
        weights = weights_of(weights, definition, _at(where, names.weights), first=first)
        state = [values_of(_array(batch, name, width, where, first), width, _at(where, name), first=first) for name, width in self._state]
        return ForeignRows(ids, weights, np.concatenate(state, axis=1) if state else None, texts_of(given))


def _parquet(file: ForeignFile) -> Any:
    limits = {"thrift_string_size_limit": _FOOTER_BYTES, "thrift_container_size_limit": _FOOTER_BYTES}
    return require_extra("pyarrow.parquet").ParquetFile(file.stream, **limits)


def _range_index(schema: Any) -> _RangeIndex | None:
    """Source: https://pandas.pydata.org/docs/development/developer.html#storing-pandas-dataframe-objects-in-apache-parquet-format."""
    try:
        (kept,) = json.loads(schema.metadata[b"pandas"])["index_columns"]
        return _RangeIndex(kept["name"], range(kept["start"], kept["stop"], kept["step"]))
    except (TypeError, KeyError, ValueError):  # not of pandas, or its index is a column
        return None


def _numbers(indexes: Sequence[_RangeIndex | None], counts: Sequence[int], no_order: str, where: str) -> list[range]:
    """Return for each file the ids of its rows, which no column has."""
    n_rows, ends = sum(counts), list(accumulate(counts))
    said = {index for index in indexes if index is not None}
    fits = all(index is not None and len(index.ids) == count for index, count in zip(indexes, counts, strict=True))
    if fits and said - {_RangeIndex(None, range(count)) for count in counts}:
        return [index.ids for index in indexes if index is not None]
    if len(said) == 1 and None not in indexes and len(whole := next(iter(said)).ids) == n_rows:  # cut into files by a program that kept it
        ids = whole
    elif all(index in (None, _RangeIndex(None, range(count))) for index, count in zip(indexes, counts, strict=True)):
        ids = range(n_rows)
    else:
        shown_ids = sorted({f"{one.ids.start} to {one.ids.stop} by {one.ids.step}" for one in said})
        raise ForeignRowsError(
            f"{where}: says in pandas' metadata that its index is {shown_ids[0]}, which does not fit its {n_of(n_rows, 'row')}: rows were "
            "taken out, or put together, since. Write the ids as a column (reset_index), and name it (ids=)"
        )
    if no_order:
        raise ForeignRowsError(
            f"{where}: no column has the ids, and {no_order}, so that no row has a number. Write the ids as a column, and name it (ids=)"
        )
    return [ids[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _is_list(kind: Any) -> bool:
    types = require_extra("pyarrow").types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _stored(kind: Any) -> Any:
    """A type without what an extension makes of it: Arrow's tensor of one shape is a list."""
    return getattr(kind, "storage_type", kind)


def _shapes(schema: Any) -> dict[str, list[int]]:
    """The columns as arrays: of lists, and of bytes of one length, with two axes, all others with one."""
    types = require_extra("pyarrow").types
    kinds = {field.name: _stored(field.type) for field in schema}
    shapes = {name: [-1, getattr(kind, "list_size", -1)] if _is_list(kind) else [-1] for name, kind in kinds.items()}
    return shapes | {name: [-1, kind.byte_width] for name, kind in kinds.items() if types.is_fixed_size_binary(kind)}


def _refuse_unnamed_ids(schema: Any, used: Collection[str | None], where: str) -> None:
    types = require_extra("pyarrow").types
    found = [field.name for field in schema if field.name not in used and not types.is_nested(_stored(field.type))]
    if found:
        refuse_unnamed_ids(found, "column", where)


def _id_array(column: Any, definition: TableDef, where: str, first: int) -> NDArray[Any]:
    pa = require_extra("pyarrow")
    if column.null_count:
        raise ForeignRowsError(f"{where}: {n_of(column.null_count, 'id')} missing, the first in row {first + _first(column.is_null())}")
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type):
        return np.array(column.to_pylist(), object)
    if pa.types.is_decimal(column.type):  # so Spark has the unsigned integers that it reads, and BigQuery and Oracle have any
        try:
            column = column.cast(getattr(pa, definition.id_dtype)())
        except pa.ArrowInvalid as error:
            raise ForeignRowsError(f"{where}: holds {column.type}, expected integers of {definition.id_dtype} or text: {error}") from None
    if not pa.types.is_integer(column.type):
        raise ForeignRowsError(f"{where}: holds {column.type}, expected integers or text{_ADVICE.get(str(column.type), '')}")
    return np.asarray(column.to_numpy(zero_copy_only=False))


_ADVICE = {
    "double": ". pandas makes such of integers where some are missing: drop those rows, and cast to int64",
    "binary": ". Is it text? Then write it as such (Spark: cast('string'), pandas: .str.decode('utf-8'))",
}


def _at(where: str, name: str) -> str:
    return f"{where}: column {name!r}"


def _first(found: Any) -> int:
    """Where the first true value of an array of pyarrow or NumPy stands."""
    return int(np.argmax(np.asarray(found)))


def _array(batch: Any, name: str, width: int, where: str, first: int) -> NDArray[Any]:
    """A column of lists as [n, values of a row], of bytes of one length as uint8 [n, bytes], of numbers as [n]."""
    column, where, pa = batch.column(name), _at(where, name), require_extra("pyarrow")
    column = getattr(column, "storage", column)
    with translated(where):
        if column.null_count:
            raise ForeignRowsError(f"{where}: values are missing in row {first + _first(column.is_null())}")
        if pa.types.is_fixed_size_binary(column.type):
            return binary_rows(column)
        flat = column.flatten() if _is_list(column.type) else column
        if pa.types.is_decimal(flat.type):
            flat = flat.cast(pa.float64())
        if not (pa.types.is_floating(flat.type) or pa.types.is_integer(flat.type)):
            raise ForeignRowsError(f"{where}: holds {column.type}, expected lists of numbers{_advice_on_lists(column.type)}")
        if _is_list(column.type) and not pa.types.is_fixed_size_list(column.type):
            lengths = np.diff(column.offsets.to_numpy())
            if (wrong := lengths != width).any():
                at = _first(wrong)
                raise ForeignRowsError(f"{where}: a list of {int(lengths[at])} values in row {first + at}, expected {width}")
        per_row = getattr(column.type, "list_size", width)
        if flat.null_count:
            raise ForeignRowsError(f"{where}: values are missing in row {first + _first(flat.is_null()) // max(1, per_row)}")
        array = np.asarray(flat.to_numpy(zero_copy_only=False))
        return array if flat is column else array.reshape(-1, per_row)


def _advice_on_lists(kind: Any) -> str:
    if "string" in str(kind):
        return (
            ". Dask writes lists as text, unless told otherwise: dask.config.set({'dataframe.convert-string': False}), and "
            "to_parquet(schema=pa.schema([(name, pa.list_(pa.float32())), …]))"
        )
    if str(kind).startswith("struct<type: int8"):
        return ". Of pyspark.ml? Write vector_to_array(column) of pyspark.ml.functions"
    return ""
