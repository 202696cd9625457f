"""How the shards bring back the rows of a node that has lost them, or may hold old ones.

All state of a repair stands on the damaged node, so that losing its data once more takes the repair with it:

    1. the first shard to notice writes `repairing <nonce>` in the place of the node's marker; every other shard reads the nonce
    2. every shard rewrites its rows there, then reports the nonce
    3. a shard that sees all reports puts a new marker in the place of `repairing <nonce>`, if that still stands there

Until step 3 every batch that touches the node fails, except those below. They name the nonce and check it last on the connection, as normal
batches check the marker. A server process that starts again in the middle of it ends the repair: a nonce is good for one process.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.coordination.markers import Why
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart, WriteResult


@dataclass(frozen=True)
class LostNode:
    """A node that cannot be relied on.

    Args:
        address: "host:port".
        why: "empty": its marker is gone (restarted empty, flushed, evicted). "suspect": another server process than the one that the
            marker was written for (restart from a snapshot, failover). "repairing": a repair has begun.
        nonce: of the repair that has begun.
    """

    address: str
    why: Why
    nonce: str | None = None


class StoreRepair(ABC):
    """The interface of a store for shards that repair a node: its facet `repair`.

    Methods with a nonce raise NodeLostError when it does not stand on the node any more. Then the node has lost its data again, or the
    repair has been finished. Call `begin` then, which says which of the two it was. All of them may be called again after any
    error.
    """

    @abstractmethod
    def lost_nodes(self, deadline: Deadline) -> list[LostNode]:
        """Look at every node's marker and server process. A node that does not answer is not listed: it is not known to be lost.

        Raises:
            WrongNodeError: a node carries the marker of another node or cluster; that is no case for repair.
        """

    def looks_lost(self, deadline: Deadline) -> bool:
        """Whether a quick look gives reason to call `lost_nodes` at once; for stores where that call takes long."""
        return False

    @abstractmethod
    def begin(self, address: str, deadline: Deadline, *, even_if_whole: bool = False) -> str | None:
        """Begin the repair of a node, or join the one that has begun; from now on normal batches fail there.

        Args:
            address: one of `addresses`.
            deadline: of the call.
            even_if_whole: begin although the marker is in order: rows were found missing all the same (evicted).

        Returns:
            The nonce, 16 hex digits; None when the marker is in order and there is nothing to repair.
        """

    @abstractmethod
    def keys_of(self, address: str, keys: RowKeys) -> NDArray[np.bool_]:
        """Return which keys belong to a node: bool [n]."""

    @abstractmethod
    def keys_on(self, address: str, deadline: Deadline) -> Iterator[RowKeys] | None:
        """List the row keys that a node holds, in blocks, one table each; None where that cannot be asked (memcached).

        A snapshot may bring back rows that were erased since; only this list finds them. A key may come more than once. Of a table in
        pages the ids are the numbers of its pages.
        """

    @abstractmethod
    def read(self, address: str, nonce: str, parts: Sequence[ReadPart], deadline: Deadline) -> list[ReadResult]:
        """Read rows of a node in repair; all keys belong to it. See `StoreRows.read`."""

    @abstractmethod
    def write(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[WriteResult]:
        """Write records to a node in repair; all keys belong to it. See `StoreRows.write`."""

    @abstractmethod
    def erase(self, address: str, nonce: str, parts: Sequence[WritePart], deadline: Deadline) -> list[NDArray[np.bool_]]:
        """Delete rows of a node in repair; all keys belong to it. See `StoreRows.erase`."""

    def make_way(self, keys: RowKeys, deadline: Deadline, *, repair: tuple[str, str] | None = None) -> int:
        """Let rows be written under keys of pages where another program has put a value that is no page; stores without pages do nothing.

        A value longer than a page is cut to a page; its rows stay. A value of another type can only be deleted whole, and rows of other
        shards with it, which would look as if they had never existed. So it is deleted in a repair only: every shard brings back its own.

        Args:
            keys: of rows, in a repair all of its node.
            deadline: of the call.
            repair: (address, nonce) of the repair.

        Returns:
            How many values were cut or deleted.
        """
        return 0

    @abstractmethod
    def put_value(self, address: str, nonce: str, name: str, value: bytes, deadline: Deadline) -> None:
        """Write a node's copy of a small value (see `StoreValues.put`), if it is one of those that hold a copy."""

    @abstractmethod
    def report(self, address: str, nonce: str, shard: int, deadline: Deadline) -> None:
        """Say that this shard's rows on the node are in order; puts the shard's owner record back too, if the store was fenced."""

    @abstractmethod
    def finish(self, address: str, nonce: str, shards: Collection[int], deadline: Deadline) -> bool:
        """Renew the marker when all of these shards have reported; return True when the node is in use again, False to be asked again."""
