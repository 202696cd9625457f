"""Records reconstructed exactly as the engine wrote them: those of the row log, brought forward by the journal.

Replay uses the engine's own arithmetic (`paramserver.model.transition`) with the journal's versions, steps and run-time values. A row's
result does not depend on the rows beside it, so only the wanted rows are computed. A row stops at the version wanted: later entries of the
journal are not applied yet.

One pass reads the whole journal, so as many rows are made in one pass as the memory given allows, of all tables at once. Their updates are
gathered from the journal and applied in rounds (`reconstruct_rounds`), so the cost of a pass grows with the rows, not with the batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import as_items
from kvemb.errors import LostRowError
from kvemb.schema.record import MAX_K, split_version
from kvemb.schema.table_def import TableDef

from ..journal import BatchEntry, Journal, Position, decode_entry
from ..journal.entry import Find
from ..model.batch import APPLY, ERASE, CheckedRows
from ..model.tables import TableState
from ..model.transition import new_records
from .reconstruct_rounds import Rounds
from .run_set import RunView
from .sorted_run import Bytes, Ids

_MAX_ROWS = 2 << 20  # of one pass
_MAX_WAITING_BYTES = 4 << 20  # of gathered updates: picked in another order, they should lie in the processor's cache


@dataclass(frozen=True, eq=False)
class WantedVersions:
    """Rows of a table at certain versions.

    Args:
        table: only its definition and optimizer are used.
        ids: uint64 [n], unique, in any order.
        versions: uint64 [n], of the shard's index; none 0.
    """

    table: TableState
    ids: Ids
    versions: Ids


class Reconstructor:
    """Reconstructs records of one shard's rows from its row log and its journal. Any thread."""

    def __init__(self, view: Callable[[], RunView], journal: Journal, find_table: Find, *, pass_bytes: int = 512 << 20) -> None:
        self._view, self._journal, self._find, self._pass_bytes = view, journal, find_table, pass_bytes

    def records(self, wanted: Sequence[WantedVersions]) -> list[Bytes]:
        """Return the records of rows as they were at these versions.

        Returns:
            Of each table uint8 [n, record bytes].
        """
        # Of each table uint8 [n, record bytes], filled portion by portion.
        made = [np.empty((len(one.ids), one.table.definition.record.size_bytes), np.uint8) for one in wanted]
        view = self._view()
        for portion in self._portions(wanted):
            tables = [_RowsToReconstruct(wanted[which], at, view) for which, at in portion]
            self._pass(tables, view.cut)
            for (which, at), rows in zip(portion, tables, strict=True):
                got = np.where(rows.base.exists, rows.base.versions, np.uint64(0))  # uint64 [m], of the m rows of this portion
                require_versions(rows.table.definition, rows.ids, got, rows.wanted, "by row log and journal", then="Load a checkpoint.")
                if len(rows.ids):
                    as_items(made[which])[at] = as_items(rows.base.records)
        return made

    def _portions(self, wanted: Sequence[WantedVersions]) -> Iterator[list[tuple[int, NDArray[np.intp]]]]:
        """Yield the work of one pass each: (which table, intp [m], places of its rows, in the order of their ids)."""
        portion: list[tuple[int, NDArray[np.intp]]] = []
        left = self._pass_bytes
        for which, one in enumerate(wanted):
            # order, intp [r]: the rows in the order in which the runs have them, so that a pass reads its part of each run
            order, size = np.argsort(one.table.definition.order.keys(one.ids)), one.table.definition.record.size_bytes
            while len(order):
                n = min(_MAX_ROWS, max(left // size, 0 if portion else 1))
                if n:
                    portion.append((which, order[:n][np.argsort(one.ids[order[:n]])]))
                left, order = left - len(order[:n]) * size, order[n:]
                if len(order):
                    yield portion
                    portion, left = [], self._pass_bytes
        if portion:
            yield portion

    def _pass(self, tables: Sequence["_RowsToReconstruct"], cut: int) -> None:
        """Bring rows forward, in one pass over the journal."""
        if all(rows.done for rows in tables):
            return
        by_key = {rows.table.definition.key: rows for rows in tables}
        for _, entry in batches_behind(cut, self._journal, self._find):
            for changed, step in zip(entry.batch.tables, entry.steps, strict=True):
                rows = by_key.get(changed.definition.key)
                if rows is not None and len(changed.ids):
                    rows.replay(entry, changed, step)
            if sum(rows.size_bytes for rows in tables) > _MAX_WAITING_BYTES:
                for rows in tables:
                    rows.run()
        for rows in tables:
            rows.run()


def require_versions(
    definition: TableDef, ids: Ids, got: Ids, expected: Ids, where: str, *, by: str = "the shard's index", then: str = ""
) -> None:
    """Refuse n rows of which not all are found at the version expected; 0: no row."""
    wrong = got != expected
    if wrong.any():
        at = int(np.argmax(wrong))
        state = f"version {split_version(int(got[at]))}" if got[at] else "no row"
        raise LostRowError(
            f"table {definition.name!r}, id {definition.shown_id(int(ids[at]))}: {state} {where}, expected version "
            f"{split_version(int(expected[at]))} by {by} ({int(wrong.sum())} such rows; versions are (epoch, k)). {then}".rstrip()
        )


def batches_behind(cut: int, journal: Journal, find: Find) -> Iterator[tuple[Position, BatchEntry]]:
    """Yield the batches behind a row log's cut in order, each with the position after its entry, making sure that none is missing.

    What the journal has from before the cut is in the log, too; where the log has nothing, no row existed.
    """
    last = cut & MAX_K
    any_k = cut > 0 and last == 0  # a load began an epoch: the batches behind it are numbered on
    for after, payload in journal.read():
        entry = decode_entry(payload, find)
        if not isinstance(entry, BatchEntry) or entry.version <= cut:
            continue
        k = entry.version & MAX_K
        if k != last + 1 and not any_k:
            raise LostRowError(
                f"the journal continues with batch {k}, row log and journal reach to batch {last}: the batches between are missing, so no "
                "row can be restored from them."
            )
        last, any_k = k, False
        yield after, entry


class _RowsToReconstruct(Rounds):
    """Some of the rows wanted (those at the places `at`, ascending by id), from the row log's state of them on."""

    def __init__(self, wanted: WantedVersions, at: NDArray[np.intp], view: RunView) -> None:
        super().__init__(wanted.table, wanted.ids[at], view.find(wanted.table.definition, wanted.ids[at]))
        self.wanted = wanted.versions[at]

    @property
    def done(self) -> bool:
        """Whether nothing that the journal holds can be needed."""
        return bool((self.base.versions >= self.wanted).all())

    def replay(self, entry: BatchEntry, changed: CheckedRows, step: int) -> None:
        """Replay a batch on these rows, where its version is above theirs and not above the one wanted."""
        at = np.searchsorted(self.ids, changed.ids)  # intp [m], of each changed row: its place here, or one of another id
        at[at == len(self.ids)] = 0
        version = np.uint64(entry.version)  # above those of updates that wait, so they need not be looked at
        # bool [m]: changed rows that are here, older than the batch, and wanted at its version or a later one.
        due = (self.ids[at] == changed.ids) & (self.base.versions[at] < version) & (version <= self.wanted[at])
        if not due.any():
            return
        if entry.batch.kind == APPLY:
            self.add(at[due], changed.rows[due], entry.version, self.table.optimizer.factors(changed.hyper, step + 1))
            return
        self.run()
        self._set(entry, changed.take(due), at[due])

    def _set(self, entry: BatchEntry, rows: CheckedRows, at: NDArray[np.intp]) -> None:
        """Assign or erase."""
        base, kind = self.base, entry.batch.kind
        base.versions[at], base.exists[at] = entry.version, kind != ERASE
        if kind != ERASE:
            # uint8 [m, record bytes]: the new records of the m rows at the places `at`.
            out = np.empty((len(at), self.table.definition.record.size_bytes), np.uint8)
            new_records(self.table, kind, rows, out, base.exists[at], version=entry.version, out=out)
            as_items(base.records)[at] = as_items(out)
