"""Which Parquet files a path or URL stands for, in which order, and what their names say of their rows.

A folder may be more than its files: a table whose log says which of them count, a write under way, or parts whose folders' names hold a
column. Rows are numbered across the files only where their names say one order.
"""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvemb.checkpoint.checkpoint_storage import CheckpointStorage, shown
from kvemb.errors import CheckpointError, ForeignRowsError
from kvemb.foreign.foreign_file import ForeignFile, is_local

ENDINGS = (".parquet", ".pq")
_DELTA = "DeltaTable(path).to_pyarrow_table() of the package deltalake"
# By what lies in a folder: what it is, and what tells its rows.
_LOGS = {
    "_delta_log": ("a Delta table", _DELTA),
    "metadata": ("an Iceberg table", "table.scan().to_arrow() of the package pyiceberg"),
    ".hoodie": ("a Hudi table", "spark.read.format('hudi').load(path)"),
    "_spark_metadata": ("the output of a Spark stream", "spark.read.parquet(path)"),
}


@dataclass(frozen=True)
class ParquetFiles:
    """Parquet files whose rows belong together."""

    urls: Sequence[str]  # of them, at least one, in the order of the numbers in their names
    no_order: str = ""  # why their rows cannot be numbered across them; "": they can
    in_folders: Collection[str] = ()  # the columns that stand in the names of their folders, as Hive and Spark have them (day=1)


def parquet_files(url: str) -> ParquetFiles:
    """Find the file itself, or those of a folder; names that begin with "_" or "." are notes of the program that wrote them."""
    if is_local(url) and not os.path.isdir(url):
        _refuse_logs_above(url)
        return ParquetFiles([url])
    missing = None
    if url.endswith(ENDINGS) and not is_local(url):  # Spark's folders have such names, too, and a store does not tell before it is asked
        try:
            ForeignFile(url).close()
            _refuse_logs_above(url)
            return ParquetFiles([url])
        except ForeignRowsError as error:
            missing = error
    return _files_of_folder(url.rstrip("/"), missing)


def _files_of_folder(base: str, missing: ForeignRowsError | None) -> ParquetFiles:
    try:
        names = CheckpointStorage(base).names()
    except CheckpointError as error:
        raise missing or ForeignRowsError(str(error)) from error
    for name in names:
        _refuse_log(base, name)
    _refuse_logs_above(base)
    files = [name for name in names if name.endswith(ENDINGS) and not any(part.startswith(("_", ".")) for part in name.split("/"))]
    if not files:
        others = sorted({os.path.splitext(name)[1] or name for name in names})
        there = f"; there are {', '.join(others[:5])}. Let the program that wrote them write Parquet (Hugging Face: dataset.to_parquet)"
        raise missing or ForeignRowsError(f"{shown(base)}: has no files that end in {' or '.join(ENDINGS)}{there if others else ''}")
    files.sort(key=_by_number)
    tables = sorted({"/".join(part for part in name.split("/")[:-1] if "=" not in part) for name in files})
    if len(tables) > 1:
        raise ForeignRowsError(
            f"{shown(base)}: has files in {', '.join(repr(one or '.') for one in tables[:5])}: name the folder that is meant"
        )
    keys = {part.partition("=")[0] for name in files for part in name.split("/")[:-1] if "=" in part}
    return ParquetFiles([f"{base}/{name}" for name in files], _no_order(files), keys)


def _by_number(name: str) -> list[str | int]:
    """Of text and numbers in turns: part-10 comes behind part-2."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _no_order(files: Sequence[str]) -> str:
    """Why the names of files say no order of their rows; "" where they do."""
    folder = next((name.rpartition("/")[0] for name in files if "/" in name), "")
    if folder:
        return f"its files lie in folders ({folder!r})"
    alike = {re.sub(r"\d+", "", name): name for name in files}
    if len(alike) > 1:
        return f"the names of its files differ in more than numbers ({', '.join(map(repr, sorted(alike.values())[:2]))})"
    of = re.search(r"-of-(\d+)", files[0])
    if of and int(of[1]) != len(files):
        return f"{files[0]!r} is one of {int(of[1])} files, and there are {len(files)}"
    return ""


def _refuse_log(base: str, name: str) -> None:
    """Refuse a folder where a file of this name says that its Parquet files are not its rows."""
    parts = name.split("/")
    for mark, (what, reader) in _LOGS.items():
        if mark in parts[:-1] and (mark != "metadata" or name.endswith((".metadata.json", "version-hint.text"))):
            where = "/".join([base, *parts[: parts.index(mark)]])
            raise ForeignRowsError(
                f"{shown(where)}: is {what} ({mark}): its log says which files and rows count, and is not read here. Read it with "
                f"{reader}, write that as plain Parquet into another folder, and import that"
            )
    if "_temporary" in parts:
        raise ForeignRowsError(
            f"{shown(base)}: is being written, or its write was broken off (_temporary). Wait for its end, or write it again, or remove "
            "_temporary if the rows are whole"
        )


def _refuse_logs_above(url: str) -> None:
    """Refuse a part of a table whose log lies above it: one of its files, the folder of a partition, an Iceberg table's data."""
    if url.startswith(("http://", "https://")):  # they list no folders
        return
    for folder in _folders_above(url):
        with suppress(CheckpointError):  # who may read a file need not be allowed to look around
            storage = CheckpointStorage(folder)
            for mark in _LOGS:
                for name in storage.names(mark) if mark == "metadata" else [f"{mark}/"] if storage.exists(mark) else []:
                    _refuse_log(folder, name)


def _folders_above(url: str) -> Iterator[str]:
    above, _, name = url.partition("?")[0].rpartition("/")
    while above and not above.endswith("/") and (name.endswith(ENDINGS) or "=" in name or name == "data"):
        yield above
        above, _, name = above.rpartition("/")
