"""Formats that are named arrays at known places of a file: npy, safetensors and raw; and the rows of any arrays that are read by ranges.

They are a short head (raw: none) and the arrays' own bytes, so they are read here, without their libraries, range by range, at any size, on
any file system, and with bfloat16, which NumPy's reader of safetensors lacks. Nothing is unpickled: an npy of objects is refused.

Sources: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, https://github.com/huggingface/safetensors#format
"""

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.rounding import from_int8, storage_dtype, to_float32
from kvemb.checkpoint.checkpoint_storage import shown
from kvemb.errors import ForeignRowsError, InvalidInputError
from kvemb.foreign.foreign_file import ForeignFile, translated
from kvemb.foreign.foreign_rows import ArrayNames, ForeignRows, block_rows, ids_of, refuse_unnamed_ids, texts_of, values_of, weights_of
from kvemb.foreign.narrow_weights import scale_of
from kvemb.schema.table_def import TableDef

_MAX_HEAD_BYTES = 100 << 20  # of safetensors: what its own library takes
_SAFETENSORS_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1",
}  # fmt: skip


class NamedArrays(Protocol):
    """The arrays of a file, by name, of which any range of rows can be read."""

    where: str
    shapes: Mapping[str, Sequence[int]]
    dtypes: Mapping[str, str]  # as the file calls them

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Return rows `start` to `stop` of an array; bfloat16 as float32."""


class ArrayRows:
    """The rows of arrays that lie in a file: a RowSource."""

    def __init__(self, definition: TableDef, arrays: NamedArrays, names: ArrayNames) -> None:
        self.where, self._definition, self._arrays = arrays.where, definition, arrays
        self._state = names.state_parts(definition)
        self._names = names.choose(arrays.shapes, self.where)
        assert self._names.weights is not None
        self._weights = self._names.weights
        shape = arrays.shapes[self._weights]
        self.n_rows = shape[0] if shape else 0
        self._check(self._weights, [(self.n_rows, definition.dim)])
        for name, width in self._state:
            self._check(name, [(self.n_rows, width), *([(self.n_rows,)] if width == 1 else [])])
        used = {self._weights, *(name for name, _ in self._state), *([] if self._names.ids is None else [self._names.ids])}
        beside = {name: of for name, of in arrays.dtypes.items() if name not in used}
        self._scale = scale_of(arrays.dtypes[self._weights], beside, definition, self._at(self._weights))
        if self._scale is not None:
            self._check(self._scale, [(self.n_rows,), (self.n_rows, 1)])
        if self._names.ids is not None:
            self._check(self._names.ids, [(self.n_rows,)])
            return
        one_each = [name for name, of in beside.items() if tuple(arrays.shapes[name]) == (self.n_rows,) and _may_be_ids(of)]
        if one_each:
            refuse_unnamed_ids(one_each, "array", self.where)
        if definition.num_ids is not None and self.n_rows > definition.num_ids:
            raise ForeignRowsError(
                f"{self.where}: {self.n_rows} rows without ids; table {definition.name!r} has num_ids {definition.num_ids}"
            )

    def blocks(self) -> Iterator[ForeignRows]:
        step = block_rows(self._definition)
        for start in range(0, self.n_rows, step):
            stop = min(start + step, self.n_rows)
            state = [values_of(self._read(name, start, stop), width, self._at(name), first=start) for name, width in self._state]
            given = self._read(self._weights, start, stop)
            if self._scale is not None:
                given = from_int8(given, self._read(self._scale, start, stop).reshape(-1))
            weights = weights_of(given, self._definition, self._at(self._weights), first=start)
            name = self._names.ids
            ids = np.arange(start, stop) if name is None else self._read(name, start, stop)
            where = self.where if name is None else self._at(name)
            yield ForeignRows(
                ids_of(ids, self._definition, where), weights, np.concatenate(state, axis=1) if state else None, texts_of(ids)
            )

    def _read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        return self._arrays.read(name, start, stop)

    def _at(self, name: str) -> str:
        return f"{self.where}: {name!r}"

    def _check(self, name: str, expected: Sequence[tuple[int, ...]]) -> None:
        got, dtype = tuple(self._arrays.shapes[name]), self._arrays.dtypes[name]
        if dtype.startswith(("F", "float4", "float8", "sparse")):
            raise ForeignRowsError(f"{self._at(name)} holds {dtype}, which is not read: write it as float16 or float32, all of it")
        if got not in expected:
            raise ForeignRowsError(
                f"{self._at(name)} has shape {got}, expected {' or '.join(map(str, expected))}: {self.n_rows} rows of table "
                f"{self._definition.name!r}, whose dim is {self._definition.dim}"
            )


def _may_be_ids(dtype: str) -> bool:
    return dtype.startswith(("int", "uint", "str", "<U", ">U"))


@dataclass(frozen=True)
class _ArrayInFile:
    """Where an array's bytes lie: in C order, from `start` on. The file is open only while some of them are read."""

    url: str
    start: int
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    is_bfloat16: bool = False
    unread: str = ""  # the name of a dtype that NumPy has not

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, start: int, stop: int) -> NDArray[Any]:
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        with ForeignFile(self.url) as file:
            data = file.read(self.start + start * row_bytes, (stop - start) * row_bytes)
        array = data.view(self.dtype).reshape(stop - start, *self.shape[1:])
        return to_float32(array, "bfloat16") if self.is_bfloat16 else array


