"""The taker's side of a hand-over of slots: it reads records to its own disk ahead of time, changed ones again, then takes the rows.

Once `take` has returned, index and records are in the shard's own folder: it can bring the rows back like any that it wrote. A crash before
that leaves no trace. The taker's epoch must be above the giver's by then (`claim_shard`): then a row's later version is always the higher
one. Apply thread only. What must not live here: when slots are handed over.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvemb.errors import FencedError, LostRowError
from kvemb.schema.record import split_version

from ..model.tables import Tables, TableState
from ..snapshot.run_set import Runs
from ..snapshot.run_writer import RunWriter
from ..snapshot.snapshotter import ReadRecords
from .slot_entries import Ids, SlotEntries, versions_among

_SLICE_BYTES, _SYNCED_BYTES = 4 << 20, 16 << 20
_NONE = np.empty(0, np.uint64)


class SlotTaker:
    """Takes slots over for one shard, one hand-over at a time.

    Args:
        tables: of the shard.
        runs: its local snapshot.
        read: the records of rows in storage.
        note_came: notes durably that the index has these rows now.
        epoch: returns that of this shard.
        raise_step: lets a table count at least so many applies.
    """

    def __init__(
        self,
        tables: Tables,
        runs: Runs,
        read: ReadRecords,
        note_came: Callable[[Sequence[SlotEntries]], None],
        *,
        epoch: Callable[[], int],
        raise_step: Callable[[TableState, int], None] = TableState.raise_step,
    ) -> None:
        self._tables, self._runs, self._read, self._note_came, self._epoch = tables, runs, read, note_came, epoch
        self._raise_step = raise_step
        self._writers: list[RunWriter] = []
        self._ahead: dict[str, tuple[Ids, Ids]] = {}  # by the table's key: ids, ascending, and versions of rows that are on disk already

    def behind(self, entries: Sequence[SlotEntries]) -> list[SlotEntries]:
        """Return those of a giver's rows that are not on disk as it knows them, table by table."""
        return [some for one in entries if len((some := self._not_on_disk(one)).ids)]

    def read_ahead(self, entries: Sequence[SlotEntries]) -> Iterator[int]:
        """Bring records to disk while the giver goes on with them, a slice for every value asked for; yields how many rows it was.

        Rows that have changed since the giver's answer are `behind` its next one; `take` reads them at the latest.

        Raises:
            StorageError, JournalFullError: reading ahead was given up; begin again.
        """
        try:
            for one in entries:
                yield from self._bring(one)
        except BaseException:
            self.give_up()
            raise

    def take(self, entries: Sequence[SlotEntries], giver_epoch: int) -> None:
        """Take over the rows of a giver that has drained: from here on this shard can bring them back.

        Raises:
            FencedError: this shard's epoch is not above the giver's; nothing changed. It is to start again above that.
            LostRowError: storage does not have a row as its giver knows it; nothing changed. Once it is repaired, call again.
            StorageError, JournalFullError: nothing changed; call again.
            OSError, FencedError: the rows are known and not durable; call again.
        """
        if giver_epoch >= self._epoch():
            raise FencedError(
                f"slots of a shard in epoch {giver_epoch} cannot be taken by one in epoch {self._epoch()}: what it writes would look older "
                "than what it was given. Nothing was taken; it is to start again with a higher epoch."
            )
        rest: list[RunWriter] = []
        try:
            for one in entries:
                rest += self._bring_rest(one)
            self._runs.publish([*self._writers, *rest], self._runs.cut)
        except BaseException:
            for writer in rest:
                writer.drop()
            raise
        self._writers, self._ahead = [], {}
        for one in entries:
            state = self._tables.state(one.definition)
            state.took(one.ids, one.versions)
            self._raise_step(state, one.step)
        self._note_came(entries)

    def give_up(self) -> None:
        """Forget the rows that were read ahead."""
        for writer in self._writers:
            writer.drop()
        self._writers, self._ahead = [], {}

    def _bring(self, one: SlotEntries) -> Iterator[int]:
        state, writer = self._tables.state(one.definition), self._runs.begin(one.definition)
        self._writers.append(writer)
        state.make_room(one.ids)
        ids, versions, n_synced = [_NONE], [_NONE], 0
        for some, _ in _slices(one):
            records, found = self._read(state, some)
            writer.add_rows(some[found], records[found])
            if writer.size_bytes - n_synced >= _SYNCED_BYTES:
                writer.sync()
                n_synced = writer.size_bytes
            ids.append(some[found])
            versions.append(one.definition.record.versions(records[found]))
            yield len(some)
        writer.sync()
        before = self._ahead.get(one.definition.key, (_NONE, _NONE))
        self._ahead[one.definition.key] = _newest(*before, np.concatenate(ids), np.concatenate(versions))

    def _not_on_disk(self, one: SlotEntries) -> SlotEntries:
        differ = versions_among(one.ids, *self._ahead.get(one.definition.key, (_NONE, _NONE))) != one.versions
        return SlotEntries(one.definition, one.step, one.ids[differ], one.versions[differ])

    def _bring_rest(self, one: SlotEntries) -> list[RunWriter]:
        """Write a run of the rows that are not on disk as the giver knows them."""
        rest = self._not_on_disk(one)
        if not len(rest.ids):
            return []
        state, writer = self._tables.state(one.definition), self._runs.begin(one.definition)
        try:
            for some, versions in _slices(rest):
                records, found = self._read(state, some)
                got = np.where(found, one.definition.record.versions(records), np.uint64(0))
                _require(state, some, got, versions)
                writer.add_rows(some, records)
        except BaseException:
            writer.drop()
            raise
        return [writer]


def _newest(ids: Ids, versions: Ids, later_ids: Ids, later_versions: Ids) -> tuple[Ids, Ids]:
    """Join the rows of two runs, ascending by id; the later one counts where both have a row."""
    kept = ~np.isin(ids, later_ids)
    ids, versions = np.concatenate([ids[kept], later_ids]), np.concatenate([versions[kept], later_versions])
    order = np.argsort(ids)
    return ids[order], versions[order]


def _slices(one: SlotEntries) -> Iterator[tuple[Ids, Ids]]:
    """Return ids and versions, some at a time, in the order in which runs have them."""
    n_slice, order = max(1, _SLICE_BYTES // one.definition.record.size_bytes), np.argsort(one.definition.order.keys(one.ids))
    some = (order[start : start + n_slice] for start in range(0, len(order), n_slice))
    return ((one.ids[at], one.versions[at]) for at in some)


def _require(state: TableState, ids: Ids, got: Ids, expected: Ids) -> None:
    wrong = got != expected
    if wrong.any():
        at, definition = int(np.argmax(wrong)), state.definition
        found = f"version {split_version(int(got[at]))}" if got[at] else "no row"
        raise LostRowError(
            f"table {definition.name!r}, id {definition.shown_id(int(ids[at]))}: {found} in storage, expected version "
            f"{split_version(int(expected[at]))} by the shard that hands the row over ({int(wrong.sum())} such rows). Nothing was taken; "
            "it is tried again when the node has its rows back."
        )
