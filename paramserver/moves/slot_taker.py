"""The taker's side of a hand-over of slots: it reads records to its own disk ahead of time, changed ones again, then takes the rows.

What givers say is kept until it is on disk: so they say it once. Once `take` has returned, the rows are in the shard's own row log: it can
bring them back like any that it wrote. A crash before that leaves no trace. The taker's epoch must be above the giver's by then
(`claim_shard`): then a row's later version is always the higher one. Apply thread only. What must not live here: when slots move.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvemb.arrays.ids import are_among
from kvemb.arrays.row_index import END, RowIndex
from kvemb.errors import FencedError, JournalFullError, StorageError
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef

from ..model.row_ages import RowAges
from ..model.tables import Ids, Slots, Tables, TableState, all_of
from ..row_log.log_flush import ReadRecords
from ..row_log.reconstruct import require_versions
from ..row_log.run_set import Runs, RunView
from ..row_log.run_writer import RunWriter
from ..row_log.state_file import ShardState
from .slot_entries import SlotEntries

_SLICE_BYTES, _LEARNED_ROWS = 4 << 20, 1 << 16
_GONE = np.uint64((1 << 64) - 2)  # in the place of the version of a row that exists no more; no row has it
_NOT_TAKEN = "Nothing was taken; it is tried again when the node has its rows back."


class _Coming:
    """One table's rows that are to come."""

    def __init__(self, definition: TableDef) -> None:
        self.definition = definition
        self.owed = RowIndex(order=definition.order)  # not on disk as their giver knows them, with the versions that it told
        self.runs: list[RunWriter] = []  # of the others, in files that do not count yet
        self.on_disk = RunView(0, {})  # these, to be read
        self.n_rows = self.n_here = 0  # on disk; of these, rows that the shard has already

    def versions(self, ids: Ids) -> Ids:
        """Return the version that each row has on disk, 0 for none: uint64 [n]."""
        versions, exist = self.on_disk.versions(self.definition, ids)
        return np.where(exist, versions, np.uint64(0))

    def missed(self, one: SlotEntries) -> Ids:
        """Return the rows that a giver lacks among all that it has."""
        known = np.union1d(all_of(self.on_disk.between(self.definition))[0], self.owed.arrays()[0])
        known = known[one.whole[self.definition.placement.slots(known)]]
        return known[~are_among(known, one.ids)] if len(known) else known

    def learn(self, ids: Ids, versions: Ids) -> None:
        """Note what givers say of n rows; version 0: it is gone."""
        differ = self.versions(ids) != versions
        self.owed.erase(ids[~differ])
        self.owed.put(ids[differ], np.where(versions == 0, _GONE, versions)[differ])

    def brought(self, ids: Ids, wanted: Ids, got: Ids, here: NDArray[np.bool_]) -> None:
        """Note that rows were written to a run, with versions `got` (0: not); `wanted` were those owed."""
        before = self.versions(ids) != 0
        now = (got != 0) | (before & (wanted != _GONE))
        self.n_rows += int(np.count_nonzero(now)) - int(np.count_nonzero(before))
        self.n_here += int(np.count_nonzero(here & now & ~before))
        self.owed.erase(ids[(got == wanted) | (wanted == _GONE)])


