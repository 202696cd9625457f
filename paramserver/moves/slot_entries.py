"""What one shard tells another of the rows of some slots: ids, versions, and how often each table was applied; no I/O.

All rows are told once, while the giver goes on with them, and after that what has changed: trainers wait for the last answer, and that wait
must not grow with the number of rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvemb.schema.table_def import TableDef

from ..model.tables import Ids, Slots, Tables, all_of


@dataclass(frozen=True, eq=False)
class SlotEntries:
    """One table's rows of the slots that move, or those of them that have changed.

    Args:
        definition: the table.
        step: applies of it so far, at the giver.
        ids: uint64 [n], in the order of their keys.
        versions: uint64 [n], 0 of a row that is gone.
        whole: bool [16384], the slots of which these are all rows there are.
    """

    definition: TableDef
    step: int
    ids: Ids
    versions: Ids
    whole: Slots


def entries_of(tables: Tables, slots: Slots, applied: int, since: int = 0) -> list[SlotEntries]:
    """Return a shard's rows of some slots, a table after the other; those that have changed, where that is noted. Any thread.

    Args:
        tables: of the shard.
        slots: bool [16384].
        applied: version of the last batch applied, or below; the next answer may be `since` that.
        since: this version, 0 for all rows.
    """
    entries = []
    for state in tables.all():
        state.note_changes(applied)
        if (changed := state.changed(since, slots)) is None:
            entries.append(SlotEntries(state.definition, state.step, *all_of(state.portions(slots)), slots))
        else:
            entries.append(SlotEntries(state.definition, state.step, changed, state.versions_now(changed), np.zeros_like(slots)))
    return entries


def put_together(entries: Iterable[SlotEntries]) -> list[SlotEntries]:
    """Join the entries of several givers, one of each table: a table counts as many applies as the giver that has counted most."""
    by_table: dict[str, list[SlotEntries]] = {}
    for one in entries:
        by_table.setdefault(one.definition.key, []).append(one)
    return [_joined(some) for some in by_table.values()]


def _joined(some: list[SlotEntries]) -> SlotEntries:
    definition, (ids, versions) = some[0].definition, all_of((one.ids, one.versions) for one in some)
    order: NDArray[np.intp] = np.argsort(definition.order.keys(ids), kind="stable")  # joins lists that are in order already in passing
    whole: Slots = np.logical_or.reduce([one.whole for one in some])
    return SlotEntries(definition, max(one.step for one in some), ids[order], versions[order], whole)
