"""The giver's side of a hand-over of slots: says what it knows of them, and forgets it. Apply thread only.

When it is to say it, and when to forget, docs/adr/0062 tells. What must not live here: the phases of a plan.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..model.tables import Tables, TableState
from ..snapshot.run_set import Runs
from ..snapshot.sorted_run import ERASED
from .given_rows import GivenRows
from .slot_entries import Ids, SlotEntries

_SLICE_ROWS = 1 << 18
_LOOKED_AT = 64  # rows: all of a table are noted at once


class SlotGiver:
    """Hands slots of one shard over; a taker that gives them back after an abort is one, too.

    Args:
        tables: of the shard.
        runs: its local snapshot.
        rows: finds the rows of the slots.
        note_gone: notes durably that the index has no row of some slots any more, bool [16384].
        applied: returns the version of the last batch applied.
    """

    def __init__(
        self,
        tables: Tables,
        runs: Runs,
        rows: GivenRows,
        note_gone: Callable[[NDArray[np.bool_]], None],
        applied: Callable[[], int],
    ) -> None:
        self._tables, self._runs, self._rows, self._note_gone, self._applied = tables, runs, rows, note_gone, applied

    def entries(self, slots: NDArray[np.bool_]) -> list[SlotEntries]:
        """Return what the index knows of these slots, a table after the other: bool [16384]. It is final once the shard has drained."""
        return self._rows.entries(slots)

    def forget(self) -> None:
        """Forget what was found of slots that were to move."""
        self._rows.clear()

    def drop(self, slots: NDArray[np.bool_]) -> int:
        """Forget every row of these slots, durably; return how many. Called again it changes nothing.

        The local snapshot notes that they are gone. Otherwise a row that comes back with its slot, erased and created anew elsewhere,
        would be made anew from what this shard once knew of it. Between the note and the end of this call none of them can be made
        anew here: a shard that dies there is to call it again before it repairs anything.

        Raises:
            JournalFullError: nothing changed; call again.
            OSError, FencedError: they are forgotten, and not durably; call again.
        """
        known = {one.definition.key: one.ids for one in self._rows.entries(slots)}
        dropped = [(state, known[state.definition.key]) for state in self._tables.all() if state.definition.key in known]
        self._write_notes([(state, ids) for state, ids in dropped if len(ids)])
        self._rows.clear()
        for state, ids in dropped:
            state.erased(ids)
            state.cache.forget(ids)
        self._note_gone(slots)
        return sum(len(ids) for _, ids in dropped)

    def begun(self, slots: NDArray[np.bool_]) -> bool:
        """Whether a `drop` of these slots was broken off: their rows are noted as gone, and the index has them still."""
        for known in self._rows.entries(slots):
            ids, versions = known.ids[:_LOOKED_AT], known.versions[:_LOOKED_AT]
            noted = self._runs.find(known.definition, ids)
            if (~noted.exists & (noted.versions >= versions)).any():
                return True
        return False

    def _write_notes(self, dropped: Sequence[tuple[TableState, Ids]]) -> None:
        writers = [self._runs.begin(state.definition) for state, _ in dropped]
        try:
            for writer, (_, ids) in zip(writers, dropped, strict=True):
                for start in range(0, len(ids), _SLICE_ROWS):
                    some = ids[start : start + _SLICE_ROWS]
                    writer.add(ERASED, some, np.full(len(some), self._applied(), "<u8").view(np.uint8).reshape(len(some), 8))
            if writers:
                self._runs.publish(writers, self._runs.cut)
        except BaseException:
            for writer in writers:
                writer.drop()
            raise
