"""Parquet files of the plainest kind, written and read at the speed of memory: no codec, one page a column in each row group.

A page is a head, which follows from its numbers of rows and of values a row, and then the array's own bytes. So writing moves no value, and
what was written so is read as an array over the file's bytes. Any Parquet reader reads these files, too. Pure but for pyarrow's schema.

    "PAR1" | per row group and column: zeros up to 16 bytes, head, values | footer (Thrift, compact) | its size u32 | "PAR1"

Of lists the head has levels: where each row begins, as bits (0 and then ones), and that every value is there, as one run.
"""

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"PAR1"
_ALIGNED = 16
_PLAIN, _RLE = 0, 3
_INT64, _FLOAT, _FIXED_BYTES = 2, 4, 7
_REQUIRED, _REPEATED = 0, 2
_BOOL_NO, _BYTE, _I32, _I64, _BINARY, _LIST, _STRUCT = 2, 3, 5, 6, 8, 9, 12
_Field = tuple[int, int, Any]
"""(number, type, value) of a Thrift struct's field; of a struct its fields, of a list (type of its items, items)."""


@dataclass(frozen=True)
class Column:
    """One column."""

    name: str  # of it
    kind: str  # "int64", "uint64", "float", "halffloat", or "fixed_size_binary[N]", whose values are N bytes
    width: int  # values of a row, which is a list of so many; 0: one value, no list

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The values' NumPy dtype."""
        known = {"int64": "<i8", "uint64": "<u8", "float": "<f4", "halffloat": "<f2"}
        return np.dtype(known[self.kind] if self.kind in known else f"V{self.kind[18:-1]}")

    @property
    def item_bytes(self) -> int:
        """Of one value."""
        return self.dtype.itemsize

    @property
    def physical(self) -> int:
        """The values' type in Parquet."""
        return {"float": _FLOAT, "int64": _INT64, "uint64": _INT64}.get(self.kind, _FIXED_BYTES)


def columns_of(schema: Any) -> list[Column]:
    """Return the columns of a pyarrow schema of numbers, of lists of `width` numbers, and of bytes of one length."""
    kinds = [field.type for field in schema]
    inner = [getattr(kind, "value_type", kind) for kind in kinds]
    return [Column(f.name, str(i), getattr(k, "list_size", 0)) for f, k, i in zip(schema, kinds, inner, strict=True)]


