"""A shard that takes slots asks those that give them what it is to take."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvemb.client.all_shards import AllShards
from kvemb.errors import KvembError
from kvemb.net.deadline import Deadline, WhyWaiting
from kvemb.scaling.move_messages import SLOT_ENTRIES, SlotEntriesReply, SlotEntriesRequest
from kvemb.schema.table_def import TableDef

from .slot_entries import SlotEntries, put_together

_CALL_S, _NOT_READY_S, _AWAY_S = 10.0, 0.01, 0.2
_TROUBLE_S = 60.0  # a giver that is restarted may take so long
log = logging.getLogger("paramserver")


@dataclass(frozen=True, eq=False)
class GivenEntries:
    """The answers of all givers of a plan, an entry per table.

    Args:
        epoch: the highest of theirs.
        entries: of all of them.
        members: (trainer, incarnation) of those of a sync job.
    """

    epoch: int
    entries: list[SlotEntries]
    members: list[tuple[str, int]]


class GiverQuestions:
    """A taker's questions to givers, for one version of the map at a time; on a thread of its own, since its batches go on."""

    def __init__(self, shard: int, shards: AllShards) -> None:
        self._shard, self._shards = shard, shards
        self._given_up = threading.Event()
        self.answer: GivenEntries | None = None
        self._away = WhyWaiting()

    @property
    def trouble(self) -> str:
        """Why a giver does not answer, once it is away for longer than a restart takes; any thread."""
        return self._away.lasting(_TROUBLE_S)

    def ask(self, version: int, givers: Sequence[int]) -> None:
        """Begin to ask; `answer` has it in the end."""
        self.give_up()
        self._away.over()
        self.answer, self._given_up = None, threading.Event()
        threading.Thread(target=self._run, args=(version, givers, self._given_up), name="kvemb-handover", daemon=True).start()

    def give_up(self) -> None:
        """Ask no more."""
        self._given_up.set()

    def _run(self, version: int, givers: Sequence[int], given_up: threading.Event) -> None:
        said = [one for giver in givers if (one := self._ask_one(version, giver, given_up)) is not None]
        if not given_up.is_set():
            entries = put_together(one for given in said for one in given.entries)
            self.answer = GivenEntries(max(given.epoch for given in said), entries, said[-1].members)

    def _ask_one(self, version: int, giver: int, given_up: threading.Event) -> GivenEntries | None:
        """The answer of one giver; None once it is not wanted any more."""
        while not given_up.is_set():
            try:
                found = self._pages(giver, version)
                self._away.over()
                if found is not None:
                    return found
                given_up.wait(_NOT_READY_S)
            except KvembError as error:
                said = f"shard {giver} does not say what it hands over: {type(error).__name__}: {error}"
                if not self._away.why:
                    log.warning("%s", said)
                self._away.is_news(said)
                given_up.wait(_AWAY_S)
        return None

    def _pages(self, giver: int, version: int) -> GivenEntries | None:
        """All entries of one giver; None while it is not ready, and where its process was replaced between two pages."""
        pages: list[SlotEntriesReply] = []
        n_had, n_rows = 0, 1
        while n_had < n_rows or not pages:
            request = SlotEntriesRequest(version, self._shard, n_had)
            page = self._shards.call(giver, SLOT_ENTRIES, request, Deadline.after(_CALL_S))
            if not page.ready or (pages and (page.epoch, page.tables) != (pages[0].epoch, pages[0].tables)):
                return None
            pages.append(page)
            n_had, n_rows = n_had + len(page.ids) // 8, sum(int(table["rows"]) for table in page.tables)
            if not page.ids:
                break
        if n_had != n_rows:
            return None
        ids, versions = (
            np.frombuffer(b"".join(getattr(page, name) for page in pages), "<u8").astype(np.uint64) for name in ("ids", "versions")
        )
        entries, start = [], 0
        for table in pages[0].tables:
            rows = slice(start, start := start + int(table["rows"]))
            entries.append(SlotEntries(TableDef.from_dict(table["definition"]), int(table["step"]), ids[rows], versions[rows]))
        return GivenEntries(pages[0].epoch, entries, list(zip(pages[-1].trainers, pages[-1].incarnations, strict=False)))
