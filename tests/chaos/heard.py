"""Judges what a subscriber heard: was every acknowledged push told, each batch once, in order, and is its end the table's? Pure.

A push is one part of each set of rows that share their fate (`ledger.fates_of`), and a part is in one batch. The rows that were read with
the events say between which of their versions it was applied: the newest that lacks its digit, and the oldest that has it. So a batch with
a version between, in which all rows of the part are, must have been told; or, where the journal was cut, each of them as a row, before any
newer batch with rows of the same fate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from chaos.ledger import ACKED, DIM, ROWS_PER_GENERATION, Ids, Plan, Record, fates_of, fates_of_rows, torn
from chaos.subscriber import BATCHES, BEGUN, ROW, HeardEvent
from kvemb.schema.record import make_version

_NEVER = np.uint64(2**64 - 1)
Versions = NDArray[np.uint64]


@dataclass
class HeardVerdict:
    """What the events say about the record. Everything but the first five must be 0."""

    events: int = 0
    batches: int = 0
    begun_again: int = 0  # at the start, since no position held
    parts_told: int = 0  # acknowledged, each in a batch of its own
    parts_told_as_rows: int = 0  # since the journal did not reach back
    lost: int = 0  # acknowledged parts that were not told
    doubled: int = 0  # batches told twice behind one beginning
    out_of_order: int = 0  # batches behind later ones of their shard, and rows that went back
    torn: int = 0  # rows
    behind: int = 0  # rows whose last event is older than the table's row
    examples: list[str] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether the promise was kept."""
        return self.parts_told > 0 and not (self.lost or self.doubled or self.out_of_order or self.torn or self.behind)

    def __str__(self) -> str:
        words = [f"{f.name.replace('_', ' ')} {getattr(self, f.name)}" for f in fields(self) if f.name != "examples"]
        return "heard: " + ", ".join(words) + "".join(f"\n  {example}" for example in self.examples[:20])


