"""Modules that are given the same ids look them up together: one grouping, and one pull for all their tables.

What must not live here: modules (`lookup`) and pushing (`optimizer`). Many models feed one tensor of ids to several tables (a weight
and a vector per feature). Which tables are asked for the same ids one after another is seen in one step and used in the next: the
first of them pulls rows for the others, too. Such rows serve the same ids only, compared one by one, and only until the next step; a
table that did not ask for them is not pulled ahead again. One thread per model.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.distinct import Distinct, ascending
from kvemb.ids import to_caller
from trainer.torch.ports import ClusterPort, TablePort

Pulled = tuple[NDArray[np.float32], NDArray[np.uint64]]
"""Rows float32 [n, dim] and versions uint64 [n]."""


@dataclass(frozen=True, eq=False)
class Found:
    """What a lookup of m ids found.

    Args:
        ids: uint64 [n], distinct and ascending; not to be changed.
        inverse: intp [m], positions in `ids`; not to be changed.
        rows: float32 [n, dim].
        versions: uint64 [n].
    """

    ids: NDArray[np.uint64]
    inverse: NDArray[np.intp]
    rows: NDArray[np.float32]
    versions: NDArray[np.uint64]


def look_up(table: TablePort, ids: NDArray[np.uint64]) -> Found:
    """Look ids up in one table, for itself."""
    wanted = ascending(ids)
    if wanted.ids is ids:  # it may be the caller's tensor, which may change before the step that pushes these ids
        wanted = Distinct(ids.copy(), wanted.inverse)
    return _found(wanted, _pull(table, wanted))


class SharedLookups:
    """The lookups of the modules of one optimizer.

    Args:
        tables: by name.
        cluster: they all belong to it.
    """

    def __init__(self, tables: Mapping[str, TablePort], cluster: ClusterPort) -> None:
        self._tables, self._cluster = tables, cluster
        self._followers: dict[str, list[str]] = {}  # by the table that is asked first: those that are asked for the same ids
        self._first = ""
        self._ids = np.empty(0, np.uint64)  # a copy of what it was asked for
        self._wanted = Distinct(self._ids, None)
        self._ahead: dict[str, Pulled] = {}

    def look_up(self, table: TablePort, ids: NDArray[np.uint64]) -> Found:
        """Look ids up; other tables may be pulled, too.

        Args:
            table: one of the tables.
            ids: uint64 [m].
        """
        if not self._first or not np.array_equal(ids, self._ids):
            return _found(*self._lead(table, ids))
        pulled = self._ahead.pop(table.name, None)
        if pulled is None:
            self._follow(table)
            pulled = _pull(table, self._wanted)
        return _found(self._wanted, pulled)

    def forget(self) -> None:
        """Drop rows that nobody asked for; they would be too old after this step."""
        if self._ahead:
            self._followers[self._first] = [name for name in self._followers[self._first] if name not in self._ahead]
            self._ahead.clear()
        self._first = ""

    def _lead(self, table: TablePort, ids: NDArray[np.uint64]) -> tuple[Distinct, Pulled]:
        self.forget()
        self._ids = ids.copy()
        wanted = ascending(self._ids)
        names = [table.name, *self._followers.get(table.name, ())]
        if len(names) == 1:
            pulled = _pull(table, wanted)
        else:
            asked = {name: to_caller(wanted.ids, self._tables[name].definition.id_dtype) for name in names}
            self._ahead = dict(self._cluster.pull_versions(asked))
            pulled = self._ahead.pop(table.name)
        self._first, self._wanted = table.name, wanted
        return wanted, pulled

    def _follow(self, table: TablePort) -> None:
        """Pull this table ahead in the next step, if what the first one may be asked for, this one may be, too."""
        first, definition = self._tables[self._first].definition, table.definition
        if table.name != self._first and (first.id_dtype, first.num_ids) == (definition.id_dtype, definition.num_ids):
            followers = self._followers.setdefault(self._first, [])
            if table.name not in followers:
                followers.append(table.name)


def _pull(table: TablePort, wanted: Distinct) -> Pulled:
    return table.pull(to_caller(wanted.ids, table.definition.id_dtype), return_versions=True)


def _found(wanted: Distinct, pulled: Pulled) -> Found:
    inverse = np.arange(len(wanted.ids)) if wanted.inverse is None else wanted.inverse
    return Found(wanted.ids, inverse, *pulled)
