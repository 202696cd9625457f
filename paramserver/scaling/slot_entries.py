"""The index entries of the rows of some slots, as a shard hands them over: ids, versions, and how often each table was applied; no I/O.

The rows of the slots are searched among all rows once, later only among changed rows: trainers wait while a shard hands slots over, and the
wait must not grow with the rows that stay.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.schema.table_def import TableDef

from ..model.tables import Tables, TableState, all_of

Ids = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class SlotEntries:
    """One table's rows of the slots that move.

    Args:
        definition: the table.
        step: applies of it so far, at the giver.
        ids: uint64 [n], ascending.
        versions: uint64 [n].
    """

    definition: TableDef
    step: int
    ids: Ids
    versions: Ids

    def within(self, slots: NDArray[np.bool_]) -> "SlotEntries":
        """Return those in some slots: bool [16384]."""
        some = slots[self.definition.placement.slots(self.ids)]
        return SlotEntries(self.definition, self.step, self.ids[some], self.versions[some])


def joined(portions: Iterable[tuple[Ids, Ids]]) -> tuple[Ids, Ids]:
    """Return ids and versions of all portions of rows, ascending by id."""
    ids, versions = all_of(portions)
    order = np.argsort(ids, kind="stable")  # trainers wait for lists of givers, each in order already: this kind joins them in passing
    return ids[order], versions[order]


def with_later(ids: Ids, versions: Ids, later_ids: Ids, later_versions: Ids) -> tuple[Ids, Ids]:
    """Join two lists of rows that ascend by id; the later one counts where both have a row. In time that is linear in the first one."""
    at = np.searchsorted(ids, later_ids)
    known = at < len(ids)
    known[known] = ids[at[known]] == later_ids[known]
    versions, new = versions.copy(), ~known
    versions[at[known]] = later_versions[known]
    return np.insert(ids, at[new], later_ids[new]), np.insert(versions, at[new], later_versions[new])


def put_together(entries: Iterable[SlotEntries]) -> list[SlotEntries]:
    """Join the entries of several givers, one of each table: a table counts as many applies as the giver that has counted most."""
    by_table: dict[str, list[SlotEntries]] = {}
    for one in entries:
        by_table.setdefault(one.definition.key, []).append(one)
    return [
        SlotEntries(some[0].definition, max(one.step for one in some), *joined((one.ids, one.versions) for one in some))
        for some in by_table.values()
    ]


def versions_among(ids: Ids, known: Ids, versions: Ids) -> Ids:
    """Return the version of each id by a list of known ones, 0 where it is not among them: uint64 [n].

    Args:
        ids: uint64 [n].
        known, versions: uint64 [m], `known` ascending.
    """
    if not len(known):
        return np.zeros(len(ids), np.uint64)
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return np.where(known[at] == ids, versions[at], np.uint64(0))


Slots = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Found:
    """A table's rows of the slots, the version up to which they are known, and how many rows the table had erased by then."""

    entries: SlotEntries
    version: int
    n_erased: int


class GivenRows:
    """The rows of the slots that one shard gives; it takes none at once, since those may have any version. Thread-safe."""

    def __init__(self, tables: Tables, applied: Callable[[], int]) -> None:
        self._tables, self._applied = tables, applied
        self._lock = threading.Lock()
        self._slots: Slots | None = None
        self._found: dict[str, _Found] = {}
        self._final = False

    def entries(self, slots: Slots, *, final: bool = False) -> list[SlotEntries]:
        """Return the index entries of these slots, a table after the other.

        Args:
            slots: bool [16384].
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
        with self._lock:
            self._slots, self._found, self._final = None, {}, False

    def _find(self, state: TableState, slots: Slots, before: Mapping[str, _Found]) -> _Found:
        version, n_erased, last = self._applied(), state.n_erased, before.get(state.definition.key)
        if last is None or last.n_erased != n_erased:
            rows = joined(state.portions(slots))
        else:
            rows = with_later(last.entries.ids, last.entries.versions, *joined(state.portions(slots, above=last.version)))
        return _Found(SlotEntries(state.definition, state.step, *rows), version, n_erased)
