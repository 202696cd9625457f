"""Which rows go to which shard, and into how many messages. Pure.

Rows to push and rows that are asked about alike: the cluster map says whose they are, and a shard's rows keep their order. What is larger
than one message may be is cut between rows, never inside one.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvemb.protocol.messages import MAX_PART_BYTES
from kvemb.schema.cluster_map import ClusterMap

_FEW_SHARDS = 4  # up to here a look at all owners for each shard is faster than sorting them


class _RoutedRows(Protocol):
    """Rows of one table that are cut between rows."""

    @property
    def ids(self) -> NDArray[np.uint64]: ...

    @property
    def size_bytes(self) -> int: ...

    def slots(self) -> NDArray[np.int64]: ...

    def take(self, which: NDArray[np.intp] | slice) -> Self: ...


R = TypeVar("R", bound=_RoutedRows)


class MapSource(Protocol):
    """A source of the cluster map: the nodes of a store. It is read again for every push."""

    @property
    def cluster_map(self) -> ClusterMap:
        """The map in force."""


def route(rows: R, cluster_map: ClusterMap) -> list[R]:
    """Return each shard's share of the rows of one table; shards without any get an empty one."""
    return [rows] if cluster_map.n_shards == 1 else [rows.take(at) for at in places(rows.slots(), cluster_map)]


def places(slots: NDArray[np.int64], cluster_map: ClusterMap) -> list[NDArray[np.intp]]:
    """Return where each shard's rows stand among rows of these slots, ascending."""
    owners, n_shards = cluster_map.shards_of(slots), cluster_map.n_shards
    if n_shards <= _FEW_SHARDS:
        return [np.flatnonzero(owners == shard) for shard in range(n_shards)]
    order = np.argsort(owners, kind="stable")
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
