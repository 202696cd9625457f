"""Rows of a table into a file of another program's format: ids from the shards, weights by pulls, block by block.

For rows with the optimizer's state, and as of one moment, there are checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.connection import Connection
from kvemb.errors import InvalidInputError
from kvemb.foreign.foreign_file import foreign_url
from kvemb.foreign.foreign_rows import block_rows
from kvemb.foreign.formats import format_of
from kvemb.foreign.row_files import check_writable, write_ids, write_rows
from kvemb.schema.table_def import TableDef

ExportProgress = Callable[[str, int, int], None]
"""Called with (name of the phase, rows done, rows in all)."""


@dataclass(frozen=True)
class ExportResult:
    """The end of an export: rows written, and seconds of all of it."""

    n_rows: int
    seconds: float


def export_rows(
    connection: Connection,
    definition: TableDef,
    url: str,
    *,
    file_format: str,
    ids: str | None,
    dtype: str,
    progress: ExportProgress | None,
) -> ExportResult:
    """Export a table; see `TableFiles.export_rows`."""
    begun, show = time.monotonic(), progress or (lambda what, done, total: None)
    url, ids = foreign_url(url), None if ids is None else foreign_url(ids)
    kind = format_of(url, file_format)
    rows_only = kind in ("npy", "raw")
    if ids is not None and not rows_only:
        raise InvalidInputError("ids names a further file, which only npy and raw need: in other formats the ids are beside the rows")
    if rows_only and ids is None and definition.num_ids is None:
        raise InvalidInputError(f"table {definition.name!r} has ids of any number, which {kind} does not hold: give ids, a file for them")
    check_writable(definition, kind, np.empty(0, np.uint64), dtype)
    dense = definition.num_ids if rows_only and ids is None else None
    all_ids = _existing(connection, definition) if dense is None else np.arange(dense, dtype=np.uint64)
    write_rows(
        definition, url, None if rows_only else all_ids, len(all_ids), _pulled(connection, definition, all_ids, show), file_format, dtype
    )
    if ids is not None:
        write_ids(definition, ids, all_ids, kind)
    return ExportResult(len(all_ids), time.monotonic() - begun)


def _existing(connection: Connection, definition: TableDef) -> NDArray[np.uint64]:
    pages = [np.empty(0, np.uint64), *connection.known_ids(definition.name)]
    return np.sort(np.concatenate(pages))


def _pulled(connection: Connection, definition: TableDef, ids: NDArray[np.uint64], show: ExportProgress) -> Iterator[NDArray[Any]]:
    step = block_rows(definition)
    for at in range(0, len(ids), step):
        [(rows, _)] = connection.pull_known([(definition, ids[at : at + step])])
        show("exporting", min(at + step, len(ids)), len(ids))
        yield rows
