"""Admission: gradients of ids that get no row yet are taken out of a batch when its pushes are merged, before it is journaled.

What is held back is not journaled, so a replay needs no policy and no count. An id that has a row is never held back. Whether it has one
is asked as of the batches before: those that are numbered and not applied yet are looked through, too. Counts and draws are in memory
only: after a restart of the shard counts begin anew. An id whose row is erased keeps its count while the filter remembers it: then it is
let in again with its next gradient.

An id counts once for each push that names it: a trainer sums the gradients of equal ids before it sends them.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.admit import Admission
from kvemb.arrays.hashing import digest64, mix64
from kvemb.arrays.ids import are_among
from kvemb.arrays.segment_sum import Groups
from kvemb.schema.policies import Policies
from kvemb.schema.table_def import TableDef

from ..ingest.work_queue import HeldBack
from ..model.batch import ERASE, Batch, Push
from ..model.tables import Tables
from .occurrences import OccurrenceFilter, cells_for

_TO_UNIT = 2.0**-53
_PolicyOf = Callable[[str, int], Policies]
"""(key of a table, serial of the registry of tables; 0: the newest) -> its policies."""


class Admissions:
    """Decides which gradients of pushes are applied. For the committer's thread; `held_back` and `filter_bytes` for any."""

    def __init__(self, policies: _PolicyOf, tables: Tables, *, sync: bool) -> None:
        self._policies, self._tables, self._sync = policies, tables, sync
        self._filters: dict[str, OccurrenceFilter] = {}
        self.held_back: Counter[str] = Counter()
        """Gradients held back since the shard's process started, by the name of their table."""

    def filter_bytes(self, key: str) -> int:
        """Memory of a table's counts."""
        return found.size_bytes if (found := self._filters.get(key)) is not None else 0

    def judge(self, pushes: Sequence[Push], k: int, unapplied: Callable[[], Sequence[Batch]]) -> HeldBack:
        """Return a function that says which ids of a batch are held back, to be called once for each of its tables."""
        serial = max(part.tables_serial for push in pushes for part in push.parts) if self._sync else 0
        for key in [key for key in self._filters if self._policies(key, serial).admission.kind != "after"]:
            del self._filters[key]  # its policy is another, or the table was dropped

        def held_back(definition: TableDef, groups: Groups) -> NDArray[np.bool_] | None:
            admission = self._policies(definition.key, serial).admission
            if admission.kind == "any":
                return None
            held, counts = ~self._known(definition, groups.ids, unapplied()), np.diff(groups.starts, append=len(groups.inverse))
            new = np.flatnonzero(held)
            held[new] = ~self._let_in(definition, admission, groups.ids[new], counts[new], k)
            if not held.any():
                return None
            self.held_back[definition.name] += int(counts[held].sum())
            return held

        return held_back

    def _let_in(
        self, definition: TableDef, admission: Admission, ids: NDArray[np.uint64], counts: NDArray[np.int64], k: int
    ) -> NDArray[np.bool_]:
        """Return which ids without a row get one now: bool [m]."""
        assert admission.value is not None
        if admission.kind == "after":
            seen = self._filters.setdefault(definition.key, OccurrenceFilter())
            return seen.reach(ids, counts, int(admission.value), most_cells=cells_for(self._tables.state(definition).n_rows))
        drawn = mix64(ids ^ np.uint64(digest64("admission", definition.key, definition.seed, k)))
        at_least_once = 1.0 - (1.0 - admission.value) ** counts
        let_in: NDArray[np.bool_] = (drawn >> np.uint64(11)) * _TO_UNIT < at_least_once
        return let_in

    def _known(self, definition: TableDef, ids: NDArray[np.uint64], unapplied: Sequence[Batch]) -> NDArray[np.bool_]:
        """Return which of n unique ids have a row after the batches numbered so far: bool [n].

        Some of the batches that are looked through may have been applied meanwhile: in their order they change nothing then.
        """
        known = self._tables.state(definition).known(ids)
        for batch in unapplied:
            for rows in batch.tables:
                if rows.definition.key == definition.key:
                    known[are_among(ids, rows.ids)] = batch.kind != ERASE
        return known
