"""Reads of any size: what is too much for one exchange is read piece by piece.

Memory for requests and replies is that of one piece. Each piece may have a deadline of its own. Who chooses `storage.timeout_s` knows how
long a node may be silent, but not how long a read of ten million rows takes. What is not large is read at once, and handed on as it
arrived. What must not live here: how a piece is read (`kvemb.datapath.multi_table_read`). Stateless: thread- and fork-safe.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvemb.datapath.multi_table_read import Missing, TableShare, WantedRows, items, read_tables
from kvemb.datapath.thread_arena import ThreadArena
from kvemb.errors import DeadlineExceededError
from kvemb.net.deadline import Deadline
from kvemb.stores.store import Store

PIECE_BYTES = 32 << 20
"""Of one piece, about: at the default timeout a node has to send 6.4 MB/s."""
_WHOLE_PIECES = 4  # so many pieces' bytes, a million rows or so, are read at once: it saves a copy, and the pauses between pieces
_ROW_BYTES = 64  # of a row beside what is read of its record: its request, and what frames its reply


@dataclass(frozen=True)
class ReadTimeout:
    """How long a read of any size may take, as a whole or for each piece.

    Args:
        deadline: of all of it; or, with `renewed`, of its first piece.
        renewed: whether every piece has as long as the first one.
    """

    deadline: Deadline
    renewed: bool = False

    def next(self) -> Deadline:
        """The deadline of the piece that begins now."""
        return Deadline.after(self.deadline.timeout_s) if self.renewed else self.deadline


def read_piecewise(
    store: Store,
    wanted: Sequence[WantedRows],
    timeout: ReadTimeout,
    memory: ThreadArena,
    *,
    versions: bool = False,
    missing: Missing | None = None,
) -> list[TableShare]:
    """Read rows of several tables, in one round trip per node and piece; arguments as `kvemb.datapath.multi_table_read.read_tables`.

    Raises:
        StorageError: see `kvemb.errors`; no share is returned then.
    """
    if sum(len(one.ids) * _row_bytes(one) for one in wanted) <= _WHOLE_PIECES * PIECE_BYTES:
        return read_tables(store, wanted, timeout.deadline, memory, versions=versions, missing=missing)
    into = [np.empty((len(one.ids), one.definition.dim), np.float32) for one in wanted]
    found = [np.empty(len(one.ids) if versions else 0, np.uint64) for one in wanted]
    buffer, n_read = ThreadArena(), 0  # not the caller's: it may have taken some for another purpose
    for piece in _pieces(wanted):
        buffer.reset(PIECE_BYTES)
        asked = [WantedRows(wanted[table].definition, wanted[table].ids[rows]) for table, rows in piece]
        try:
            shares = read_tables(store, asked, timeout.next(), buffer, versions=versions, missing=missing)
        except DeadlineExceededError as error:
            raise _late(error, wanted, n_read, timeout) from error
        for (table, rows), share in zip(piece, shares, strict=True):
            share.rows(None, items(into[table])[rows])
            if versions:
                found[table][rows] = share.versions(None)
            n_read += rows.stop - rows.start
    return [TableShare(items(rows), seen, None, ours=True) for rows, seen in zip(into, found, strict=True)]


def _row_bytes(wanted: WantedRows) -> int:
    return wanted.definition.record.prefix_bytes + _ROW_BYTES


def _pieces(wanted: Sequence[WantedRows]) -> Iterator[list[tuple[int, slice]]]:
    """Yield the rows of each piece: (number of the table, which of its rows)."""
    piece: list[tuple[int, slice]] = []
    room = PIECE_BYTES
    for table, one in enumerate(wanted):
        start, size = 0, _row_bytes(one)
        while start < len(one.ids):
            n_rows = min(len(one.ids) - start, max(room // size, 0 if piece else 1))
            if n_rows:
                piece.append((table, slice(start, start + n_rows)))
                start, room = start + n_rows, max(0, room - n_rows * size)
            if start < len(one.ids):
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece


def _late(error: DeadlineExceededError, wanted: Sequence[WantedRows], n_read: int, timeout: ReadTimeout) -> DeadlineExceededError:
    n_rows = sum(len(one.ids) for one in wanted)
    allows = f"each piece of about {PIECE_BYTES >> 20} MB" if timeout.renewed else "all of it"
    return DeadlineExceededError(f"{error}; {n_read} of the {n_rows} rows of this pull had been read. The time is that of {allows}.")
