"""Rows of tables from files of other programs, and into them, as users see it: `cluster.files`. See docs/id-lifecycle.md."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.connection import Connection
from kvemb.errors import InvalidInputError
from kvemb.foreign.foreign_file import foreign_url
from kvemb.foreign.foreign_rows import ArrayNames, block_rows
from kvemb.foreign.formats import format_of
from kvemb.foreign.row_files import check_writable, write_ids, write_rows
from kvemb.foreign.row_import import ImportProgress, ImportResult, RowArrays, import_rows
from kvemb.schema.table_def import TableDef

ExportProgress = Callable[[str, int, int], None]
"""Called with (name of the phase, rows done, rows in all)."""


@dataclass(frozen=True)
class ExportResult:
    """The end of an export: rows written, and seconds of all of it."""

    n_rows: int
    seconds: float


class TableFiles:
    """Imports and exports the rows of one table. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def import_rows(
        self,
        table: str,
        source: str | os.PathLike[str] | RowArrays | Iterable[RowArrays],
        *,
        ids: str | os.PathLike[str] | None = None,
        weights: str | os.PathLike[str] | None = None,
        state: str | os.PathLike[str] | Mapping[str, str] | None = None,
        format: str = "",
        resume: bool = False,
        timeout_s: float | None = None,
        progress: ImportProgress | None = None,
    ) -> ImportResult:
        """Set rows of a table from a file of another program, or from arrays; see docs/id-lifecycle.md.

        A file is verified first, all of it: a file that is damaged, or does not fit, changes nothing. Then rows are assigned, block by
        block. Rows of other ids stay as they are.

        Args:
            table: its name; it exists.
            source: a path or any fsspec URL. Or (ids, weights) or (ids, weights, state) as arrays, or any iterable of such blocks: of
                an id that comes again the later row holds, and no block is looked at before its turn; a list of blocks is verified first,
                as a file is.
            ids: which array of the file holds the ids, integers or text, which is hashed as by `kvemb.hash_ids`. Unless given, it is
                that named "id"; where there is none, row i is id i, unless a Parquet file has other columns that could be ids. Of npy all
                names are those of further files.
            weights: which array holds the rows; unless given, that named "weights", or the only one with two axes.
            state: which arrays hold the optimizer's state: one for all of it, or by the name of the field (`exp_avg`). Without, the
                rows' state begins anew.
            format: of the file, where its ending does not tell.
            resume: leave out the first blocks as far as the table has their weights already.
            timeout_s: of each block; as of `Table.assign`.
            progress: called now and then with (name of the phase, rows done, rows in all).

        Raises:
            ForeignRowsError: the file is missing, damaged, or does not fit the table; nothing was changed.
            InvalidInputError: names, or the format, are wrong; nothing was changed.
            ConfigError: a library that reads the format is not installed.
            ParameterServerError: blocks before this one are set, of this one some rows may be. Import again, or with resume.
        """
        names = ArrayNames(
            None if ids is None else os.fspath(ids),
            None if weights is None else os.fspath(weights),
            state if state is None or isinstance(state, Mapping) else os.fspath(state),
        )
        return import_rows(
            self._connection,
            self._definition(table),
            source,
            names,
            file_format=format,
            resume=resume,
            timeout_s=timeout_s,
            progress=progress,
        )

    def export_rows(
        self,
        table: str,
        url: str | os.PathLike[str],
        *,
        format: str = "",
        ids: str | os.PathLike[str] | None = None,
        dtype: str = "",
        progress: ExportProgress | None = None,
    ) -> ExportResult:
        """Write the rows of a table into a file that other programs read, and `import_rows` too; see docs/id-lifecycle.md.

        The file has the ids as "id", ascending, and the weights as "weights". Training may go on meanwhile, so this is no snapshot; a row
        that is erased meanwhile is written as a pull gives it. The optimizer's state is not written: `save` does that.

        Args:
            table: its name.
            url: a path or any fsspec URL; an older file is replaced. It ends in .npy, .safetensors, .parquet or .pt, or is, with
                format="tensorflow", a checkpoint's prefix.
            format: of the file, where its ending does not tell.
            ids: of npy, a further file for the ids. Without, a table with num_ids is written whole: row i is id i, rows that do not exist
                are as a pull gives them.
            dtype: of the weights in the file; unless given, the table's. "float16", or "int8" with a float32 "scale" for each row: the page
                says by how much a value is off, and which formats take it.
            progress: called now and then with (name of the phase, rows done, rows in all).

        Raises:
            InvalidInputError: the format is not known, or does not take the table's ids or the dtype; nothing was written.
            ForeignRowsError: the file cannot be written, or a weight is beyond float16; an older file is untouched.
            ConfigError: a library that writes the format is not installed.
        """
        self._connection.require_shards("export_rows")
        definition = self._definition(table)
        connection, begun, show = self._connection, time.monotonic(), progress or (lambda what, done, total: None)
        file, id_file = foreign_url(os.fspath(url)), None if ids is None else foreign_url(os.fspath(ids))
        kind = format_of(file, format)
        rows_only = kind in ("npy", "raw")
        if id_file is not None and not rows_only:
            raise InvalidInputError("ids names a further file, which only npy and raw need: in other formats the ids are beside the rows")
        if rows_only and id_file is None and definition.num_ids is None:
            raise InvalidInputError(
                f"table {definition.name!r} has ids of any number, which {kind} does not hold: give ids, a file for them"
            )
        check_writable(definition, kind, np.empty(0, np.uint64), dtype)
        dense = definition.num_ids if rows_only and id_file is None else None
        all_ids = _existing(connection, definition) if dense is None else np.arange(dense, dtype=np.uint64)
        blocks = _pulled(connection, definition, all_ids, show)
        write_rows(definition, file, None if rows_only else all_ids, len(all_ids), blocks, format, dtype)
        if id_file is not None:
            write_ids(definition, id_file, all_ids, kind)
        return ExportResult(len(all_ids), time.monotonic() - begun)

    def _definition(self, table: str) -> TableDef:
        return self._connection.require_shards("import_rows").questions.get_table(table)


def _existing(connection: Connection, definition: TableDef) -> NDArray[np.uint64]:
    pages = [np.empty(0, np.uint64), *connection.known_ids(definition.name)]
    return np.sort(np.concatenate(pages))


def _pulled(connection: Connection, definition: TableDef, ids: NDArray[np.uint64], show: ExportProgress) -> Iterator[NDArray[Any]]:
    step = block_rows(definition)
    for at in range(0, len(ids), step):
        [(rows, _)] = connection.pull_known([(definition, ids[at : at + step])])
        show("exporting", min(at + step, len(ids)), len(ids))
        yield rows