class PlainWriter:
    """Makes a file's pieces, in order: `add` row groups, then `footer`. Pieces of the arrays are views of them."""

    def __init__(self, schema: Any, with_range: str) -> None:
        self._schema, self._columns, self._with_range = schema, columns_of(schema), with_range
        self._groups: list[list[_Field]] = []
        self._n_rows = self.size_bytes = 0

    def add(self, arrays: Sequence[NDArray[Any]]) -> list[memoryview | bytes]:
        """Return the bytes of one row group: by column [n], or [n, width] of a list, of binary uint8 [n, N]; n >= 1."""
        pieces: list[memoryview | bytes] = [b"" if self.size_bytes else _MAGIC]
        self.size_bytes += len(pieces[0])
        n_rows, begun, chunks = len(arrays[0]), self.size_bytes, []
        for column, array in zip(self._columns, arrays, strict=True):
            values = np.ascontiguousarray(array).reshape(-1)
            head = page_head(n_rows, column.width, column.item_bytes)
            gap = -(self.size_bytes + len(head)) % _ALIGNED
            start, size = self.size_bytes + gap, len(head) + values.nbytes
            pieces += [bytes(gap), head, values.view(np.uint8).data]
            self.size_bytes = start + size
            chunks.append(self._chunk(column, values, start, size))
        n_bytes, number = self.size_bytes - begun, len(self._groups)
        group = [(1, _LIST, (_STRUCT, chunks)), (2, _I64, n_bytes), (3, _I64, n_rows), (5, _I64, begun), (6, _I64, n_bytes)]
        self._groups.append(group if number >> 15 else [*group, (7, 4, number)])
        self._n_rows += n_rows
        return pieces

    def footer(self) -> bytes:
        """Return the file's last bytes; nothing may be added afterwards."""
        arrow = [(1, _BINARY, b"ARROW:schema"), (2, _BINARY, base64.b64encode(self._schema.serialize().to_pybytes()))]
        order: list[_Field] = [(1, _STRUCT, [])]
        fields: list[_Field] = [
            (1, _I32, 2), (2, _LIST, (_STRUCT, _schema_elements(self._columns))), (3, _I64, self._n_rows),
            (4, _LIST, (_STRUCT, self._groups)), (5, _LIST, (_STRUCT, [arrow])), (6, _BINARY, b"kvemb"),
            (7, _LIST, (_STRUCT, [order] * len(self._columns))),
        ]  # fmt: skip
        packed = _struct(fields)
        data = (b"" if self.size_bytes else _MAGIC) + packed + struct.pack("<I", len(packed)) + _MAGIC
        self.size_bytes += len(data)
        return data

    def _chunk(self, column: Column, values: NDArray[Any], start: int, size: int) -> list[_Field]:
        path = [column.name.encode(), *((b"list", b"element") if column.width else ())]
        fields: list[_Field] = [
            (1, _I32, column.physical), (2, _LIST, (_I32, [_PLAIN, _RLE])), (3, _LIST, (_BINARY, path)), (4, _I32, 0),
            (5, _I64, values.nbytes // column.item_bytes), (6, _I64, size), (7, _I64, size), (9, _I64, start),
        ]  # fmt: skip
        if column.name == self._with_range:
            typed = values.view(column.dtype)  # ids ascend as uint64, which is not the order of negative ones
            fields.append((12, _STRUCT, [(3, _I64, 0), (5, _BINARY, typed.max().tobytes()), (6, _BINARY, typed.min().tobytes())]))
        return [(2, _I64, start), (3, _STRUCT, fields)]


def read_group(columns: Sequence[Column], group: Any, data: bytes) -> dict[str, NDArray[Any]] | None:
    """Return the columns of a row group as arrays over the file's bytes, or None where it was not written by `PlainWriter`."""
    found = {}
    for number, column in enumerate(columns):
        chunk, n_values = group.column(number), group.num_rows * max(1, column.width)
        head = page_head(group.num_rows, column.width, column.item_bytes)
        start, size = chunk.data_page_offset, len(head) + n_values * column.item_bytes
        if chunk.total_compressed_size != size or not 0 <= start <= len(data) - size or not data.startswith(head, start):
            return None
        values = np.frombuffer(data, column.dtype, n_values, start + len(head))
        if column.dtype.kind == "V":
            values = values.view(np.uint8).reshape(n_values, column.item_bytes)
        found[column.name] = values.reshape(-1, column.width) if column.width else values
    return found


@lru_cache(64)
def page_head(n_rows: int, width: int, item_bytes: int) -> bytes:
    """Return the bytes before the values of a page of n rows (at least 1): its header, and of lists (`width` > 0) the levels."""
    n_values = n_rows * max(1, width)
    levels = b""
    if width:
        eight_rows = np.packbits(np.arange(8 * width) % width != 0, bitorder="little")  # uint8 [width]
        n_bytes = -(-n_values // 8)
        begins = np.tile(eight_rows, -(-n_bytes // width))[:n_bytes]  # uint8 [n_bytes]: bit i is 0 where value i begins a row
        for run in (_varint(n_bytes << 1 | 1) + begins.tobytes(), _varint(n_values << 1) + b"\x01"):
            levels += struct.pack("<I", len(run)) + run
    size = len(levels) + n_values * item_bytes
    in_page: list[_Field] = [(1, _I32, n_values), (2, _I32, _PLAIN), (3, _I32, _RLE), (4, _I32, _RLE)]
    return _struct([(1, _I32, 0), (2, _I32, size), (3, _I32, size), (5, _STRUCT, in_page)]) + levels


def _schema_elements(columns: Sequence[Column]) -> list[list[_Field]]:
    elements: list[list[_Field]] = [[(3, _I32, _REQUIRED), (4, _BINARY, b"schema"), (5, _I32, len(columns))]]
    for column in columns:
        name = column.name.encode()
        if column.width:
            elements.append([(3, _I32, _REQUIRED), (4, _BINARY, name), (5, _I32, 1), (6, _I32, 3), (10, _STRUCT, [(3, _STRUCT, [])])])
            elements.append([(3, _I32, _REPEATED), (4, _BINARY, b"list"), (5, _I32, 1)])
            name = b"element"
        leaf: list[_Field] = [(1, _I32, column.physical), (3, _I32, _REQUIRED), (4, _BINARY, name)]
        if column.physical == _FIXED_BYTES:
            leaf.insert(1, (2, _I32, column.item_bytes))
        if column.kind == "halffloat":
            leaf.append((10, _STRUCT, [(15, _STRUCT, [])]))
        if column.kind == "uint64":
            leaf += [(6, _I32, 14), (10, _STRUCT, [(10, _STRUCT, [(1, _BYTE, 64), (2, _BOOL_NO, None)])])]
        elements.append(leaf)
    return elements


def _struct(fields: Sequence[_Field]) -> bytes:
    """Return a Thrift struct in the compact protocol; its fields' numbers ascend by less than 16."""
    packed, before = [], 0
    for number, kind, value in fields:
        packed += [bytes([number - before << 4 | kind]), _value(kind, value)]
        before = number
    return b"".join(packed) + b"\0"


def _value(kind: int, value: Any) -> bytes:
    if kind == _STRUCT:
        return _struct(value)
    if kind == _BINARY:
        return _varint(len(value)) + bytes(value)
    if kind == _LIST:
        of, items = value
        head = bytes([len(items) << 4 | of]) if len(items) < 15 else bytes([0xF0 | of]) + _varint(len(items))
        return head + b"".join(_value(of, item) for item in items)
    if kind == _BYTE:
        return bytes([value])
    return b"" if kind == _BOOL_NO else _varint(value << 1)  # zigzag of numbers that are not negative


def _varint(value: int) -> bytes:
    packed = bytearray()
    while value >> 7:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*packed, value])
