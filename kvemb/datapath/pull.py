"""Pull: from ids of any shape to their weights, with one storage read for all tables.

ids -> unique ids -> one batch (kvemb.datapath.multi_table_read), or several where that is too much -> weights, rows that do not exist
computed by the table's initializer -> one gather into the caller's array. No loop over rows. A pull writes nothing. Thread- and fork-safe.

A pull that is too large for one exchange is read piece by piece: memory for requests and replies is that of one piece. Each piece may have
a deadline of its own, which says how long a node may be away, not how long a read of ten million rows takes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvemb.arrays.ids import Unique, as_items, normalize, unique
from kvemb.datapath.multi_table_read import Missing, TableShare, ThreadArena, WantedRows, read_tables
from kvemb.errors import DeadlineExceededError, InvalidInputError
from kvemb.net.deadline import Deadline
from kvemb.process.cached_property import batch_value
from kvemb.schema.table_def import TableDef
from kvemb.stores.store import Store

PIECE_BYTES = 32 << 20
"""Of one piece, about: at the default timeout a node has to send 6.4 MB/s."""
_WHOLE_PIECES = 4  # so many pieces' bytes, a million rows or so, are read at once: it saves a copy, and the pauses between pieces
_ROW_BYTES = 64  # of a row beside the part of its record that is read: its request, and the frame of its reply
_memory = ThreadArena()


@batch_value
class PullRequest:
    """A validated pull of one table, of m ids in an array of this shape, n of them unique; make it with `prepare_pull`."""

    definition: TableDef
    wanted: Unique
    shape: tuple[int, ...]
    out: NDArray[Any] | None


@batch_value
class Pulled:
    """The rows of one table that a pull returns, with their versions if those were asked for."""

    rows: NDArray[Any]  # [*shape, dim] of the table's `row_dtype`
    versions: NDArray[np.uint64]  # uint64 [*shape], 0 where the row does not exist; [0] unless they were asked for


def prepare_pull(definition: TableDef, ids: ArrayLike, out: NDArray[Any] | None = None, *, minus_one: bool = False) -> PullRequest:
    """Check the arguments of a pull; no I/O. `out` is [*ids.shape, dim] of the table's `row_dtype`, of any strides."""
    flat, shape = normalize(ids, definition.id_dtype, definition.name, definition.num_ids, minus_one=minus_one)
    if out is not None:
        _check_out(definition, out, (*shape, definition.dim))
    return PullRequest(definition, unique(flat), shape, out)


def pull(
    store: Store,
    requests: Sequence[PullRequest],
    deadline: Deadline,
    *,
    versions: bool = False,
    renewed: bool = False,
    missing: Missing | None = None,
) -> list[Pulled]:
    """Read several tables in one round trip per node, or one per piece where that is too much; none where no id is asked for."""
    wanted = [WantedRows(request.definition, request.wanted.ids) for request in requests if len(request.wanted.ids)]
    n_bytes = sum([len(one.ids) * (one.definition.record.prefix_bytes + _ROW_BYTES) for one in wanted])
    if not wanted:
        shares = []
    elif n_bytes <= _WHOLE_PIECES * PIECE_BYTES:
        _memory.reset(n_bytes)
        shares = read_tables(store, wanted, deadline, _memory, versions=versions, missing=missing)
    else:
        shares = _read_piecewise(store, wanted, deadline, renewed, versions=versions, missing=missing)
    each = iter(shares)
    return [_gather(request, next(each) if len(request.wanted.ids) else None, versions) for request in requests]


def _read_piecewise(
    store: Store, wanted: Sequence[WantedRows], deadline: Deadline, renewed: bool, *, versions: bool, missing: Missing | None
) -> list[TableShare]:
    """Read rows of several tables, in one round trip per node and piece."""
    into = [np.empty((len(one.ids), one.definition.dim), one.definition.row_dtype) for one in wanted]  # of each table its weights [n, dim]
    found = [np.empty(len(one.ids) if versions else 0, np.uint64) for one in wanted]  # and its versions [n], or [0]
    n_read = 0
    for piece in _pieces(wanted):
        _memory.reset(PIECE_BYTES)
        asked = [WantedRows(wanted[table].definition, wanted[table].ids[rows]) for table, rows in piece]
        until = Deadline.after(deadline.timeout_s, deadline.silent_s) if renewed else deadline
        try:
            shares = read_tables(store, asked, until, _memory, versions=versions, missing=missing)
        except DeadlineExceededError as error:
            n_rows = sum(len(one.ids) for one in wanted)
            allows = f"each piece of about {PIECE_BYTES >> 20} MB" if renewed else "all of it"
            raise DeadlineExceededError(
                f"{error}; {n_read} of the {n_rows} rows of this pull had been read. The time is that of {allows}."
            ) from error
        for (table, rows), share in zip(piece, shares, strict=True):
            share.rows(None, as_items(into[table])[rows])
            if versions:
                found[table][rows] = share.versions(None)
            n_read += rows.stop - rows.start
    return [TableShare(as_items(rows), seen, None, ours=True) for rows, seen in zip(into, found, strict=True)]


def _pieces(wanted: Sequence[WantedRows]) -> Iterator[list[tuple[int, slice]]]:
    """Yield the rows of each piece: (number of the table, which of its rows)."""
    piece: list[tuple[int, slice]] = []
    room = PIECE_BYTES
    for table, one in enumerate(wanted):
        start, size = 0, one.definition.record.prefix_bytes + _ROW_BYTES
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


def _gather(request: PullRequest, share: TableShare | None, with_versions: bool) -> Pulled:
    if share is None:
        empty = np.empty((*request.shape, request.definition.dim), request.definition.row_dtype) if request.out is None else request.out
        return Pulled(empty, np.zeros(request.shape if with_versions else 0, np.uint64))
    versions = share.versions(request.wanted.inverse).reshape(request.shape) if with_versions else share.found_versions
    return Pulled(_deliver(request, share), versions)


def _deliver(request: PullRequest, share: TableShare) -> NDArray[Any]:
    """Put each id's row at the id's place in the request: in the caller's array, or a new one."""
    # inverse intp [m]: which of the n unique ids each id is; None where they are the same, in order
    inverse, out, dim, dtype = request.wanted.inverse, request.out, request.definition.dim, request.definition.row_dtype
    if out is None:
        return share.rows(inverse).view(dtype).reshape(*request.shape, dim)
    if out.flags.c_contiguous:
        share.rows(inverse, as_items(out.reshape(-1, dim)))
    else:
        out[...] = share.rows(inverse).view(dtype).reshape(out.shape)
    return out


def _check_out(definition: TableDef, out: NDArray[Any], shape: tuple[int, ...]) -> None:
    good = isinstance(out, np.ndarray) and out.dtype == definition.row_dtype and out.shape == shape and out.flags.writeable
    if not good:
        got = f"{out.dtype} {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        expected = f"a writable {definition.row_dtype} array of shape {shape}"
        raise InvalidInputError(f"table {definition.name!r}: out is {got}, expected {expected}")
