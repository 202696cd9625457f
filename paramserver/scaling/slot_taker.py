"""The taker's side of a hand-over of slots: it reads records to its own disk ahead of time, changed ones again, then takes the rows.

Once `take` has returned, index and records are in the shard's own folder: it can bring the rows back like any that it wrote. A crash before
that leaves no trace. The taker's epoch must be above the giver's by then (`claim_shard`): then a row's later version is always the higher
one. Apply thread only.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvemb.arrays.ids import are_among
from kvemb.errors import FencedError
from kvemb.schema.record import make_version

from ..model.row_ages import RowAges
from ..model.tables import Tables, TableState
from ..row_log.log_flush import ReadRecords
from ..row_log.reconstruct import require_versions
from ..row_log.run_set import Runs
from ..row_log.run_writer import RunWriter, dropped_on_error
from ..row_log.state_file import ShardState
from .slot_entries import Ids, SlotEntries, joined, versions_among, with_later

_SLICE_BYTES, _SYNCED_BYTES = 4 << 20, 16 << 20
_NONE = np.empty(0, np.uint64)
_NOT_TAKEN = "Nothing was taken; it is tried again when the node has its rows back."


class SlotTaker:
    """Takes slots over for one shard, one hand-over at a time."""

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
        self._writers: list[RunWriter] = []
        self._ahead: dict[str, tuple[Ids, Ids]] = {}  # by the table's key: ids, ascending, and versions of rows that are on disk already

    def behind(self, entries: Sequence[SlotEntries]) -> list[SlotEntries]:
        """Return those of a giver's rows that are not on disk as it knows them, table by table."""
        return [some for one in entries if len((some := self._not_on_disk(one)).ids)]

    def read_ahead(self, entries: Sequence[SlotEntries]) -> Iterator[int]:
        """Bring records to disk while the giver goes on with them, a slice for every value asked for; yields how many rows it was.

        Rows that have changed since the giver's answer are `behind` its next one; `take` reads them at the latest.
        """
        for one in entries:
            yield from self._bring(one)

    def take(self, entries: Sequence[SlotEntries], giver_epoch: int) -> None:
        """Take over the rows of a giver that has drained: from here on this shard can bring them back.

        Raises:
            FencedError: this shard's epoch is not above the giver's; nothing changed. It is to start again above that.
            LostRowError: storage does not have a row as its giver knows it; nothing changed. Once it is repaired, call again.
            StorageError, JournalFullError: nothing changed; call again.
        """
        if giver_epoch >= self._epoch():
            raise FencedError(
                f"slots of a shard in epoch {giver_epoch} cannot be taken by one in epoch {self._epoch()}: what it writes would look older "
                "than what it was given. Nothing was taken; it is to start again with a higher epoch."
            )
        rest: list[RunWriter] = []
        n_new: list[int] = []  # of each table, rows that are not here
        with dropped_on_error(rest):
            now, ages = self._state(), self._ages
            as_of = make_version(now.epoch, now.k)
            for one in entries:
                self._bring_rest(one, as_of, rest)
                n_new.append(int(np.count_nonzero(self._tables.state(one.definition).versions(one.ids) == 0)))
            for one, n in zip(entries, n_new, strict=True):
                table = now.of(one.definition)
                # What other shards have erased of these slots until now is not known here.
                now = now.with_table(replace(table, step=max(table.step, one.step), n_rows=table.n_rows + n, erased_since=as_of))
                ages = ages.restarted(one.definition, one.ids, as_of)  # the giver's versions do not count this shard's batches
            self._runs.publish([*self._writers, *rest], replace(now, since=ages.since))
        self._writers, self._ahead = [], {}
        self._ages.become(ages)
        for one, n in zip(entries, n_new, strict=True):
            state = self._tables.state(one.definition)
            state.took(one.ids, one.versions, n)
            self._raise_step(state, one.step)

    def give_up(self) -> None:
        """Forget the rows that were read ahead."""
        for writer in self._writers:
            writer.drop()
        self._writers, self._ahead = [], {}

    def _bring(self, one: SlotEntries) -> Iterator[int]:
        state, writer = self._tables.state(one.definition), self._runs.begin(one.definition)
        self._writers.append(writer)
        state.make_room(one.ids)
        brought: list[tuple[Ids, Ids]] = []
        for some, _ in _slices(one):
            records, found = self._read(state, some)
            writer.add_rows(some[found], records[found])
            brought.append((some[found], one.definition.record.versions(records[found])))
            yield len(some)
        writer.sync()
        self._ahead[one.definition.key] = with_later(*self._ahead.get(one.definition.key, (_NONE, _NONE)), *joined(brought))

    def _not_on_disk(self, one: SlotEntries) -> SlotEntries:
        differ = versions_among(one.ids, *self._ahead.get(one.definition.key, (_NONE, _NONE))) != one.versions
        return SlotEntries(one.definition, one.step, one.ids[differ], one.versions[differ])

    def _bring_rest(self, one: SlotEntries, as_of: int, writers: list[RunWriter]) -> None:
        """Add a run of the rows that are not on disk as the giver knows them, and of those on disk that it has erased since."""
        rest, (ahead, _) = self._not_on_disk(one), self._ahead.get(one.definition.key, (_NONE, _NONE))
        erased = ahead[~are_among(ahead, one.ids)]
        if not len(rest.ids) and not len(erased):
            return
        state, writer = self._tables.state(one.definition), self._runs.begin(one.definition)
        writers.append(writer)
        for some, versions in _slices(rest):
            records, found = self._read(state, some)
            got = np.where(found, one.definition.record.versions(records), np.uint64(0))
            require_versions(one.definition, some, got, versions, "in storage", by="the shard that hands the row over", then=_NOT_TAKEN)
            writer.add_rows(some, records)
        writer.add_erased(erased, as_of)


def _slices(one: SlotEntries) -> Iterator[tuple[Ids, Ids]]:
    """Return ids and versions, some at a time, in the order in which runs have them."""
    n_slice, order = max(1, _SLICE_BYTES // one.definition.record.size_bytes), np.argsort(one.definition.order.keys(one.ids))
    some = (order[start : start + n_slice] for start in range(0, len(order), n_slice))
    return ((one.ids[at], one.versions[at]) for at in some)
