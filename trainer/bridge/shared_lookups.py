"""The lookups of a model's modules: one pull for all of them that are known when it is made.

Rows that were pulled for this batch ahead (`install`) serve lookups of the same ids until the next batch or step. Lookups of one call are
one pull. Tables that were asked for the same ids one after another in a step are one pull in the next: the first of them pulls for the
others, too; such rows serve until the next step, and a table that did not ask is left out then.

Several threads may look up: those that train take turns, for they share this state. Steps come one after another.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import Unique, to_caller, unique_ascending
from kvemb.process import ForkLock

from ..lookahead.cluster_ports import Changed, ClusterPort, LookaheadPort, Prefetched, TablePort
from ..lookahead.rows_ahead import EarlyLookup, LookupResult, Pulled, RowsAhead, found_of, unique_of
from ..report.step_times import counted

__all__ = ["Asked", "EarlyLookup", "LookupResult", "SharedLookups", "found_of", "unique_of"]

Asked = tuple[TablePort, NDArray[np.uint64]]
"""A table and the ids uint64 [m] that one lookup asks it for, duplicates and padding included."""


class SharedLookups:
    """The lookups of the modules of one cluster."""

    def __init__(self, tables: Mapping[str, TablePort], cluster: ClusterPort) -> None:
        self.tables, self.cluster = dict(tables), cluster
        self.n_ahead = self.n_pulled = 0
        """Lookups served from installed rows, and those that were not."""
        self.waited_s = 0.0
        """Seconds that lookups waited for storage."""
        self.lookahead: LookaheadPort | None = None
        """The loader that installed rows last."""
        self.state = 0
        """Even between two steps, odd from before a step's push until its release; after a failed step it stays odd. It only rises."""
        self._installed: Mapping[str, Sequence[EarlyLookup]] = {}
        self._followers: dict[str, list[str]] = {}  # by the table that is asked first: those that are asked for the same ids
        self._first = ""
        self._ids = np.empty(0, np.uint64)  # a copy of what it was asked for
        self._wanted = Unique(self._ids, None)
        self._ahead: dict[str, Pulled] = {}
        self._lock = ForkLock()

    def look_up(self, asked: Sequence[Asked], *, recording: bool) -> list[LookupResult]:
        """Look ids up."""
        if recording:
            with self._lock:
                return self._look_up(asked, recording=True)
        return self._look_up(asked, recording=False)

    def _look_up(self, asked: Sequence[Asked], *, recording: bool) -> list[LookupResult]:
        found = [self._find_installed(table, ids) for table, ids in asked]
        missing = [i for i, one in enumerate(found) if one is None]
        self.n_ahead += len(asked) - len(missing)
        self.n_pulled += len(missing)
        if self.lookahead is not None:
            for (table, _), one in zip(asked, found, strict=True):
                self.lookahead.looked_up(table.name, one is not None)
        if missing:
            began_s = time.perf_counter()
            pulled = self._pull([asked[i] for i in missing], recording)
            self._note(time.perf_counter() - began_s, pulled)
            for i, one in zip(missing, pulled, strict=True):
                found[i] = one
        return [one for one in found if one is not None]

    def install(self, ahead: Mapping[str, Sequence[EarlyLookup]]) -> None:
        """Take over the lookups made ahead for the batch that comes now, by table; those of the batch before are dropped."""
        self._installed = ahead
        if (times := counted()) is not None:
            times.rows_ahead += sum(len(one.found.ids) for lookups in ahead.values() for one in lookups)

    def begin_step(self) -> Prefetched | None:
        """Drop rows without a lookup, which are too old after this step; return the rows that its push is to register, if any."""
        with self._lock:
            self._installed = {}
            self._drop_ahead()
            self.state += 1 + self.state % 2
        return None if self.lookahead is None else self.lookahead.prefetched()

    def end_step(self, changed: Changed | None) -> None:
        """Take note that the step's push was handed over, in a sync job released; `changed` are the rows that came back with it."""
        self.state += 1
        if self.lookahead is not None:
            self.lookahead.released(changed)

    def _note(self, waited_s: float, pulled: Sequence[LookupResult]) -> None:
        """Add the time and rows of a pull, to the report in force, too."""
        self.waited_s += waited_s
        if (times := counted()) is not None:
            times.lookup_s += waited_s
            times.rows_looked_up += sum(len(found.ids) for found in pulled)

    def _find_installed(self, table: TablePort, ids: NDArray[np.uint64]) -> LookupResult | None:
        if self._installed and self.lookahead is not None and not self.lookahead.fit():
            self._installed = {}
        for ahead in self._installed.get(table.name, ()):
            if np.array_equal(ahead.asked, ids):
                return ahead.found
        return None

    def _pull(self, asked: Sequence[Asked], recording: bool) -> list[LookupResult]:
        if len(asked) == 1:
            return [self._pull_one(*asked[0], recording)]
        rows = RowsAhead(asked)
        rows.pull(self.cluster)
        found = {name: iter(lookups) for name, lookups in rows.by_table.items()}
        return [next(found[table.name]).found for table, _ in asked]

    def _pull_one(self, table: TablePort, ids: NDArray[np.uint64], recording: bool) -> LookupResult:
        if not recording:
            wanted = unique_of(ids)
            return found_of(wanted, _pull(table, wanted))
        if not self._first or not np.array_equal(ids, self._ids):
            return found_of(*self._lead(table, ids))
        pulled = self._ahead.pop(table.name, None)
        if pulled is None:
            self._follow(table)
            pulled = _pull(table, self._wanted)
        return found_of(self._wanted, pulled)

    def _drop_ahead(self) -> None:
        if self._ahead:
            self._followers[self._first] = [name for name in self._followers[self._first] if name not in self._ahead]
            self._ahead.clear()
        self._first = ""

    def _lead(self, table: TablePort, ids: NDArray[np.uint64]) -> tuple[Unique, Pulled]:
        self._drop_ahead()
        self._ids = ids.copy()
        wanted = unique_ascending(self._ids)
        names = [table.name, *self._followers.get(table.name, ())]
        if len(names) == 1:
            pulled = _pull(table, wanted)
        else:
            asked = {name: to_caller(wanted.ids, self.tables[name].definition.id_dtype) for name in names}
            self._ahead = dict(self.cluster.pull_versions(asked))
            pulled = self._ahead.pop(table.name)
        self._first, self._wanted = table.name, wanted
        return wanted, pulled

    def _follow(self, table: TablePort) -> None:
        """Pull this table ahead in the next step, if all ids of the first one may be asked of this one, too."""
        first, definition = self.tables[self._first].definition, table.definition
        if table.name != self._first and (first.id_dtype, first.num_ids) == (definition.id_dtype, definition.num_ids):
            followers = self._followers.setdefault(self._first, [])
            if table.name not in followers:
                followers.append(table.name)


def _pull(table: TablePort, wanted: Unique) -> Pulled:
    return table.pull(to_caller(wanted.ids, table.definition.id_dtype), return_versions=True)
