"""Which rows go to which shard, and into how many messages. Pure.

Rows are routed by `kvemb.arrays.hashing.shard_of`; a shard's rows keep their order. What is larger than one part may be is cut
between rows, never inside one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import shard_of
from kvemb.protocol.message_format import TableRows
from kvemb.protocol.messages import MAX_PART_BYTES

_FEW_SHARDS = 4  # up to here a look at all owners for each shard is faster than sorting them


def route(rows: TableRows, n_shards: int) -> list[TableRows]:
    """Return each shard's share of the rows of one table; shards without any get an empty one.

    Args:
        rows: n rows.
        n_shards: >= 1.

    Example:
        >>> ids = np.arange(4, dtype=np.uint64)
        >>> [part.ids.tolist() for part in route(TableRows("user", 0, ids, np.zeros((4, 1), np.float32)), 3)]
        [[0, 3], [1], [2]]
    """
    if n_shards == 1:
        return [rows]
    owners = shard_of(rows.ids, n_shards)
    if n_shards <= _FEW_SHARDS:
        return [_take(rows, np.flatnonzero(owners == shard)) for shard in range(n_shards)]
    order = np.argsort(owners.astype(np.uint16) if n_shards <= 1 << 16 else owners, kind="stable")
    ends = np.cumsum(np.bincount(owners, minlength=n_shards))
    return [_take(rows, at) for at in np.split(order, ends[:-1])]


def split(tables: Sequence[TableRows], limit_bytes: int = MAX_PART_BYTES) -> list[list[TableRows]]:
    """Distribute one shard's rows over as few messages as hold at most `limit_bytes` of arrays each, in order; at least one message.

    Every table is in the messages that carry rows of it, or in one with none.
    """
    messages: list[list[TableRows]] = [[]]
    room = limit_bytes
    for rows in tables:
        for piece in pieces(rows, limit_bytes):
            if piece.size_bytes > room and messages[-1]:
                messages.append([])
                room = limit_bytes
            messages[-1].append(piece)
            room -= piece.size_bytes
    return messages


def pieces(rows: TableRows, limit_bytes: int = MAX_PART_BYTES) -> Iterator[TableRows]:
    """Cut rows into pieces of at most `limit_bytes` (or one row); rows that are empty are one piece."""
    n_rows = len(rows.ids)
    step = max(1, limit_bytes * n_rows // max(1, rows.size_bytes))
    for start in range(0, max(1, n_rows), step):
        yield rows if step >= n_rows else _between(rows, slice(start, start + step))


def _take(rows: TableRows, at: NDArray[np.intp]) -> TableRows:
    """Copy some rows; `take`, since brackets gather rows of [n, dim] at a half to a quarter of its speed."""
    versions = rows.versions.take(at) if len(rows.versions) else rows.versions
    return replace(rows, ids=rows.ids.take(at), rows=rows.rows.take(at, axis=0), versions=versions)


def _between(rows: TableRows, at: slice) -> TableRows:
    """The same for neighbours, without a copy."""
    versions = rows.versions[at] if len(rows.versions) else rows.versions
    return replace(rows, ids=rows.ids[at], rows=rows.rows[at], versions=versions)
