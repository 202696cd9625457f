"""Which rows go to which shard, and into how many messages. Pure.

Rows to push and rows that are asked about alike: `kvemb.arrays.hashing.shard_of` says whose they are, and a shard's rows keep their
order. What is larger than one message may be is cut between rows, never inside one.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import shard_of
from kvemb.protocol.messages import MAX_PART_BYTES

_FEW_SHARDS = 4  # up to here a look at all owners for each shard is faster than sorting them


class _RoutedRows(Protocol):
    """Rows of one table that are cut between rows."""

    @property
    def ids(self) -> NDArray[np.uint64]: ...

    @property
    def size_bytes(self) -> int: ...

    def take(self, which: NDArray[np.intp] | slice) -> Self: ...


R = TypeVar("R", bound=_RoutedRows)


def route(rows: R, n_shards: int) -> list[R]:
    """Return each shard's share of the rows of one table; shards without any get an empty one.

    Args:
        rows: n rows.
        n_shards: >= 1.

    Example:
        >>> from kvemb.protocol.message_format import TableRows
        >>> ids = np.arange(4, dtype=np.uint64)
        >>> [part.ids.tolist() for part in route(TableRows("user", 0, ids, np.zeros((4, 1), np.float32)), 3)]
        [[0, 3], [1], [2]]
    """
    return [rows] if n_shards == 1 else [rows.take(at) for at in places(rows.ids, n_shards)]


def places(ids: NDArray[np.uint64], n_shards: int) -> list[NDArray[np.intp]]:
    """Return where each shard's ids stand among these, ascending."""
    owners = shard_of(ids, n_shards)
    if n_shards <= _FEW_SHARDS:
        return [np.flatnonzero(owners == shard) for shard in range(n_shards)]
    order = np.argsort(owners.astype(np.uint16) if n_shards <= 1 << 16 else owners, kind="stable")
    ends = np.cumsum(np.bincount(owners, minlength=n_shards))
    return np.split(order, ends[:-1])


def split(tables: Sequence[R], limit_bytes: int = MAX_PART_BYTES) -> list[list[R]]:
    """Distribute one shard's rows over as few messages as hold at most `limit_bytes` each, in order; at least one message.

    Every table is in the messages that carry rows of it, or in one with none.
    """
    messages: list[list[R]] = [[]]
    room = limit_bytes
    for rows in tables:
        for piece in pieces(rows, limit_bytes):
            if piece.size_bytes > room and messages[-1]:
                messages.append([])
                room = limit_bytes
            messages[-1].append(piece)
            room -= piece.size_bytes
    return messages


def pieces(rows: R, limit_bytes: int = MAX_PART_BYTES) -> Iterator[R]:
    """Cut rows into pieces of at most `limit_bytes` (or one row); rows that are empty are one piece."""
    n_rows = len(rows.ids)
    step = max(1, limit_bytes * n_rows // max(1, rows.size_bytes))
    for start in range(0, max(1, n_rows), step):
        yield rows if step >= n_rows else rows.take(slice(start, start + step))