class HeardJudge:
    """Compares events with records.

    Args:
        plan: of the run.
        records: one per trainer, in order.
        slot_shards: uint16 [16384] of each cluster map that there was, the writer of each slot.
        events: as they were heard.
    """

    def __init__(
        self, plan: Plan, records: Sequence[Record], slot_shards: Sequence[NDArray[np.uint16]], events: Sequence[HeardEvent]
    ) -> None:
        self._plan, self._events = plan, events
        self._acked = [record.numbers(ACKED).tolist() for record in records]
        self._fates, self._fate_of_slot = fates_of(slot_shards)
        begun = [event.why for event in events if event.kind == BEGUN]
        self.verdict = HeardVerdict(len(events), begun_again=len(begun), examples=[f"begun again: {why}" for why in begun])
        sizes = [len(event.ids) for event in events]
        ids = np.concatenate([np.empty(0, np.int64), *(event.ids for event in events)])
        order = np.argsort(ids, kind="stable")  # by row, and of each row in the order in which it was told
        self._ids, self._at = ids[order], np.repeat(np.arange(len(events)), sizes)[order]
        self._versions = np.concatenate([np.empty(0, np.uint64), *(event.versions for event in events)])[order]
        self._rows = np.concatenate([np.empty((0, DIM), np.float32), *(event.rows for event in events)])[order]
        self._is_row = np.array([event.kind == ROW for event in events], bool)
        self._batch = np.array([make_version(e.epoch, e.k) if e.kind in BATCHES else 0 for e in events], np.uint64)
        fates = fates_of_rows(self._fate_of_slot, ids)
        each = np.unique(np.stack([fates, np.repeat(np.arange(len(events)), sizes)]), axis=1)  # each fate with its events, in order
        self._told_at = [each[1, each[0] == fate] for fate in range(self._fates.shape[1])]
        self._newest = [np.maximum.accumulate(self._batch[at]) for at in self._told_at]  # version of a batch up to each

    def run(self, final: "tuple[Ids, Versions]") -> HeardVerdict:
        """Judge all of it.

        Args:
            final: ids and versions of the table's rows at the end.
        """
        self._judge_batches()
        self._judge_rows(*final)
        per = self._plan.pushes_per_generation
        for generation in range(max((n for acked in self._acked for n in acked), default=-1) // per + 1):
            self._judge_pushes(generation)
        return self.verdict

    def _judge_batches(self) -> None:
        told: dict[int, list[int]] = {}  # by shard, behind one beginning
        for event, version in zip(self._events, self._batch.tolist(), strict=True):
            if event.kind == BEGUN:
                told = {}
            if not version:
                continue
            self.verdict.batches += 1
            before = told.setdefault(event.shard, [])
            if before and version <= before[-1]:
                name = "doubled" if version in before else "out_of_order"
                setattr(self.verdict, name, getattr(self.verdict, name) + 1)
                self.verdict.examples.append(f"shard {event.shard}: batch {event.k} of epoch {event.epoch} is {name.replace('_', ' ')}")
            before.append(version)

    def _judge_rows(self, ids: Ids, versions: Versions) -> None:
        verdict, same = self.verdict, self._ids[1:] == self._ids[:-1]
        back = np.flatnonzero(same & (self._versions[1:] < self._versions[:-1]))
        verdict.out_of_order += len(back)
        verdict.examples += [f"row {self._ids[i]} goes from version {self._versions[i]} to {self._versions[i + 1]}" for i in back]
        verdict.torn += int(torn(self._rows).sum())
        last = np.searchsorted(self._ids, ids, "right") - 1
        told = (last >= 0) & (self._ids[last] == ids) if len(self._ids) else np.zeros(len(ids), bool)
        late = np.flatnonzero(~told | (versions != np.where(told, self._versions[last] if len(self._ids) else 0, 0)))
        verdict.behind += len(late)
        verdict.examples += [f"row {ids[i]} has version {versions[i]}, which was not told" for i in late]

    def _judge_pushes(self, generation: int) -> None:
        ids = self._plan.ids(generation)
        starts, ends = np.searchsorted(self._ids, ids), np.searchsorted(self._ids, ids, "right")
        row = np.repeat(np.arange(ROWS_PER_GENERATION), ends - starts)  # of the generation, [m]: one for each time that it was told
        some = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        told = _Told(row, self._at[some], self._versions[some], self._rows[some])
        fates = fates_of_rows(self._fate_of_slot, ids)
        per = self._plan.pushes_per_generation
        for trainer, acked in enumerate(self._acked):
            for n in (n for n in acked if n // per == generation):
                self._judge_push(told, trainer, n, fates)

    def _judge_push(self, told: "_Told", trainer: int, n: int, fates: NDArray[np.integer]) -> None:
        column, digit = self._plan.place(trainer, n)
        has = (told.rows[:, column].astype(np.int64) >> (2 * digit)) & 3 > 0
        lacks_up_to, has_from = np.zeros(ROWS_PER_GENERATION, np.uint64), np.full(ROWS_PER_GENERATION, _NEVER)
        np.maximum.at(lacks_up_to, told.row[~has], told.versions[~has])
        np.minimum.at(has_from, told.row[has], told.versions[has])
        members = self._plan.members(trainer, n)
        for fate in np.unique(fates[members]):
            part = members & (fates == fate)
            above, up_to = lacks_up_to[part].max(), has_from[part].min()
            between = part[told.row] & (told.versions > above) & (up_to != _NEVER)
            batch = self._batch[told.at]
            in_batch = between & (batch > above) & (batch <= up_to)
            if (np.unique(told.at[in_batch], return_counts=True)[1] == part.sum()).any():
                self.verdict.parts_told += 1
                continue
            newer = np.searchsorted(self._newest[fate], up_to, "right")  # of the events of that fate
            first_newer = self._told_at[fate][newer] if newer < len(self._newest[fate]) else len(self._events)
            as_row = between & self._is_row[told.at] & (told.at < first_newer)
            if len(np.unique(told.row[as_row])) == part.sum():
                self.verdict.parts_told_as_rows += 1
                continue
            self.verdict.lost += 1
            where = " then ".join(map(str, self._fates[:, fate]))
            self.verdict.examples.append(f"push {n} of trainer {trainer} at shard {where}: not told, versions {above} to {up_to}")


@dataclass(frozen=True, eq=False)
class _Told:
    """What was told of a generation's rows, [m] each: which row, by which event, its version and weights as they were read then."""

    row: NDArray[np.intp]
    at: NDArray[np.intp]
    versions: Versions
    rows: NDArray[np.float32]
