"""Rows written into files of other programs: ids and weights, in the formats that rows are read from, with the names that reading expects.

A writer gets all ids at first, and then the weights, block by block, so that npy, safetensors and Parquet take no memory for a whole table.
torch and TensorFlow write whole arrays: these take it. A file is there whole or not at all.
"""

import io
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import to_caller
from kvemb.arrays.rounding import opaque_bytes, round_nearest, storage_dtype
from kvemb.checkpoint.checkpoint_storage import shown
from kvemb.checkpoint.format.parquet_blocks import weights_type
from kvemb.checkpoint.format.plain_parquet import PlainWriter
from kvemb.errors import ForeignRowsError, InvalidInputError
from kvemb.foreign.foreign_file import is_local
from kvemb.foreign.formats import FORMATS, format_of
from kvemb.foreign.framework_arrays import require_framework
from kvemb.foreign.narrow_weights import check_narrow, narrowed
from kvemb.process import replace_atomically, sync_folder
from kvemb.process.extras import require_extra
from kvemb.schema.table_def import TableDef

_SAFETENSORS = {"int8": "I8", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "uint64": "U64"}
Blocks = Iterable[NDArray[Any]]
Pieces = Iterator[bytes | memoryview]


def write_rows(
    definition: TableDef, url: str, ids: NDArray[np.uint64] | None, n_rows: int, blocks: Blocks, file_format: str = "", dtype: str = ""
) -> None:
    """Write rows of a table, replacing an older file: the ids, uint64 [n], or None where row i is id i, and blocks of `row_dtype` [m, dim].

    Weights keep their dtype where the format has it (npy and Parquet: bfloat16 becomes float32, exactly). InvalidInputError: the format is
    not known, or takes no such rows; nothing was written.
    """
    kind = format_of(url, file_format)
    check_writable(definition, kind, ids, dtype)
    where, weights = shown(url), _Weights(definition, blocks, dtype, wide=kind in ("npy", "parquet"))
    try:
        if kind == "tensorflow":
            _write_variables(definition, url, ids, weights)
            return
        if kind == "npy":
            pieces = _npy(weights.numpy_dtype, (n_rows, definition.dim), weights)
        elif kind == "raw":
            pieces = map(_bytes_of, weights)
        elif kind == "safetensors":
            pieces = _safetensors(definition, ids, n_rows, weights)
        elif kind == "parquet":
            pieces = _parquet(definition, ids, weights)
        else:
            pieces = _torch(definition, ids, weights)
        _put(url, pieces)
    except OSError as error:
        raise ForeignRowsError(f"{where}: cannot be written: {type(error).__name__}: {error}") from error


def write_ids(definition: TableDef, url: str, ids: NDArray[np.uint64], kind: str) -> None:
    """Write the ids that go with an npy or raw file of rows, as one of their own; raises as `write_rows`."""
    own = to_caller(ids, definition.id_dtype)
    try:
        _put(url, _npy(own.dtype, own.shape, [own]) if kind == "npy" else iter([_bytes_of(own)]))
    except OSError as error:
        raise ForeignRowsError(f"{shown(url)}: cannot be written: {type(error).__name__}: {error}") from error


def check_writable(definition: TableDef, kind: str, ids: NDArray[np.uint64] | None, dtype: str = "") -> None:
    """Refuse a format that takes no rows with ids, or without, or none of a dtype."""
    if kind == "word2vec":
        raise InvalidInputError(
            "word vectors are words and numbers, and rows are known by ids, which words are hashed to: write "
            + ", ".join(name for name in FORMATS if name != "word2vec")
        )
    if kind == "parquet" and ids is None:
        raise InvalidInputError("Parquet files have ids")
    if dtype and opaque_bytes(definition.dtype) is not None:
        raise InvalidInputError(f"table {definition.name!r} has rows of {definition.dtype}, which are written as they are: leave dtype out")
    check_narrow(dtype, kind)


