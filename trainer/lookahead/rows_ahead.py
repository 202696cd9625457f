"""The rows of one batch, looked up before it is used. NumPy only.

Strategy: the unique ids of all that a batch asks a table for are pulled once, all tables in one pull. Then each lookup gets the rows of
its own unique ids. A table that is asked once, which is the usual case, gets the pulled rows themselves. Lookups of the same ids (many
models feed one tensor to several tables) have the same unique ones, which are found once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import Unique, to_caller, unique_ascending
from kvemb.arrays.segment_sum import group_by_id

from .cluster_ports import Changed, Prefetched, PullPort, TablePort

Ids = NDArray[np.uint64]
Pulled = tuple[NDArray[np.float32], Ids]
"""Rows float32 [n, dim] and versions uint64 [n]."""
_NO_VERSION = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
"""No row ever has it."""
_FEW = 8


@dataclass(frozen=True, eq=False)
class LookupResult:
    """The result of a lookup of m ids: unique ascending ids uint64 [n], their places intp [m], rows float32 [n, dim], versions [n]."""

    ids: Ids
    inverse: NDArray[np.intp]
    rows: NDArray[np.float32]
    versions: Ids


@dataclass(frozen=True, eq=False)
class EarlyLookup:
    """A lookup made before its batch is used: `asked` uint64 [m], not to be changed, and its result."""

    asked: Ids
    found: LookupResult


def unique_of(ids: Ids) -> Unique:
    """Return the unique ids, in memory of their own: `ids` may be the caller's tensor, which may change before the step that pushes."""
    wanted = unique_ascending(ids)
    return Unique(ids.copy(), wanted.inverse) if wanted.ids is ids else wanted


def found_of(wanted: Unique, pulled: Pulled) -> LookupResult:
    """Put the ids asked for and the rows pulled together."""
    inverse = np.arange(len(wanted.ids)) if wanted.inverse is None else wanted.inverse
    return LookupResult(wanted.ids, inverse, *pulled)


class RowsAhead:
    """The rows of one batch, pulled before it is used, for each of its lookups; of ids [m], copied, since the loop may change its batch."""

    def __init__(self, asked: Sequence[tuple[TablePort, Ids]]) -> None:
        self._id_dtype = {table.name: table.definition.id_dtype for table, _ in asked}
        self._asked: dict[str, list[Ids]] = {}
        copies: dict[tuple[int, bytes, bytes], Ids] = {}
        for table, ids in asked:
            self._asked.setdefault(table.name, []).append(_copy_once(ids, copies))
        known: dict[int, Unique] = {}
        self._wanted = {name: _unique_of_all(lookups, known) for name, lookups in self._asked.items()}
        self.by_table: dict[str, list[EarlyLookup]] = {}
        """The results of `pull`, by table."""
        self._whole: dict[str, LookupResult] = {}
        self.as_of: Any = None
        """When the rows were pulled: a value of the `Consistency` that pulls."""

    def pull(self, cluster: PullPort, *, stored: bool = True) -> None:
        """Look everything up, in one pull; again if it was pulled before."""
        if self._wanted:
            ids = {name: to_caller(wanted.ids, self._id_dtype[name]) for name, wanted in self._wanted.items()}
            pulled = cluster.pull_versions(ids, stored=stored)
            self._whole = {name: found_of(wanted, pulled[name]) for name, wanted in self._wanted.items()}
            self.by_table = {name: _share_out(lookups, self._whole[name]) for name, lookups in self._asked.items()}

    def prefetched(self) -> Prefetched:
        """Return the ids, in their table's dtype, and versions of all rows, by table."""
        return {name: (to_caller(found.ids, self._id_dtype[name]), found.versions) for name, found in self._whole.items()}

    def change(self, changed: Changed) -> None:
        """Take over changed rows, as far as they are prefetched here."""
        for name in self._whole.keys() & changed.keys():
            parts = {id(ahead.found): ahead.found for ahead in self.by_table[name]}
            for found in {id(self._whole[name]): self._whole[name], **parts}.values():
                _change(found, *changed[name])

    @property
    def pulled(self) -> bool:
        """Whether everything was found."""
        return len(self._whole) == len(self._wanted)

    @property
    def n_rows(self) -> int:
        """How many rows are pulled."""
        return sum(len(wanted.ids) for wanted in self._wanted.values())

    @property
    def nbytes(self) -> int:
        """Memory of the results."""
        found = {id(ahead.found): ahead.found for lookups in self.by_table.values() for ahead in lookups}
        found |= {id(whole): whole for whole in self._whole.values()}
        return sum(one.ids.nbytes + one.inverse.nbytes + one.rows.nbytes + one.versions.nbytes for one in found.values())


