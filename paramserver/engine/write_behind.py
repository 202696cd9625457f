"""Write-behind: rows that batch after batch changes are written to storage now and then, instead of by every batch.

A row that the shard's cache holds already (a hot one) is changed there only. It is dirty from then on: newer in the cache than in storage,
and pinned, since the cache has its only copy. All dirty rows are written together when the oldest of them is so many batches or
milliseconds old, and before anything that takes storage for the truth: an assign or erase, a saved image of the shard, a flush, the end.

Nothing that was acknowledged hangs on it. Every batch stands in the journal, and the image that a restart begins with is of a moment
without dirty rows. So what a replay finds in storage is a row as of some batch between the image and the crash, as after any other crash.

What must not live here: which rows a batch changes, and how (`paramserver.engine.engine`). Apply thread only, but for `ask`, `owes`,
`stored_k` and the counts.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.errors import StorageError
from kvemb.index.record_cache import RecordCache
from kvemb.stores.row_io import WritePart, WriteResult
from kvemb.stores.store import Store

from ..model.prepared_rows import PreparedRows
from ..model.tables import Tables, TableState
from ..model.transition import refuse_later_epoch
from .arena import RecordArena
from .repair_port import Pause, RepairPort
from .row_access import RowAccess
from .storage_retry import CHANGED_BY_ANOTHER_WRITER, MAX_CONFLICT_ROUNDS, until_stored

Ids = NDArray[np.uint64]
_WRITE_BYTES = 64 << 20  # of one write, at most
log = logging.getLogger("paramserver")


@dataclass(frozen=True)
class Bound:
    """How far storage may lag behind: whichever is reached first.

    Args:
        batches: that may be applied and not written, >= 1.
        age_s: since the oldest change that is not written.
    """

    batches: int
    age_s: float


@dataclass(frozen=True, eq=False)
class _UnwrittenRecords:
    """Hot rows of the batch under way, and which of their places it pinned itself."""

    cache: RecordCache
    prepared: PreparedRows
    pinned: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Dirty:
    """Some dirty rows of one table: places in its cache, ids, and what to write."""

    state: TableState
    at: NDArray[np.int64]
    ids: Ids
    part: WritePart


class WriteBehind:
    """Rows of one shard that were applied and not written yet (dirty rows), and when they will be.

    Args:
        store: open.
        tables: whose caches hold the rows.
        bound: of their age.
        epoch: of this process's versions.
        timeout_s: deadline of one storage call.
        repair: brings back nodes that have lost rows.
        wake: makes the apply thread look whether there is something to write.
        clock_s: monotonic.
    """

    def __init__(
        self,
        store: Store,
        tables: Tables,
        bound: Bound,
        *,
        epoch: int,
        timeout_s: float,
        repair: RepairPort,
        wake: Callable[[], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._tables, self._bound = store, tables, bound
        self.epoch, self._repair, self._wake, self._clock_s = epoch, repair, wake, clock_s
        self._arena, self._access = RecordArena(), RowAccess(store, timeout_s)
        self._unwritten: list[_UnwrittenRecords] = []
        self._oldest_k, self._oldest_s = 0, 0.0  # of the first change that is not written; 0 for none
        self._asked = False
        self.newest_k = 0

    def rise(self, epoch: int) -> None:
        """Go on in a higher epoch. Apply thread only."""
        self.epoch = epoch

    # --- a batch changes rows --------------------------------------------------------------------------------------------------

    @contextmanager
    def batch(self, k: int) -> Iterator[None]:
        """Surround the tries to store batch k: the rows held back change in the cache when all others are stored, and only then."""
        try:
            yield
            self._keep(k)
        except BaseException:
            for one in self._unwritten:
                one.cache.unpin(one.pinned)
            raise
        finally:
            self._unwritten = []

    def hold(self, prepared: PreparedRows) -> PreparedRows:
        """Hold back the rows that the cache has; return the others, which are to be written now."""
        hot = prepared.at >= 0
        if not hot.any():
            return prepared
        cache = self._tables.state(prepared.rows.definition).cache
        mine = prepared if hot.all() else prepared.take(hot)
        self._unwritten.append(_UnwrittenRecords(cache, mine, cache.pin(mine.at)))
        return prepared.take(~hot)

    def _keep(self, k: int) -> None:
        for one in self._unwritten:
            one.cache.put(one.prepared.rows.ids, one.prepared.part.records, None, one.prepared.at)
        if not self._unwritten:
            return
        self.newest_k = k
        if not self._oldest_k:
            self._oldest_k, self._oldest_s = k, self._clock_s()

    # --- how much there is to write, and when ----------------------------------------------------------------------------------

    @property
    def n_rows(self) -> int:
        """Dirty rows."""
        return sum(state.cache.n_pinned for state in self._tables.all())

    def owes(self, k: int) -> bool:
        """Whether a row changed by batch k or an earlier one is not written. Any thread."""
        return 0 < self._oldest_k <= k

    def stored_k(self, k: int) -> int:
        """Return the last batch up to which every row is written, when k or a later one is the last applied. Any thread."""
        oldest_k = self._oldest_k  # read after k was: while it is 0, nothing at all is owed, of k or any batch before
        return min(k, oldest_k - 1) if oldest_k else k

    def ask(self) -> None:
        """Have all dirty rows written soon. Any thread; returns at once."""
        self._asked = True
        self._wake()

    def due(self, k: int) -> bool:
        """Whether dirty rows are to be written now, when k is the last batch applied."""
        return self._oldest_k > 0 and (k - self._oldest_k >= self._bound.batches or self.due_in_s() == 0)

    def due_in_s(self) -> float | None:
        """Return how long dirty rows may stay as they are if no batch comes; None without any."""
        if not self._oldest_k:
            return None
        return 0.0 if self._asked else max(0.0, self._oldest_s + self._bound.age_s - self._clock_s())

    # --- writing ---------------------------------------------------------------------------------------------------------------

    def write(self, pause: Pause) -> None:
        """Write every dirty row; between batches.

        Args:
            pause: between tries; rows stay dirty until they are known to be stored.

        Raises:
            FencedError: another process owns the shard by now.
            StorageError: not retryable, or `pause` raised; what is not written is still dirty.
        """
        n_conflicts = 0
        while self.n_rows:
            conflict = until_stored(self._write_some, pause, self._repair, self._make_way)
            n_conflicts = n_conflicts + 1 if conflict else 0
            if n_conflicts > MAX_CONFLICT_ROUNDS:
                raise StorageError(f"{self.n_rows} rows {CHANGED_BY_ANOTHER_WRITER}")
        self._asked, self._oldest_k = False, 0

    def _make_way(self, error: StorageError) -> None:
        """Pages are in the way that another program has written: only its rows can be, since no other write fails on what is there."""
        log.error("%s", error)
        self._arena.reset()
        for one in self._some():
            self._store.make_way(one.part.keys, self._access.deadline())

    def _write_some(self) -> bool:
        """Write as many rows as one write takes; return whether some of them met a conflict."""
        self._arena.reset()
        self._tables.follow(self._store.cluster_map)
        dirty = self._some()
        with self._access.pace.exchange(sum(one.part.records.nbytes for one in dirty)):
            results = self._access.write([one.part for one in dirty])
        return any([self._settle(one, result) for one, result in zip(dirty, results, strict=True)])

    def _some(self) -> list[_Dirty]:
        """Copy what one write takes out of the caches."""
        found: list[_Dirty] = []
        room = min(_WRITE_BYTES, self._access.pace.n_bytes)
        for state in self._tables.all():
            cache, size = state.cache, state.definition.record.size_bytes
            if (room < size and found) or not cache.n_pinned:
                continue
            at, ids = cache.pinned()
            at, ids = at[: max(1, room // size)], ids[: max(1, room // size)]
            records = self._arena.take(len(at), size)
            whole = f"V{size}"  # records as items, which are copied at once
            np.take(cache.records.view(whole)[:, 0], at, out=records.view(whole)[:, 0], mode="clip")
            keys = self._access.keys(state.definition, ids, np.zeros(len(ids), bool))  # they exist in storage, so their pages do
            found.append(_Dirty(state, at, ids, WritePart(keys, records, cache.tokens[at])))
            room -= len(at) * size
        return found

    def _settle(self, dirty: _Dirty, result: WriteResult) -> bool:
        """Unpin what is stored; return whether rows met a conflict."""
        cache, stored = dirty.state.cache, result.stored
        if result.tokens is not None:
            cache.tokens[dirty.at[stored]] = result.tokens[stored]
        cache.unpin(dirty.at[stored])
        if stored.all():
            return False
        self._look_again(dirty, ~stored)
        return True

    def _look_again(self, dirty: _Dirty, which: NDArray[np.bool_]) -> None:
        """Read what stands where writes met a conflict: our own record, whose write was not answered, or one to be written over."""
        definition, cache, at, ids = dirty.state.definition, dirty.state.cache, dirty.at[which], dirty.ids[which]
        seen = self._access.look(definition, ids)
        refuse_later_epoch(definition, ids, seen.versions, self.epoch)
        if seen.tokens is not None:
            cache.tokens[at] = seen.tokens
        cache.unpin(at[seen.versions == definition.record.versions(dirty.part.records)[which]])
