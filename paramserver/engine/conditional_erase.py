"""Erases rows that are still what was read a moment ago: on storage with compare-and-swap a late erase cannot delete a newer row then.

Which rows may be erased at all is for the caller to say.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import FencedError
from kvemb.net.deadline import Deadline
from kvemb.schema.record import HEADER_SIZE, split_version
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart

Ids = NDArray[np.uint64]
Versions = NDArray[np.uint64]
May = Callable[[Ids, Versions, NDArray[np.bool_]], NDArray[np.bool_]]
Read = Callable[[Sequence[ReadPart], Deadline], list[ReadResult]]
Erase = Callable[[Sequence[WritePart], Deadline], list[NDArray[np.bool_]]]


def erase_as_read(
    definition: TableDef,
    ids: Ids,
    deadline: Deadline,
    *,
    read: Read,
    erase: Erase,
    pages: bool,
    may: May | None = None,
) -> Ids:
    """Look at rows once, and erase those that are there.

    Args:
        definition: the table.
        ids: uint64 [n], distinct.
        deadline: of both calls.
        read, erase: `Store.read` and `Store.erase`, or the ones for repair.
        pages: `Capabilities.pages` of the store. A row that does not exist is never erased, which would make its page.
        may: which rows are to go, by ids, versions (without meaning where not found) and found; without it all that is there, also what
            another program wrote.

    Returns:
        uint64 [m], the rows that changed in between and are still there: to be looked at again.

    Raises:
        RecordError: `may` is to judge a value that another program wrote; nothing was erased.
        StorageError: rows may have been erased, some possibly later, but none that has been written anew (on storage with tokens).
    """
    record = definition.record
    part = ReadPart(definition.keys(ids, pages=pages), record.size_bytes, HEADER_SIZE, tokens=True, foreign=may is None)
    rows = read([part], deadline)[0].in_key_order()
    here = rows.found if rows.foreign is None else rows.found | rows.foreign
    if may is not None:
        record.check(rows.records, ids, rows.found)  # or its version would be taken for a row's
        here = may(ids, definition.record.versions(rows.records), rows.found)
    ids = ids[here]
    if not len(ids):
        return ids
    tokens = None if rows.tokens is None else rows.tokens[here]
    gone = erase([WritePart(definition.keys(ids, pages=pages), np.empty((0, 0), np.uint8), tokens)], deadline)[0]
    return ids[~gone]


def not_newer(
    definition: TableDef, ids: Ids, stored: Versions, found: NDArray[np.bool_], *, version: int, newest: int, epoch: int
) -> NDArray[np.bool_]:
    """Return which rows an erase of this version may take away: those created again behind it have a version above its own.

    Args:
        definition: the table.
        ids: uint64 [n].
        stored: uint64 [n], versions in storage; without meaning where `found` is False.
        found: bool [n].
        version: the erase's own.
        newest: in a replay that of the last batch in the journal; otherwise the erase's own.
        epoch: of this process.

    Returns:
        bool [n].

    Raises:
        FencedError: a row was written in a later epoch: this shard has another owner now.
    """
    later = found & (stored > np.uint64(newest)) & (stored >> np.uint64(48) > np.uint64(epoch))
    if later.any():
        at = int(np.argmax(later))
        row = f"table {definition.name!r}, id {definition.shown_id(int(ids[at]))}: version {split_version(int(stored[at]))}"
        raise FencedError(f"{row} in storage is of a later epoch than ours ({epoch}): another process owns this shard now")
    may: NDArray[np.bool_] = found & (stored < np.uint64(version))
    return may
