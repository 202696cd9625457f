"""Compares rows that no push touches with storage, a slice between two batches: a row that was deleted or is old is found within a round.

One round goes through every row of every table in the order of their keys; the next one begins a minute after it began, at the earliest. A
slice takes a few milliseconds, and the next one waits fifty times as long as it took, times the number of shards: so all shards
together take about a hundredth of a storage server's time. Rows found are restored as in any repair, and reported in the log. Apply thread
only; `describe` for any.
"""

import time
from collections.abc import Callable

from kvemb.arrays.row_index import END
from kvemb.errors import StorageError
from kvemb.protocol.shard_routing import MapSource

from ..engine.storage_pace import Pause
from ..model.tables import Tables, TableState
from .repairer import Repairer

_SLICE_ROWS = 4096
_SHARE_OF_TIME = 50  # of which one is spent on comparing; about half of that is the storage server's
_ROUND_S = 60.0  # from the beginning of one round to that of the next, at least; and before the first
_LEAST_PAUSE_S = 0.05
_RETRY_S = 5.0


class Scrub:
    """Compares one shard's rows with storage, a slice at a time."""

    name, passing = "the comparison of rows that no push touches", (StorageError,)

    def __init__(
        self,
        repairer: Repairer,
        tables: Tables,
        maps: MapSource,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._repairer, self._tables, self._maps, self._timeout_s = repairer, tables, maps, timeout_s
        self._clock = clock
        self._todo: list[TableState] = []
        self._at = 0  # key of the first row of the first of these tables that is not compared yet
        self._begun_s, self.due_s = clock(), clock() + _ROUND_S
        self._n_compared = self._n_rows = self._n_rounds = self._n_restored = 0
        self._took_s = self._ended_s = 0.0

    def step(self, pause: Pause) -> bool:
        """Compare a slice."""
        started_s = self._clock()
        if started_s < self.due_s:
            return False
        if not self._todo:
            self._todo, self._at, self._begun_s, self._n_compared = self._tables.all(), 0, started_s, 0
            self._n_rows = sum(table.n_rows for table in self._todo)
        self.due_s = started_s + _RETRY_S  # unless all goes well
        if self._todo:
            self._compare(self._todo[0])
        now_s = self._clock()
        self.due_s = now_s + max(_LEAST_PAUSE_S, _SHARE_OF_TIME * len(self._maps.cluster_map.shard_numbers) * (now_s - started_s))
        if not self._todo:
            self._n_rounds += 1
            self._ended_s, self._took_s = now_s, now_s - self._begun_s
            self.due_s = max(self.due_s, self._begun_s + _ROUND_S)
        return False

    def describe(self) -> str:
        """Say how far it is, for `kvemb status`; "" before the first row was compared."""
        if not self._n_rounds and not self._n_compared:
            return ""
        now = f"{self._n_compared:,} of {self._n_rows:,} rows compared in this round"
        last = f"the last full round took {self._took_s:.0f} s and ended {self._clock() - self._ended_s:.0f} s ago"
        return f"{now}, {last if self._n_rounds else 'the first'}; {self._n_restored:,} rows restored"

    def _compare(self, table: TableState) -> None:
        ids, _, next_ = table.portion(self._at, n_rows=_SLICE_ROWS)
        if len(ids):
            self._n_restored += self._repairer.compare(table, ids, self._timeout_s)
        self._n_compared += len(ids)
        self._at = next_
        if self._at >= END:
            self._todo, self._at = self._todo[1:], 0
