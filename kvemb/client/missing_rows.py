"""Asks the shards now and then about rows that pulls did not find: which of them exist by the shards' index, and were deleted in storage?

A pull gives the initializer's row for an id that storage does not have. That is right for a new row and wrong for a deleted one; only the
id's shard can tell. So a few of the rows that a pull did not find go to the shards, once a second at most. A thread of its own does it: no
pull waits for it. A shard compares those that it knows with storage and restores them. The next pull or push of this process then says so.
Where the table was dropped, all its rows are missing: its pulls raise from then on. Thread-safe; in a fork's child, which cannot ask the
shards, nothing happens.
"""

import threading
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.client.ack import copied
from kvemb.client.all_shards import AllShards
from kvemb.errors import KvembError, LostRowError, RowsRestoredWarning, TableDroppedError, n_of
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import COMPARE, CompareRequest, CountReply
from kvemb.protocol.shard_routing import places
from kvemb.schema.table_def import TableDef

PAUSE_S = 1.0
IDS_AT_ONCE = 1024
_TIMEOUT_S = 20.0
_JOIN_S = 1.0

Ids = NDArray[np.uint64]


class MissingRows:
    """The rows that the pulls of one connection did not find."""

    def __init__(self, servers: AllShards, clock: Callable[[], float] = time.monotonic) -> None:
        self._servers, self._clock = servers, clock
        self._lock = threading.Lock()
        self._next_s = clock()
        self._random = np.random.default_rng()
        self._thread: threading.Thread | None = None
        self._restored: dict[str, int] = {}
        self._error: LostRowError | None = None
        self._dropped: dict[str, TableDroppedError] = {}
        self._closed = False
        self.untold = False  # whether `tell` has something to say

    def note(self, missing: Sequence[tuple[TableDef, Ids]]) -> None:
        """Note rows that a pull did not find, by table; ask about some of them, if it is time."""
        for table, _ in missing if self._dropped else ():
            if (dropped := self._dropped.get(table.key)) is not None:
                raise copied(dropped)
        if self._servers.forked:  # before the lock, which another thread may have held
            return
        with self._lock:
            now_s = self._clock()
            if self._closed or now_s < self._next_s or (self._thread is not None and self._thread.is_alive()):
                return
            self._next_s = now_s + PAUSE_S
            each = max(1, IDS_AT_ONCE // len(missing))
            some = [(table, self._sample(ids, each)) for table, ids in missing[:IDS_AT_ONCE]]
            self._thread = threading.Thread(target=self._ask, args=(some,), name="kvemb-missing", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is ending
                self._thread = None

    def tell(self) -> None:
        """Report in the caller's thread the shards' answers, once.

        Warns:
            RowsRestoredWarning: rows had been deleted, and were restored.
        """
        if not self.untold or self._servers.forked:
            return
        with self._lock:
            self.untold = False
            restored, self._restored = self._restored, {}
            error, self._error = self._error, None
        for name, n_rows in restored.items():
            warnings.warn(
                f"table {name!r}: {n_of(n_rows, 'row')} that a pull had not found, and another program had deleted in storage, exist: the "
                "shards have restored them. Until then pulls gave the initializer's rows for them, and gradients may come from these; the "
                "rows themselves lost no push. Find the program that deletes keys; `kvemb repair --all` compares every row now.",
                RowsRestoredWarning,
                stacklevel=4,
            )
        if error is not None:
            raise copied(error)

    def close(self) -> None:
        """Ask nothing more."""
        if self._servers.forked:
            return
        with self._lock:
            self._closed, thread = True, self._thread
        if thread is not None:
            thread.join(_JOIN_S)

    def _sample(self, ids: Ids, n: int) -> Ids:
        return ids if len(ids) <= n else ids[np.unique(self._random.integers(0, len(ids), n))]

    def _ask(self, some: Sequence[tuple[TableDef, Ids]]) -> None:
        try:
            self._servers.look(Deadline.after(_TIMEOUT_S))
        except KvembError:  # closed meanwhile
            return
        for table, ids in some:
            shares = [ids.take(at) for at in places(table.placement.slots(ids), self._servers.cluster_map)]
            requests = {
                shard: CompareRequest(table.name, share.astype("<u8").tobytes(), table.schema)
                for shard, share in enumerate(shares)
                if len(share)
            }
            try:
                replies = self._servers.try_each(COMPARE, requests, Deadline.after(_TIMEOUT_S))
            except KvembError:  # the same
                return
            with self._lock:
                for reply in replies.values():
                    if isinstance(reply, LostRowError):
                        self._error = reply
                    elif isinstance(reply, TableDroppedError):
                        self._dropped[table.key] = reply
                    elif isinstance(reply, CountReply) and reply.n_rows:
                        self._restored[table.name] = self._restored.get(table.name, 0) + reply.n_rows
                self.untold = self._error is not None or bool(self._restored)