class _Weights:
    """The weights as they are written, of this `dtype`: float32 where the format has no bfloat16; `scales` has those yielded of int8."""

    def __init__(self, definition: TableDef, blocks: Blocks, dtype: str, *, wide: bool) -> None:
        self._blocks, self._narrow, self._dim = blocks, bool(dtype), definition.dim
        self.dtype = dtype or ("float32" if wide and definition.dtype == "bfloat16" else definition.dtype)
        self.numpy_dtype = np.dtype(np.int8) if dtype == "int8" else storage_dtype(self.dtype)
        self.scales: list[NDArray[np.float32]] = []

    def __iter__(self) -> Iterator[NDArray[Any]]:
        if self._narrow:
            return narrowed(self._blocks, self.dtype, self.scales)
        return (round_nearest(block, self.dtype) for block in self._blocks)  # opaque bytes as they are

    def whole(self) -> NDArray[Any]:
        """Return all blocks as one array."""
        return np.concatenate([np.empty((0, self._dim), self.numpy_dtype), *self])

    def scale(self) -> NDArray[np.float32]:
        """Return the scales of all rows, float32 [n], once all blocks were yielded."""
        return np.concatenate([np.empty(0, np.float32), *self.scales])


def _npy(dtype: "np.dtype[Any]", shape: tuple[int, ...], blocks: Iterable[NDArray[Any]]) -> Pieces:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    yield head.getvalue()
    yield from map(_bytes_of, blocks)


def _safetensors(definition: TableDef, ids: NDArray[np.uint64] | None, n_rows: int, weights: _Weights) -> Pieces:
    size = n_rows * definition.dim * weights.numpy_dtype.itemsize
    arrays = [("id", definition.id_dtype, [n_rows], 8 * n_rows)] if ids is not None else []
    arrays.append(("weights", weights.dtype, [n_rows, definition.dim], size))
    arrays += [("scale", "float32", [n_rows], 4 * n_rows)] if weights.dtype == "int8" else []
    head, at = dict[str, Any](), 0
    for name, dtype, shape, n_bytes in arrays:
        head[name] = {"dtype": "U8" if opaque_bytes(dtype) else _SAFETENSORS[dtype], "shape": shape, "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    if ids is not None:
        yield _bytes_of(ids)
    yield from map(_bytes_of, weights)
    yield _bytes_of(weights.scale())


def _parquet(definition: TableDef, ids: NDArray[np.uint64] | None, blocks: _Weights) -> Pieces:
    assert ids is not None
    pa = require_extra("pyarrow")
    id_kind = pa.int64() if definition.id_dtype == "int64" else pa.uint64()
    fields = [pa.field("id", id_kind, nullable=False), pa.field("weights", weights_type(blocks.dtype, definition.dim), nullable=False)]
    writer = PlainWriter(pa.schema(fields), "id")
    at = 0
    for block in blocks:
        yield from writer.add([ids[at : at + len(block)], block])
        at += len(block)
    yield writer.footer()


def _torch(definition: TableDef, ids: NDArray[np.uint64] | None, weights: _Weights) -> Pieces:
    torch, out = require_framework("torch"), io.BytesIO()
    stored = torch.from_numpy(weights.whole())
    held = {} if ids is None else {"id": torch.from_numpy(to_caller(ids, definition.id_dtype).copy())}
    held["weights"] = stored.view(torch.bfloat16) if weights.dtype == "bfloat16" else stored
    if weights.scales:
        held["scale"] = torch.from_numpy(weights.scale())
    torch.save(held, out)
    yield out.getbuffer()


def _write_variables(definition: TableDef, url: str, ids: NDArray[np.uint64] | None, weights: _Weights) -> None:
    tf = require_framework("tensorflow")
    stored = tf.constant(weights.whole())
    held = {} if ids is None else {"id": tf.constant(to_caller(ids, definition.id_dtype))}
    held["weights"] = tf.bitcast(stored, tf.bfloat16) if weights.dtype == "bfloat16" else stored
    if weights.scales:
        held["scale"] = tf.constant(weights.scale())
    if is_local(url):
        Path(url).parent.mkdir(parents=True, exist_ok=True)
    tf.raw_ops.SaveV2(
        prefix=url.removesuffix(".index"), tensor_names=list(held), shape_and_slices=[""] * len(held), tensors=list(held.values())
    )


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _put(url: str, pieces: Pieces) -> None:
    """Write a file whole, or leave what was there."""
    if is_local(url):
        path = Path(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(path, pieces, temporary=f"_tmp.{path.name}")
        sync_folder(path.parent)
        return
    opened = require_extra("fsspec.core").url_to_fs(url)
    file = opened[0].open(opened[1], "wb", autocommit=False)
    try:
        for piece in pieces:
            file.write(piece)
        file.close()
        file.commit()
    except BaseException:
        with suppress(Exception):
            file.discard()
        raise