def _unique_of_all(lookups: Sequence[Ids], known: dict[int, Unique]) -> Unique:
    """Return the unique ids of all lookups of a table; `known` has those of this batch's other tables, by id() of the ids asked for."""
    if len(lookups) > 1:
        return unique_ascending(np.concatenate(lookups))
    (ids,) = lookups
    if id(ids) not in known:
        known[id(ids)] = unique_ascending(ids)
    return known[id(ids)]


def _copy_once(ids: Ids, copies: dict[tuple[int, bytes, bytes], Ids]) -> Ids:
    """Return a copy of ids, the same one for lookups of the same ids: bridges hand them over in memory of one or of several arrays."""
    some = len(ids), ids[:_FEW].tobytes(), ids[-_FEW:].tobytes()  # rarely equal for other ids: comparing each with each would take long
    copy = copies.get(some)
    if copy is None or not np.array_equal(copy, ids):
        copy = copies[some] = ids.copy()
    return copy


def prefetched_of_all(batches: Sequence[RowsAhead]) -> Prefetched:
    """Return ids and versions of several batches, each id once; one held in two versions has a version that no row has."""
    if len(batches) == 1:
        return batches[0].prefetched()
    every: dict[str, list[tuple[NDArray[Any], Ids]]] = {}
    for batch in batches:
        for name, prefetched in batch.prefetched().items():
            every.setdefault(name, []).append(prefetched)
    return {name: _merged(prefetched) for name, prefetched in every.items()}


def _merged(prefetched: Sequence[tuple[NDArray[Any], Ids]]) -> tuple[NDArray[Any], Ids]:
    ids, versions = (np.concatenate(arrays) for arrays in zip(*prefetched, strict=True))
    groups = group_by_id(ids.view(np.uint64))
    oldest, newest = groups.minimum(versions), ~groups.minimum(~versions)
    return groups.ids.view(ids.dtype), np.where(oldest == newest, oldest, _NO_VERSION)


def _change(found: LookupResult, ids: Ids, rows: NDArray[np.float32], versions: Ids) -> None:
    """Overwrite rows of `found`; ids that it does not have are left out."""
    if not len(found.ids):
        return
    at = np.searchsorted(found.ids, ids)
    at[at == len(found.ids)] = 0
    here = np.flatnonzero(found.ids.take(at) == ids)
    found.rows[at.take(here)] = rows.take(here, axis=0)
    found.versions[at.take(here)] = versions.take(here)


def _share_out(lookups: Sequence[Ids], whole: LookupResult) -> list[EarlyLookup]:
    if len(lookups) == 1:
        return [EarlyLookup(lookups[0], whole)]
    starts = np.cumsum([len(ids) for ids in lookups[:-1]])
    return [EarlyLookup(ids, _part_of(whole, at)) for ids, at in zip(lookups, np.split(whole.inverse, starts), strict=True)]


def _part_of(whole: LookupResult, at: NDArray[np.intp]) -> LookupResult:
    """Return the result of one of several lookups of a table: `at` intp [m], where its ids stand in `whole`."""
    used = np.zeros(len(whole.ids), np.bool_)
    used[at] = True
    kept = np.flatnonzero(used)
    places = np.cumsum(used, dtype=np.intp) - 1
    return LookupResult(whole.ids.take(kept), places.take(at), whole.rows.take(kept, axis=0), whole.versions.take(kept))
