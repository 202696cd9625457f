"""Rows of tables from files of other programs, and into them, as users see it: `cluster.files`. See docs/id-lifecycle.md."""

from __future__ import annotations  # help() shows types as they are written here

import os
from collections.abc import Iterable, Mapping

from kvemb.connection import Connection
from kvemb.foreign.foreign_rows import ArrayNames
from kvemb.foreign.row_export import ExportProgress, ExportResult, export_rows
from kvemb.foreign.row_import import ImportProgress, ImportResult, RowArrays, import_rows
from kvemb.schema.table_def import TableDef


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
        to_ids = None if ids is None else os.fspath(ids)
        return export_rows(
            self._connection, self._definition(table), os.fspath(url), file_format=format, ids=to_ids, dtype=dtype, progress=progress
        )

    def _definition(self, table: str) -> TableDef:
        return self._connection.require_shards("import_rows").questions.get_table(table)
