"""The trainer's cache of rows: weights that came back with the acks of its own pushes, so that pulls need not ask storage again.

What a pull may take from here, stated once:

* An entry is what the row was after batch k of its shard, the batch that applied this trainer's push of it. It holds every push of
  this trainer that was reported as applied, and everything else that the shard applied up to k.
* Every reply of a shard says how many of its batches changed rows for anybody else (other trainers' pushes, assigns, erases). An entry is
  used while at most `max_staleness` of those are known to have followed its own batch. The shard must also have been heard from in the last
  5 seconds. What happened since that reply is not known here. So one trainer on its own finds exactly what storage holds, apart from its
  own pushes that are still on their way. A pull from storage would not see those either.
* `invalidate` empties it: after this client's flush, assign or erase, when a shard begins another epoch (a restart, a Load), when a shard's
  connection is lost. What was pushed before that is not kept when it comes back later.
* Rows from here skip the check of the nodes' markers: a lost node is noticed by the next pull of a row that is not here.

Reads do not come back in order: a row read from storage may be newer than what the next pull finds here, within the same bound. Where
shards write behind, an entry may be newer than storage: storage's rows never replace entries, but once an entry is dropped the next pull
may find its row older than before, within the shards' bound. What must not live here: which ids a pull asks for (kvemb.datapath.pull),
messages' way (kvemb.client). Thread-safe; empty in a forked child.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.rounding import storage_dtype, to_float32
from kvemb.errors import InvalidInputError, MessageError
from kvemb.index.record_cache import CacheBudget, RecordCache
from kvemb.protocol.message_format import TableRows
from kvemb.protocol.messages import PushReply
from kvemb.schema.record import MAX_EPOCH, MAX_K, make_version
from kvemb.schema.table_def import TableDef

Ids = NDArray[np.uint64]
DEFAULT_MB = 64
MAX_STALENESS = 1 << 16
HEARD_WITHIN_S = 5.0
_SHARD_SHIFT = 48  # an entry's token: its shard above, k below; k of one shard orders entries
_NEVER = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


@dataclass(frozen=True)
class RowCacheStats:
    """What became of the ids that pulls looked up (unique ids of each call), and the memory in use."""

    n_lookups: int
    n_hits: int
    used_bytes: int


@dataclass(frozen=True, eq=False)
class ExpectedRows:
    """What one part of a push will bring back: the ids of each of its tables, and the time of the cache when it was sent."""

    shard: int
    ids: tuple[tuple[str, Ids], ...]
    generation: int


@dataclass(frozen=True, eq=False)
class CacheHits:
    """What a look-up found: which rows were filled in (bool [n]), and their versions (uint64 [n], 0 elsewhere)."""

    rows: NDArray[np.bool_]
    versions: Ids


@dataclass
class _ShardProgress:
    """What a shard's replies have told: its epoch, when it was last heard, and at which k each count of others' batches began."""

    epoch: int = 0
    heard_s: float = float("-inf")
    counts: deque[tuple[int, int]] = field(default_factory=deque)  # (others, first k with it), both ascending


def check_options(max_staleness: int, row_cache_mb: int | None) -> int:
    """Check `kvemb.connect`'s options; return the cache's size in bytes, 0 for no cache.

    Raises:
        InvalidInputError: out of range, or a size for a cache that is never used.

    Example:
        >>> check_options(0, None), check_options(2, None), check_options(2, 1)
        (0, 67108864, 1048576)
    """
    if isinstance(max_staleness, bool) or not isinstance(max_staleness, int) or not 0 <= max_staleness <= MAX_STALENESS:
        raise InvalidInputError(f"max_staleness is {max_staleness!r}; give batches, 0 (every pull reads storage) to {MAX_STALENESS}")
    if row_cache_mb is None:
        row_cache_mb = DEFAULT_MB if max_staleness else 0
    elif isinstance(row_cache_mb, bool) or not isinstance(row_cache_mb, int) or row_cache_mb < 1:
        raise InvalidInputError(f"row_cache_mb is {row_cache_mb!r}; give a whole number of at least 1")
    elif not max_staleness:
        raise InvalidInputError("row_cache_mb has no effect without max_staleness: give the number of batches that a row may lag behind")
    return row_cache_mb << 20


class RowCache:
    """Rows of all tables of one connection; see the module for what its entries mean.

    Args:
        limit_bytes: of all entries, their index included; every table may keep 1024 rows in any case.
        max_staleness: batches of others that an entry may lag behind, >= 1.
        clock_s: a monotonic clock.
    """

    def __init__(self, limit_bytes: int, max_staleness: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._limit_bytes, self._max_staleness, self._clock_s = limit_bytes, max_staleness, clock_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._shards: list[_ShardProgress] = []  # by number, as far as pushes have gone to them
        self._row_bytes: dict[str, int] = {}
        self._budget = CacheBudget(limit_bytes)
        self._tables: dict[str, RecordCache] = {}
        self._generation = 0
        self._n_lookups = self._n_hits = 0

    @property
    def stats(self) -> RowCacheStats:
        """Figures since the connection was opened; all 0 in a forked child."""
        if self._forked:
            return RowCacheStats(0, 0, 0)
        with self._lock:
            return RowCacheStats(self._n_lookups, self._n_hits, self._budget.used_bytes)

    def add_table(self, definition: TableDef) -> None:
        """Keep rows of this table from now on. Adding it again changes nothing."""
        if self._forked:
            return
        with self._lock:
            self._row_bytes.setdefault(definition.name, definition.dim * storage_dtype(definition.dtype).itemsize)
            if definition.name not in self._tables:
                self._tables[definition.name] = self._new_table(definition.name)

    def forget_table(self, name: str) -> None:
        """Keep no rows of a table that was dropped; one of the same name may be added."""
        with self._lock:
            self._drop_all()
            self._tables.pop(name, None)
            self._row_bytes.pop(name, None)

    def want(self, shard: int, tables: Sequence[TableRows]) -> ExpectedRows:
        """Note what a part that is about to be sent will bring back; the ids are copied."""
        with self._lock:
            self._shards += [_ShardProgress() for _ in range(len(self._shards), shard + 1)]
            return ExpectedRows(shard, tuple((rows.table, rows.ids.copy()) for rows in tables), self._generation)

    def applied(self, wanted: ExpectedRows, reply: PushReply) -> None:
        """Take over what an applied part brought back. Replies of one shard must come in the order in which it applied the parts.

        Raises:
            MessageError: the rows do not fit the ids, or a number is out of range; nothing was kept.
        """
        if not (0 <= reply.k <= MAX_K and 0 <= reply.epoch <= MAX_EPOCH and reply.others >= 0):
            raise MessageError(f"reply to part {reply.sequence}: batch {reply.k} of epoch {reply.epoch}, {reply.others} of others")
        with self._lock:
            records = self._records(wanted, reply)
            heard = reply.k > 0 and self._hear(self._shards[wanted.shard], reply)
            if wanted.generation != self._generation:
                return  # emptied since: later parts may have brought newer rows already
            token = np.uint64(wanted.shard << _SHARD_SHIFT | reply.k)
            for (name, ids), rows in zip(wanted.ids, records, strict=True):
                table = self._tables.get(name)
                if table is None or not len(ids):
                    continue
                if heard and rows is not None:
                    table.put(ids, rows, np.broadcast_to(token, len(ids)))
                else:
                    table.forget(ids)  # they changed, and how is not known here

    def fill(self, definition: TableDef, ids: Ids, out: NDArray[np.float32]) -> CacheHits | None:
        """Look up n unique ids; fill in the rows that may be used.

        Args:
            definition: of their table.
            ids: uint64 [n].
            out: float32 [n, dim], contiguous; rows that are not kept hold anything afterwards.

        Returns:
            What was filled in; None when nothing was.
        """
        if self._forked:
            return None
        with self._lock:
            self._n_lookups += len(ids)
            table = self._tables.get(definition.name)
            if table is None or not len(ids) or not self._shards:
                return None
            at = table.find(ids)
            tokens = table.tokens.take(at, mode="clip")
            shards = (tokens >> np.uint64(_SHARD_SHIFT)).astype(np.intp)
            usable = (at >= 0) & (tokens >= self._oldest()[shards])
            n_hits = int(np.count_nonzero(usable))
            if not n_hits:
                return None
            self._n_hits += n_hits
            _copy_out(table.records, definition, at, out)
            epochs = np.array([make_version(shard.epoch, 0) for shard in self._shards], np.uint64)
        versions = np.where(usable, epochs[shards] | (tokens & np.uint64(MAX_K)), np.uint64(0))
        return CacheHits(usable, versions)

    def invalidate(self) -> None:
        """Drop every entry, and what parts that are on their way would bring back."""
        if not self._forked:
            with self._lock:
                self._drop_all()

    @property
    def _forked(self) -> bool:
        """Whether this is a child of the process that hears the shards; it must not even wait for the lock."""
        return os.getpid() != self._pid

    # --- inside the lock

    def _records(self, wanted: ExpectedRows, reply: PushReply) -> list[NDArray[np.uint8] | None]:
        """The rows of each table as bytes [n, row bytes]; None for tables that are not kept, or all of them without rows."""
        if not reply.rows:
            return [None] * len(wanted.ids)
        if len(reply.rows) != len(wanted.ids):
            raise MessageError(f"part {reply.sequence}: rows of {len(reply.rows)} tables came back, {len(wanted.ids)} were pushed")
        found: list[NDArray[np.uint8] | None] = []
        for (name, ids), data in zip(wanted.ids, reply.rows, strict=True):
            row_bytes = self._row_bytes.get(name)
            if row_bytes is not None and len(data) != len(ids) * row_bytes:
                raise MessageError(f"table {name!r}: {len(ids)} rows of {row_bytes} bytes were pushed, {len(data)} bytes came back")
            found.append(None if row_bytes is None else np.frombuffer(data, np.uint8).reshape(len(ids), row_bytes))
        return found

    def _hear(self, shard: _ShardProgress, reply: PushReply) -> bool:
        """Note what a reply says about its shard; return whether its rows are of the epoch in force."""
        if reply.epoch < shard.epoch:
            return False  # an answer from before a restart
        if reply.epoch > shard.epoch:
            if shard.epoch:
                self._drop_all()
            shard.epoch, shard.counts = reply.epoch, deque()
        shard.heard_s = self._clock_s()
        counts = shard.counts
        if not counts or reply.others > counts[-1][0]:
            counts.append((reply.others, reply.k))
        while counts[0][0] < counts[-1][0] - self._max_staleness:
            counts.popleft()
        return True

    def _oldest(self) -> Ids:
        """The smallest token of each shard that may still be used."""
        since_s = self._clock_s() - HEARD_WITHIN_S
        return np.array(
            [
                i << _SHARD_SHIFT | shard.counts[0][1] if shard.counts and shard.heard_s >= since_s else _NEVER
                for i, shard in enumerate(self._shards)
            ],
            np.uint64,
        )

    def _drop_all(self) -> None:
        self._generation += 1
        self._budget = CacheBudget(self._limit_bytes)
        self._tables = {name: self._new_table(name) for name in self._tables}

    def _new_table(self, name: str) -> RecordCache:
        return RecordCache(self._row_bytes[name], self._budget)


def _copy_out(records: NDArray[np.uint8], definition: TableDef, at: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """Copy rows of the cache to `out`, in one pass where they are kept as float32; places below 0 give any row."""
    if definition.dtype == "float32":  # whole rows as items, which are copied at once
        whole = f"V{records.shape[1]}"
        np.take(records.view(whole)[:, 0], at, out=out.view(whole)[:, 0], mode="clip")
    else:
        stored = records.view(storage_dtype(definition.dtype))
        out[...] = to_float32(stored.take(at, axis=0, mode="clip"), definition.dtype)
