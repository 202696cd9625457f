"""The rows of the slots that a shard gives: found once among all of its rows, and from then on by what has changed.

Trainers wait while a shard hands slots over. By then it has been asked about the same slots before, so that the wait need not grow with the
rows that stay. Thread-safe.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..model.tables import Tables, TableState
from .slot_entries import SlotEntries, entries_of

Slots = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Found:
    """A table's rows of the slots, a version that every row which has changed since is above, and how many were erased by then."""

    entries: SlotEntries
    version: int
    n_erased: int


class GivenRows:
    """Those of one shard, which gives and takes no slots at once: what it takes may have any version.

    Args:
        tables: of the shard.
        applied: returns the version of the last batch applied.
    """

    def __init__(self, tables: Tables, applied: Callable[[], int]) -> None:
        self._tables, self._applied = tables, applied
        self._lock = threading.Lock()
        self._slots: Slots | None = None
        self._found: dict[str, _Found] = {}
        self._final = False

    def entries(self, slots: Slots, *, final: bool = False) -> list[SlotEntries]:
        """Return what the index knows of these slots, a table after the other.

        Args:
            slots: bool [16384].
            final: nothing changes any more until `clear`, so that the next one who asks gets the same.
        """
        with self._lock:
            if self._slots is None or not np.array_equal(self._slots, slots):
                self._slots, self._found, self._final = slots.copy(), {}, False
            if not self._final:
                before = self._found
                self._found = {state.definition.key: self._find(state, slots, before) for state in self._tables.all()}
                self._final = final
            return [found.entries for found in self._found.values()]

    def clear(self) -> None:
        """Forget them."""
        with self._lock:
            self._slots, self._found, self._final = None, {}, False

    def _find(self, state: TableState, slots: Slots, before: Mapping[str, _Found]) -> _Found:
        version, n_erased, last = self._applied(), state.n_erased, before.get(state.definition.key)
        if last is None or last.n_erased != n_erased:
            return _Found(entries_of(state, slots, *state.arrays()), version, n_erased)
        ids, versions = state.since(last.version + 1)
        return _Found(last.entries.with_changed(entries_of(state, slots, ids, versions)), version, n_erased)
