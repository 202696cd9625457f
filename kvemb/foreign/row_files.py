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
from kvemb.checkpoint.format.parquet_blocks import require_extra, weights_type
from kvemb.checkpoint.format.plain_parquet import PlainWriter
from kvemb.errors import ForeignRowsError, InvalidInputError
from kvemb.foreign.foreign_file import is_local
from kvemb.foreign.formats import FORMATS, format_of
from kvemb.foreign.framework_arrays import require_framework
from kvemb.process import replace_atomically, sync_folder
from kvemb.schema.table_def import TableDef

_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "uint64": "U64"}
Blocks = Iterable[NDArray[Any]]
Pieces = Iterator[bytes | memoryview]


def write_rows(definition: TableDef, url: str, ids: NDArray[np.uint64] | None, n_rows: int, blocks: Blocks, file_format: str = "") -> None:
    """Write rows of a table, replacing an older file.

    Args:
        definition: of the table; weights keep its dtype, where the format has it (npy and Parquet: bfloat16 becomes float32, exactly).
        url: a path or any fsspec URL; of TensorFlow a checkpoint's prefix.
        ids: uint64 [n] as "id"; None: row i is id i.
        n_rows: n.
        blocks: [m, dim] each of the table's `row_dtype`, in the order of the ids, n rows together.
        file_format: of `FORMATS`; unless given, by the file's ending.

    Raises:
        InvalidInputError: the format is not known, or takes no such rows; nothing was written.
        ForeignRowsError: the file cannot be written; an older one is untouched.
        ConfigError: a library is not installed.
    """
    kind = format_of(url, file_format)
    check_writable(kind, ids)
    where = shown(url)
    try:
        if kind == "tensorflow":
            _write_variables(definition, url, ids, blocks)
            return
        if kind == "npy":
            pieces = _npy(stored_dtype(definition), (n_rows, definition.dim), _stored(definition, blocks))
        elif kind == "raw":
            pieces = (_bytes_of(round_nearest(block, definition.dtype)) for block in blocks)
        elif kind == "safetensors":
            pieces = _safetensors(definition, ids, n_rows, blocks)
        elif kind == "parquet":
            pieces = _parquet(definition, ids, blocks)
        else:
            pieces = _torch(definition, ids, blocks)
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


def check_writable(kind: str, ids: NDArray[np.uint64] | None) -> None:
    """Refuse a format that takes no rows with ids, or without.

    Raises:
        InvalidInputError: with the way on.
    """
    if kind == "word2vec":
        raise InvalidInputError(
            "word vectors are words and numbers, and rows are known by ids, which words are hashed to: write "
            + ", ".join(name for name in FORMATS if name != "word2vec")
        )
    if kind == "parquet" and ids is None:
        raise InvalidInputError("Parquet files have ids")


def stored_dtype(definition: TableDef) -> "np.dtype[Any]":
    """The NumPy dtype of weights in files that have no bfloat16."""
    return storage_dtype("float32" if definition.dtype == "bfloat16" else definition.dtype)


def _stored(definition: TableDef, blocks: Blocks) -> Iterator[NDArray[Any]]:
    return (block.astype(stored_dtype(definition), copy=False) for block in blocks)


def _npy(dtype: "np.dtype[Any]", shape: tuple[int, ...], blocks: Iterable[NDArray[Any]]) -> Pieces:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    yield head.getvalue()
    yield from map(_bytes_of, blocks)


def _safetensors(definition: TableDef, ids: NDArray[np.uint64] | None, n_rows: int, blocks: Blocks) -> Pieces:
    arrays = [] if ids is None else [("id", definition.id_dtype, [n_rows], 8 * n_rows)]
    size = n_rows * definition.dim * storage_dtype(definition.dtype).itemsize
    head, at = dict[str, Any](), 0
    for name, dtype, shape, n_bytes in [*arrays, ("weights", definition.dtype, [n_rows, definition.dim], size)]:
        head[name] = {"dtype": "U8" if opaque_bytes(dtype) else _SAFETENSORS[dtype], "shape": shape, "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    if ids is not None:
        yield _bytes_of(ids)
    yield from (_bytes_of(round_nearest(block, definition.dtype)) for block in blocks)


def _parquet(definition: TableDef, ids: NDArray[np.uint64] | None, blocks: Blocks) -> Pieces:
    assert ids is not None
    pa = require_extra("pyarrow")
    id_kind = pa.int64() if definition.id_dtype == "int64" else pa.uint64()
    fields = [pa.field("id", id_kind, nullable=False), pa.field("weights", weights_type(definition), nullable=False)]
    writer = PlainWriter(pa.schema(fields), "id")
    at = 0
    for block in _stored(definition, blocks):
        yield from writer.add([ids[at : at + len(block)], block])
        at += len(block)
    yield writer.footer()


def _torch(definition: TableDef, ids: NDArray[np.uint64] | None, blocks: Blocks) -> Pieces:
    torch, out = require_framework("torch"), io.BytesIO()
    stored = torch.from_numpy(_whole(definition, blocks))
    held = {} if ids is None else {"id": torch.from_numpy(to_caller(ids, definition.id_dtype).copy())}
    held["weights"] = stored.view(torch.bfloat16) if definition.dtype == "bfloat16" else stored
    torch.save(held, out)
    yield out.getbuffer()


def _write_variables(definition: TableDef, url: str, ids: NDArray[np.uint64] | None, blocks: Blocks) -> None:
    tf = require_framework("tensorflow")
    stored = tf.constant(_whole(definition, blocks))
    held = {} if ids is None else {"id": tf.constant(to_caller(ids, definition.id_dtype))}
    held["weights"] = tf.bitcast(stored, tf.bfloat16) if definition.dtype == "bfloat16" else stored
    if is_local(url):
        Path(url).parent.mkdir(parents=True, exist_ok=True)
    tf.raw_ops.SaveV2(
        prefix=url.removesuffix(".index"), tensor_names=list(held), shape_and_slices=[""] * len(held), tensors=list(held.values())
    )


def _whole(definition: TableDef, blocks: Blocks) -> NDArray[Any]:
    stored = [round_nearest(block, definition.dtype) for block in blocks]
    return np.concatenate([np.empty((0, definition.dim), storage_dtype(definition.dtype)), *stored])


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
