"""The rows that a shard knows when it starts: those of its row log, and what the journal changed up to the saved state's position.

Storage has all of it already. What the journal holds behind that position is replayed afterwards (`replay`).

Tables are taken into memory whole, the small ones first, as long as the memory for indexes has room. Of the others only the rows that are
newer than the log are there at first; the rest comes as it is used.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.hashing import KeyOrder
from kvemb.arrays.record_cache import CacheBudget
from kvemb.arrays.row_index import END, RowIndex
from kvemb.errors import n_of
from kvemb.schema.table_def import TableDef

from ..journal import Journal
from ..journal.entry import Find
from ..model.batch import ERASE
from ..model.tables import RowsAtStart, TableState, all_of
from ..row_log import Runs
from ..row_log.reconstruct import batches_behind
from ..row_log.state_file import ShardState
from .replay import teller

Ids = NDArray[np.uint64]
_ROW_BYTES = 24  # of an index


class _Late:
    """One table's rows that changed after the row log's cut, and those that went, each with its last version."""

    def __init__(self, order: KeyOrder) -> None:
        self.rows, self.gone = RowIndex(order=order), RowIndex(order=order)

    def change(self, kind: str, ids: Ids, version: int) -> None:
        """Note the rows of one batch."""
        now, before = (self.gone, self.rows) if kind == ERASE else (self.rows, self.gone)
        now.put(ids, np.full(len(ids), version, np.uint64))
        before.erase(ids)

    def compare(self, runs: Runs, definition: TableDef, say: Callable[[], None]) -> None:
        """Forget what the log knows better: slots have come or gone since those batches."""
        for index in (self.rows, self.gone):
            low = 0
            while low < END:
                ids, versions, low = index.portion(low)
                index.erase(ids[versions <= runs.versions(definition, ids)[0]])
                say()

    def take(self, runs: Runs, definition: TableDef, say: Callable[[], None]) -> None:
        """Add all rows of the log that have not changed since: at once, since an index that grows by rows in the order of keys is slow."""

        def unchanged() -> Iterator[tuple[Ids, Ids]]:
            for ids, versions in runs.between(definition):
                same = (self.rows.get(ids) == 0) & (self.gone.get(ids) == 0)
                yield ids[same], versions[same]
                say()

        self.rows.put(*all_of(unchanged()))


def known_tables(
    state: ShardState,
    runs: Runs,
    journal: Journal,
    find: Find,
    *,
    budget: CacheBudget,
    index_bytes: int | None,
) -> list[TableState]:
    """Return the tables of a saved state."""
    late: dict[str, _Late] = {}
    n_late = 0
    say = teller(lambda: f"reads its row log, and {n_of(n_late, 'row')} of the journal behind it")
    for after, entry in batches_behind(state.cut, journal, find):
        if after > state.journal:
            break
        n_late += entry.batch.n_rows
        say()
        for rows in entry.batch.tables:
            late.setdefault(rows.definition.key, _Late(rows.definition.order)).change(entry.batch.kind, rows.ids, entry.version)
    states, whole = [], _in_memory(state, index_bytes)
    for table in state.tables:
        definition = find(table.definition.key, table.definition.schema)
        state.of(definition)  # the same one
        known = late.pop(definition.key, None) or _Late(definition.order)
        known.compare(runs, definition, say)
        if definition.key in whole:
            known.take(runs, definition, say)
        at_start = RowsAtStart(runs.cut, known.rows, known.gone, definition.key in whole, table.n_rows)
        states.append(TableState(definition, table.step, budget=budget, log=runs, known=at_start))
    return states


def _in_memory(state: ShardState, index_bytes: int | None) -> set[str]:
    """Return the keys of the tables that are to be in memory whole."""
    tables = sorted(state.tables, key=lambda one: one.n_rows)
    sums = accumulate(_ROW_BYTES * one.n_rows for one in tables)
    return {one.definition.key for one, size in zip(tables, sums, strict=True) if index_bytes is None or size <= index_bytes}