class SlotTaker:
    """Takes slots over for one shard, one hand-over at a time.

    Args:
        tables: of the shard.
        runs: its row log.
        read: the records of rows in storage.
        state: returns the shard's, as of the last batch applied.
        epoch: returns that of this shard.
        ages: of the shard's rows.
        raise_step: lets a table count at least so many applies.

    Attributes:
        since: by giver, as of which version what it said is known.
    """

    def __init__(
        self,
        tables: Tables,
        runs: Runs,
        read: ReadRecords,
        state: Callable[[], ShardState],
        *,
        epoch: Callable[[], int],
        ages: RowAges,
        raise_step: Callable[[TableState, int], None] = TableState.raise_step,
    ) -> None:
        self._tables, self._runs, self._read, self._state, self._epoch = tables, runs, read, state, epoch
        self._raise_step, self._ages = raise_step, ages
        self._coming: dict[str, _Coming] = {}  # by the table's key
        self.since: Mapping[int, int] = {}

    @property
    def n_owed(self) -> int:
        """How many rows are not on disk as their givers know them."""
        return sum(len(coming.owed) for coming in self._coming.values())

    def learn(self, entries: Sequence[SlotEntries], since: Mapping[int, int]) -> Iterator[int]:
        """Note what all givers say, of a table once, and as of which version each; a slice for every value asked for, with its rows."""
        for one in entries:
            coming = self._coming.setdefault(one.definition.key, _Coming(one.definition))
            if one.whole.any():
                missed = coming.missed(one)
                coming.learn(missed, np.zeros(len(missed), np.uint64))
                self._tables.state(one.definition).make_room(one.ids)
            coming.owed.make_room(one.ids)
            for start in range(0, len(one.ids), _LEARNED_ROWS):
                ids = one.ids[start : start + _LEARNED_ROWS]
                coming.learn(ids, one.versions[start : start + _LEARNED_ROWS])
                yield len(ids)
        self.since = since

    def read_ahead(self) -> Iterator[int]:
        """Bring records that are owed to disk while givers go on with them; a slice for every value asked for, with its rows.

        Raises:
            StorageError, JournalFullError: `give_up`, and begin again.
        """
        for coming in self._coming.values():
            yield from self._bring(coming)

    def take(self, entries: Sequence[SlotEntries], giver_epoch: int, slots: Slots) -> None:
        """Take over the rows of givers that have drained: from here on this shard can bring them back. The index follows later.

        Args:
            entries: what givers said at last, which is learned.
            giver_epoch: the highest of theirs.
            slots: bool [16384], all that come.

        Raises:
            FencedError: this shard's epoch is not above the giver's; nothing changed. It is to start again above that.
            LostRowError: storage does not have a row as its giver knows it; nothing changed. Once it is repaired, call again.
            StorageError, JournalFullError: nothing changed; call again, with new answers.
        """
        if giver_epoch >= self._epoch():
            raise FencedError(
                f"slots of a shard in epoch {giver_epoch} cannot be taken by one in epoch {self._epoch()}: what it writes would look older "
                "than what it was given. Nothing was taken; it is to start again with a higher epoch."
            )
        come = [self._coming[one.definition.key] for one in entries]
        for coming in come:
            for _ in self._bring(coming, last=True):
                pass
        now = self._state()
        as_of = make_version(now.epoch, now.k)
        for one, coming in zip(entries, come, strict=True):
            table = now.of(one.definition)
            # What other shards have erased of these slots until now is not known here.
            n_rows = table.n_rows + coming.n_rows - coming.n_here
            now = now.with_table(replace(table, step=max(table.step, one.step), n_rows=n_rows, erased_since=as_of))
        ages = self._ages.restarted(slots, as_of)  # the giver's versions do not count this shard's batches
        self._runs.publish([run for coming in come for run in coming.runs], replace(now, since=ages.since))
        self._ages.become(ages)
        for one, coming in zip(entries, come, strict=True):
            state = self._tables.state(one.definition)
            state.took(coming.on_disk, coming.n_rows - coming.n_here)
            self._raise_step(state, one.step)
        self.give_up()  # what tables had that were dropped

    def give_up(self) -> None:
        """Forget what givers said, and the rows that were read ahead."""
        for coming in self._coming.values():
            self._runs.give_up(coming.runs)
        self._coming, self.since = {}, {}

    def _bring(self, coming: _Coming, *, last: bool = False) -> Iterator[int]:
        """Write a run of the rows that are owed; at last all of them must be in storage as their givers know them."""
        if not len(coming.owed):
            return
        state, record, low = self._tables.state(coming.definition), coming.definition.record, 0
        now, run = self._state(), self._runs.begin(coming.definition)
        coming.runs.append(run)
        try:
            while low < END:
                ids, wanted, low = coming.owed.portion(low, n_rows=max(1, _SLICE_BYTES // record.size_bytes))
                gone, got = wanted == _GONE, np.zeros(len(ids), np.uint64)
                records, found = self._read(state, ids[~gone])
                got[~gone] = np.where(found, record.versions(records), np.uint64(0))
                if last:
                    said = coming.definition, ids[~gone], got[~gone], wanted[~gone]
                    require_versions(*said, "in storage", by="the shard that hands the row over", then=_NOT_TAKEN)
                run.add_rows(ids[~gone][found], records[found])
                run.add_erased(ids[gone], make_version(now.epoch, now.k))
                coming.brought(ids, wanted, got, state.versions(ids) != 0)
                yield len(ids)
            self._whole(coming)
        except StorageError:
            self._whole(coming)  # what was read until now stays
            raise
        except JournalFullError:
            self.give_up()
            raise

    def _whole(self, coming: _Coming) -> None:
        coming.runs[-1].finish()
        coming.on_disk, owed = self._runs.written(coming.runs), coming.owed.arrays()
        coming.owed = RowIndex(order=coming.definition.order)  # a small one
        coming.owed.put(*owed)
