"""The giver's side of a hand-over of slots: gives takers their entries, page by page, and forgets them.

While slots are read ahead, the entries are the index's as of the first page; once the shard has drained they are final. docs/adr/0062 says
when they are given, and when forgotten.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvemb.scaling.move_messages import SlotEntriesReply, SlotEntriesRequest
from kvemb.schema.move_plan import DRAINING, MOVING, SHARDS
from kvemb.schema.record import make_version

from ..model.tables import Tables
from ..recovery.shard_parts import ShardParts
from ..row_log.run_set import Runs
from ..row_log.run_writer import dropped_on_error
from ..row_log.state_file import ShardState
from .slot_entries import GivenRows, SlotEntries


class SlotGiver:
    """Hands slots of one shard over; a taker that gives them back after an abort is one, too. Apply thread only."""

    def __init__(self, tables: Tables, runs: Runs, rows: GivenRows, state: Callable[[], ShardState]) -> None:
        self._tables, self._runs, self._rows, self._state = tables, runs, rows, state

    def forget(self) -> None:
        """Forget the rows found for slots that were to move."""
        self._rows.clear()

    def drop(self, slots: NDArray[np.bool_]) -> int:
        """Forget every row of these slots, durably; return how many. Called again it changes nothing.

        The row log notes that they are gone. Otherwise a row that comes back with its slot, erased and created again elsewhere, would be
        reconstructed from this shard's old records.

        Raises:
            JournalFullError, FencedError: nothing changed; call again.
        """
        dropped = [one for one in self._rows.entries(slots) if len(one.ids)]
        if dropped:
            self._note(dropped)
        self._rows.clear()
        for one in dropped:
            state = self._tables.state(one.definition)
            state.gave(one.ids)
            state.cache.forget(one.ids)
        return sum(len(one.ids) for one in dropped)

    def _note(self, dropped: list[SlotEntries]) -> None:
        now = self._state()
        as_of = make_version(now.epoch, now.k)
        with dropped_on_error([self._runs.begin(one.definition) for one in dropped]) as writers:
            for writer, one in zip(writers, dropped, strict=True):
                writer.add_erased(one.ids, as_of)
                table = now.of(one.definition)
                now = now.with_table(replace(table, n_rows=table.n_rows - len(one.ids)))
            self._runs.publish(writers, now)


PAGE_ROWS = 1 << 19


class SlotOffers:
    """The entries that one shard hands over. Thread-safe."""

    def __init__(self, parts: ShardParts, rows: GivenRows) -> None:
        self._parts, self._maps, self._shard, self._rows = parts, parts.maps, parts.shard, rows
        self._lock = threading.Lock()
        self._drained = 0  # version of the map under which the shard has written all that it had taken
        self._made: dict[tuple[int, int], list[SlotEntries]] = {}  # by the map's version and the taker

    def drained(self, version: int) -> None:
        """Note that the index is final, and its rows in storage, while the map of this version is in force."""
        with self._lock:
            self._drained = version

    def is_final(self, version: int) -> bool:
        """Whether `drained` was called for this map, and it is still in force."""
        with self._lock:
            return self._drained == version == self._maps.cluster_map.version

    def clear(self) -> None:
        """Forget the entries made for an older map."""
        with self._lock:
            self._made = {}

    def page(self, request: SlotEntriesRequest) -> SlotEntriesReply:
        cluster_map = self._maps.cluster_map
        plan, version, start = cluster_map.plan, cluster_map.version, max(0, request.start)
        with self._lock:
            final = self._drained == version
            ready = plan is not None and plan.kind == SHARDS and (plan.phase == MOVING or (plan.phase == DRAINING and final))
            if not ready or version != request.version:
                return SlotEntriesReply(False, self._parts.engine.epoch, [], b"", b"")
            if (version, request.shard) not in self._made or (start == 0 and not final):
                gives, takes = cluster_map.gives(self._shard), cluster_map.takes(request.shard)
                known = self._rows.entries(gives, final=final)
                self._made[version, request.shard] = known if (takes >= gives).all() else [one.within(takes) for one in known]
            entries = self._made[version, request.shard]
        tables = [{"definition": one.definition.to_dict(), "step": one.step, "rows": len(one.ids)} for one in entries]
        ids, versions = (_rows(entries, name, start) for name in ("ids", "versions"))
        members, epoch = self._parts.ingest.attendance.members(), self._parts.engine.epoch
        trainers, incarnations = [name for name, _ in members], [incarnation for _, incarnation in members]
        return SlotEntriesReply(True, epoch, tables, ids, versions, trainers, incarnations)


def _rows(entries: list[SlotEntries], name: str, start: int) -> bytes:
    """A page of the rows of all tables, one after the other."""
    pieces, left = [], PAGE_ROWS
    for one in entries:
        array = getattr(one, name)
        some = array[start : start + left]
        start, left = max(0, start - len(array)), left - len(some)
        pieces.append(np.ascontiguousarray(some, dtype="<u8").tobytes())
    return b"".join(pieces)