class PlacedArrays:
    """Arrays at known places; make it with `open_npy`, `open_safetensors` or `open_raw`."""

    def __init__(self, where: str, places: Mapping[str, _ArrayInFile]) -> None:
        self.where, self._places = where, places
        self.shapes: Mapping[str, Sequence[int]] = {name: place.shape for name, place in places.items()}
        self.dtypes: Mapping[str, str] = {
            name: place.unread or ("bfloat16" if place.is_bfloat16 else str(place.dtype)) for name, place in places.items()
        }

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        return self._places[name].read(start, stop)


def open_raw(url: str, names: ArrayNames, definition: TableDef) -> tuple[PlacedArrays, ArrayNames]:
    """Open files of rows and nothing else, in the table's dtype, little-endian; a name is a path or URL, as of `open_npy`."""
    if names.state is not None:
        raise InvalidInputError("raw files have no state: leave state out, or give npy files")
    names = ArrayNames(names.ids, url if names.weights is None else names.weights)
    assert names.weights is not None
    places = {names.weights: _raw_place(names.weights, (definition.dim,), storage_dtype(definition.dtype), definition.dtype == "bfloat16")}
    if names.ids is not None:
        places[names.ids] = _raw_place(names.ids, (), np.dtype(definition.id_dtype).newbyteorder("<"))
    return PlacedArrays(shown(url), places), names


def _raw_place(url: str, row: tuple[int, ...], dtype: "np.dtype[Any]", is_bfloat16: bool = False) -> _ArrayInFile:
    n_each = math.prod(row) * dtype.itemsize
    with ForeignFile(url) as file:
        if file.size_bytes % n_each:
            raise ForeignRowsError(f"{file.where}: {file.size_bytes} bytes, no whole number of rows of {n_each}: cut off, or of other rows")
        return _ArrayInFile(url, 0, (file.size_bytes // n_each, *row), dtype, is_bfloat16)


def open_npy(url: str, names: ArrayNames) -> tuple[PlacedArrays, ArrayNames]:
    """Open an npy file; an array's name is the path or URL of its own file. Return the arrays, and the names with that of the weights."""
    names = ArrayNames(names.ids, url if names.weights is None else names.weights, names.state)
    state = [names.state] if isinstance(names.state, str) else list((names.state or {}).values())
    urls = [names.weights, names.ids, *state]
    return PlacedArrays(shown(url), {one: _npy_place(one) for one in urls if one is not None}), names


def _npy_place(url: str) -> _ArrayInFile:
    with ForeignFile(url) as file:
        return _placed_by_head(file, url)


def _placed_by_head(file: ForeignFile, url: str) -> _ArrayInFile:
    head = io.BytesIO(file.read(0, min(file.size_bytes, 1 << 16)).tobytes())
    with translated(file.where):
        version = np.lib.format.read_magic(head)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, in_fortran_order, dtype = read(head)
    if dtype.hasobject or dtype.names is not None:
        raise ForeignRowsError(f"{file.where}: holds {dtype}, expected numbers or text: objects are not unpickled")
    if in_fortran_order and len(shape) > 1:
        raise ForeignRowsError(f"{file.where}: is in Fortran order; save it with np.save(path, np.ascontiguousarray(array))")
    place = _ArrayInFile(url, head.tell(), shape, dtype)
    if place.start + place.n_bytes != file.size_bytes:
        raise ForeignRowsError(
            f"{file.where}: {file.size_bytes} bytes, expected {place.start + place.n_bytes} by its head: cut off, or damaged"
        )
    return place


def open_safetensors(url: str) -> PlacedArrays:
    """Open a safetensors file."""
    with ForeignFile(url) as file:
        return _opened(file, url)


def _opened(file: ForeignFile, url: str) -> PlacedArrays:
    n_head = int(file.read(0, 8).view("<u8")[0]) if file.size_bytes >= 8 else file.size_bytes
    if n_head > min(_MAX_HEAD_BYTES, file.size_bytes - 8):
        raise ForeignRowsError(
            f"{file.where}: a head of {n_head} bytes in a file of {file.size_bytes}: it is no safetensors file, or cut off"
        )
    try:
        head = json.loads(file.read(8, n_head).tobytes(), object_pairs_hook=_without_repetition)
        tensors = {name: _tensor_place(url, 8 + n_head, head[name]) for name in head if name != "__metadata__"}
        end = 8 + n_head + max((head[name]["data_offsets"][1] for name in tensors), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ForeignRowsError(f"{file.where}: its head is damaged: {type(error).__name__}: {error}") from error
    if end != file.size_bytes:
        raise ForeignRowsError(f"{file.where}: {file.size_bytes} bytes, expected {end} by its head: cut off, or damaged")
    return PlacedArrays(file.where, tensors)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("two of its names are the same")
    return found


def _tensor_place(url: str, base: int, fields: Mapping[str, Any]) -> _ArrayInFile:
    """Where a tensor lies; one of another dtype has no rows of numbers, and is refused where it is wanted."""
    name, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"shape {shape} at {begin} to {end}")
    if name not in _SAFETENSORS_DTYPES:
        return _ArrayInFile(url, base + begin, shape, np.dtype("|V1"), unread=str(name))
    place = _ArrayInFile(url, base + begin, shape, np.dtype(_SAFETENSORS_DTYPES[name]), name == "BF16")
    if end - begin != place.n_bytes:
        raise ValueError(f"{end - begin} bytes of {name} {shape}")
    return place
