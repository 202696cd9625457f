"""The list of formats that rows are read from: how each is recognised, and who reads it."""

import os
from collections.abc import Mapping

from kvemb.checkpoint.checkpoint_storage import CheckpointStorage, shown
from kvemb.errors import ForeignRowsError, InvalidInputError
from kvemb.foreign.array_files import ArrayRows, open_npy, open_raw, open_safetensors
from kvemb.foreign.foreign_file import is_local
from kvemb.foreign.foreign_rows import ArrayNames, RowSource
from kvemb.foreign.framework_arrays import CheckpointVariables, TorchArrays
from kvemb.foreign.parquet_rows import ParquetRows
from kvemb.foreign.word_vectors import WordVectors
from kvemb.schema.table_def import TableDef

FORMATS: Mapping[str, tuple[str, ...]] = {
    "npy": (".npy",),
    "safetensors": (".safetensors",),
    "parquet": (".parquet", ".pq"),
    "torch": (".pt", ".pth"),
    "tensorflow": (".index",),
    "word2vec": (".vec", ".w2v", ".txt"),
    "raw": (".raw",),
}
"""By the format's name the endings of its files."""


def open_rows(definition: TableDef, url: str, names: ArrayNames, file_format: str = "") -> RowSource:
    """Open a file of rows of a table, and check that it fits; its rows are not read yet.

    Args:
        definition: of the table.
        url: a path or any fsspec URL; of Parquet also a folder of such files.
        names: which of its arrays.
        file_format: of `FORMATS`; unless given, by the file's ending.

    Raises:
        ForeignRowsError: it is missing, damaged, or does not fit the table.
        InvalidInputError: the format is not known, or names are wrong.
        ConfigError: a library is not installed.
    """
    kind = format_of(url, "parquet" if not file_format and is_local(url) and os.path.isdir(url) else file_format)
    if kind == "npy":
        return ArrayRows(definition, *open_npy(url, names))
    if kind == "raw":
        return ArrayRows(definition, *open_raw(url, names, definition))
    if kind == "safetensors":
        return ArrayRows(definition, open_safetensors(url), names)
    if kind == "parquet":
        return ParquetRows(definition, _parquet_files(url), names)
    if kind == "torch":
        return ArrayRows(definition, TorchArrays(url), names)
    if kind == "tensorflow":
        return ArrayRows(definition, CheckpointVariables(url), names)
    return WordVectors(definition, url, names)


def format_of(url: str, file_format: str = "") -> str:
    """Return the name of a file's format: as given, else by its ending.

    Raises:
        InvalidInputError: neither tells.

    Example:
        >>> format_of("s3://bucket/user.parquet"), format_of("user.data", "npy")
        ('parquet', 'npy')
    """
    if file_format and file_format not in FORMATS:
        raise InvalidInputError(f"format is {file_format!r}; known: {', '.join(FORMATS)}")
    kind = file_format or next((name for name, ends in FORMATS.items() if url.endswith(ends)), "")
    if not kind:
        ends = ", ".join(end for ends in FORMATS.values() for end in ends)
        raise InvalidInputError(
            f"{shown(url)}: which format is it? Known by their endings are {ends}; else give one of {', '.join(FORMATS)}"
        )
    return kind


def _parquet_files(url: str) -> list[str]:
    """The file itself, or those of a folder, sorted; names that begin with "_" or "." are notes of the program that wrote them."""
    if url.endswith(FORMATS["parquet"]) and not (is_local(url) and os.path.isdir(url)):
        return [url]
    if is_local(url) and not os.path.isdir(url):
        return [url]
    base = url.rstrip("/")
    names = [name for name in CheckpointStorage(base).names() if name.endswith(FORMATS["parquet"])]
    files = [f"{base}/{name}" for name in names if not any(part.startswith(("_", ".")) for part in name.split("/"))]
    if not files:
        raise ForeignRowsError(f"{base}: has no files that end in {' or '.join(FORMATS['parquet'])}")
    return files
