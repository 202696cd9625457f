"""The rules of a row's change: from the records that were read to the records to write, for one table of a batch. Pure.

A found row must have the version that the index holds, or this very batch's version. The latter means that an earlier try of the batch
wrote it already. Any other row is lost or foreign, and is not written over: an apply on top would hide the loss for ever.

In a replay a row may also have the version of a later batch of the journal: the process that crashed had written it. And a row that a later
batch of the journal erases is not touched until then: it may be gone already, and will be gone in the end.

Batch numbers go on from epoch to epoch, and each batch is in the journal before any row of it is written. So when a process has read the
journal to its end, at batch k, no row can have a higher number from an earlier epoch: a row that has one proves that batches are missing
(`Timeline`). An older or missing row is no such proof: storage loses rows, and the journal brings them back.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.rounding import round_nearest, round_stochastic
from kvemb.arrays.row_index import END, RowIndex
from kvemb.errors import FencedError, JournalBehindError, LostRowError
from kvemb.schema.record import MAX_K, make_version, split_version
from kvemb.schema.table_def import TableDef

from .batch import ASSIGN, ERASE, CheckedRows
from .tables import TableState

ORDERS = (
    "No row was taken back, and no version in storage is lost. If the shard's last folder is elsewhere, correct "
    "parameter_servers.data_dir; else put the files of that folder back as they were. Where they are gone for good, start the shard with "
    "--roll-back: it goes on from where its journal ends, rows that are newer are set back, and the pushes behind it are lost (load a "
    "checkpoint then, where one is newer)."
)


@dataclass
class Timeline:
    """The epochs of a shard's versions, as one of its processes knows them.

    Args:
        epoch: of this process's versions.
        k: of the last batch of all epochs before.
        where: the shard and its journal, for messages.
        roll_back: whether rows that are ahead are to be set back, because an operator said so.
    """

    epoch: int
    k: int = MAX_K
    where: str = "this shard's journal"
    roll_back: bool = False
    _before: int = field(default=0, init=False)  # the epoch of batches up to k that are still to be applied; 0: there are none

    def rise(self, epoch: int, k: int, applied: int) -> None:
        """Go on in a higher epoch; no batch above k was numbered before, none after `applied` is applied yet. Apply thread only."""
        self._before = self._before if self._before and applied < self.k else self.epoch
        self.epoch, self.k = epoch, k

    def version(self, k: int) -> int:
        """Return the version of batch k, the last one applied, or a lower one: those behind it, perhaps of the epoch before, are above."""
        return make_version(self._before if self._before and k < self.k else self.epoch, k)

    def refuse_lost(self, definition: TableDef, ids: NDArray[np.uint64], stored: NDArray[np.uint64], known: NDArray[np.uint64]) -> None:
        """Refuse rows that only a batch which is missing in the journal can have written.

        Args:
            ids: uint64 [n].
            stored: uint64 [n], versions in storage (0 = not found), without those of the batch at work.
            known: uint64 [n], versions of the index (0 = does not exist).
        """
        if self.roll_back:
            return
        before = stored >> np.uint64(48) < np.uint64(self.epoch)
        lost = (stored > known) & ((known > 0) | (before & ((stored & np.uint64(MAX_K)) > np.uint64(self.k))))
        if not lost.any():
            return
        at = int(np.argmax(np.where(lost, stored, np.uint64(0))))
        expected = f"version {split_version(int(known[at]))}" if known[at] else "no such row"
        raise JournalBehindError(
            f"{self.where} lacks batches that were acknowledged and applied: table {definition.name!r}, id "
            f"{definition.shown_id(int(ids[at]))} has version {split_version(int(stored[at]))} in storage, expected {expected} by the "
            f"shard's index ({int(lost.sum())} such rows or more; versions are (epoch, k)). The journal reached batch {self.k} when the "
            f"shard was started. {ORDERS}"
        )


Ids = NDArray[np.uint64]
_BEHIND = "A node lost writes, or another program wrote rows: bring the node's data back."


class Replay:
    """The changes of rows by the batches that a replay has still before it; or by one batch that is stored by half."""

    def __init__(self, newest: int) -> None:
        self.newest = newest
        self._erased: dict[str, RowIndex] = {}
        self._written: dict[str, tuple[TableDef, RowIndex]] = {}

    def reach(self, version: int) -> None:
        """Note one more batch after all before."""
        self.newest = version

    def will_change(self, kind: str, rows: CheckedRows, version: int) -> None:
        """Note a batch's rows of one table; in the order of the batches."""
        if not len(rows.ids):
            return
        if kind == ERASE:
            index = self._erased.setdefault(rows.definition.key, RowIndex())
        else:
            _, index = self._written.setdefault(rows.definition.key, (rows.definition, RowIndex()))
        index.put(rows.ids, np.full(len(rows.ids), version, np.uint64))

    def wanted(self, definition: TableDef, ids: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the versions of rows after the replay, 0 for those that do not exist then: uint64 [n]; `known` where nothing is noted."""
        none = np.zeros(len(ids), np.uint64)
        written = self._written[definition.key][1].get(ids) if definition.key in self._written else none
        erased = self._erased[definition.key].get(ids) if definition.key in self._erased else none
        return np.where(erased > written, none, np.where(written > 0, written, known))

    def written(self) -> Iterator[tuple[TableDef, NDArray[np.uint64]]]:
        """Yield the ids of all rows that are written, table by table and portion by portion."""
        for definition, index in self._written.values():
            low = 0
            while low < END:
                ids, _, low = index.portion(low)
                yield definition, ids

    def still_wanted(self, rows: CheckedRows, version: int) -> CheckedRows:
        """Return the rows that no batch after this version erases."""
        erased = self._erased.get(rows.definition.key)
        return rows if erased is None else rows.take(erased.get(rows.ids) <= np.uint64(version))


def may_exist(state: TableState, replay: Replay | None, ids: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which rows are in storage, or may be: in a replay also those of later batches, which may have been written."""
    known = state.versions(ids)
    exist: NDArray[np.bool_] = (known if replay is None else np.maximum(known, replay.wanted(state.definition, ids, known))) != 0
    return exist


def records_to_write(
    definition: TableDef,
    ids: NDArray[np.uint64],
    known: NDArray[np.uint64],
    stored: NDArray[np.uint64],
    *,
    version: int,
    newest: int,
    timeline: Timeline,
) -> NDArray[np.bool_]:
    """Compare the versions in storage with the index; return which rows this batch must still write: bool [n].

    Args:
        ids: uint64 [n].
        known: uint64 [n], versions of the index (0 = does not exist).
        stored: uint64 [n], versions in storage (0 = not found).
    """
    todo: NDArray[np.bool_] = stored < np.uint64(version)
    todo |= stored > np.uint64(newest)
    wrong = stored != known
    wrong &= todo
    if not wrong.any():
        return todo
    refuse_later_epoch(definition, ids[wrong], stored[wrong], timeline.epoch)
    timeline.refuse_lost(definition, ids[wrong], stored[wrong], known[wrong])
    at = int(np.argmax(wrong))
    row = f"table {definition.name!r}, id {definition.shown_id(int(ids[at]))}"
    got, expected = (f"version {split_version(int(v))}" if v else "no row" for v in (stored[at], known[at]))
    raise LostRowError(
        f"{row}: {got} in storage, expected {expected} by the shard's index ({int(wrong.sum())} such rows or more in the batch; versions "
        f"are (epoch, k)). Nothing was written over it. {_BEHIND}"
    )


def refuse_later_epoch(definition: TableDef, ids: Ids, stored: Ids, epoch: int, known: Ids | None = None) -> None:
    """Refuse rows that a later owner of the shard has written: the fence of every write that looks before.

    Args:
        ids: uint64 [n].
        stored: uint64 [n], versions in storage (0 = not found).
        known: uint64 [n], versions that rows are to have; these may be of a later epoch (a load's) than this process's.
    """
    ours = np.uint64(epoch) if known is None else np.maximum(known >> np.uint64(48), np.uint64(epoch))
    later = stored >> np.uint64(48) > ours
    if later.any():
        at = int(np.argmax(later))
        row = f"table {definition.name!r}, id {definition.shown_id(int(ids[at]))}: version {split_version(int(stored[at]))}"
        raise FencedError(f"{row} in storage is of a later epoch than ours ({epoch}): another process owns this shard now")


def rows_to_erase(
    definition: TableDef, ids: Ids, stored: Ids, found: NDArray[np.bool_], *, version: int, newest: int, epoch: int
) -> NDArray[np.bool_]:
    """Return which rows an erase of this version may take away: bool [n]. Those created again after it have a version above its own.

    Args:
        ids: uint64 [n].
        stored: uint64 [n], versions in storage; without meaning where `found` is False.
        found: bool [n].
    """
    behind = found & (stored > np.uint64(newest))
    refuse_later_epoch(definition, ids[behind], stored[behind], epoch)
    may: NDArray[np.bool_] = found & (stored < np.uint64(version))
    return may


def new_records(
    state: TableState,
    kind: str,
    rows: CheckedRows,
    records: NDArray[np.uint8],
    exists: NDArray[np.bool_],
    *,
    version: int,
    out: NDArray[np.uint8],
) -> None:
    """Compute the records of n rows after this batch.

    Args:
        records: uint8 [n, record bytes], as read.
        exists: bool [n]; where false, the record has no meaning and the row is created.
        out: uint8 [n, record bytes], contiguous, to be filled.
    """
    definition, optimizer = state.definition, state.optimizer
    n, dim, dtype = len(rows.ids), definition.dim, definition.dtype
    if kind == ASSIGN:
        given, row_state = rows.rows[:, :dim], rows.rows[:, dim:]
        stored = round_nearest(given, dtype)
        definition.record.encode(rows.ids, version, stored, row_state if row_state.size else optimizer.initial_state(n, dim), out)
        return
    weights, row_state = first_values(state, rows.ids, records, exists)
    optimizer.update_in_place(weights, row_state, rows.rows, optimizer.factors(rows.hyper, state.step + 1))
    stored = round_stochastic(weights, dtype, ids=rows.ids, versions=version, seed=definition.seed)
    definition.record.encode(rows.ids, version, stored, row_state, out)


def first_values(
    state: TableState, ids: NDArray[np.uint64], records: NDArray[np.uint8], exists: NDArray[np.bool_]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return weights [n, dim] and state [n, s] that an update begins with, of rows that it may create; arrays of their own.

    Args:
        ids: uint64 [n].
        records: uint8 [n, record bytes].
        exists: bool [n]; where false, the record has no meaning and the row is created.
    """
    definition = state.definition
    if not exists.any():
        return definition.initial_rows(ids), state.optimizer.initial_state(len(ids), definition.dim)
    weights, row_state = _own(definition.record.weights(records), records), _own(definition.record.state(records), records)
    if not exists.all():
        new = ~exists
        weights[new] = definition.initial_rows(ids[new])  # the values that a pull before the creation shows
        row_state[new] = state.optimizer.initial_state(int(new.sum()), definition.dim)
    return weights, row_state


def _own(values: NDArray[np.float32], records: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The values themselves, or a copy where they lie in the records, as those of one row alone may: the read records must not change."""
    return values.copy() if np.may_share_memory(values, records) else values
